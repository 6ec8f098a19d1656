"""FP8 training as a Lightning precision plugin."""
