"""One concern a callback: what a run shows while it trains."""
