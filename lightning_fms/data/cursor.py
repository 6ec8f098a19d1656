"""Where a run is: a header of plain values and one row of integers a stream.

There is nothing else to save. A stream holds no data that cannot be read again from its row, so the state is a few
kilobytes, the same for any amount of data, and whoever holds the rows of all streams can go on with any number of ranks.

Columns go by source NAME: for each source the epoch and position of its next document, the tokens taken from it, the tokens
drawn since the weights last changed (the mixture's counts), and the `shuffle_window` in force since its epoch began; then the
document in flight (source, epoch, position, shuffle window) and the token of it that the next row begins with.

Legend: S streams, K columns.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

VERSION = 1

PER_SOURCE = ("epoch", "position", "tokens", "since", "window")
FLIGHT = ("flight.source", "flight.epoch", "flight.position", "flight.window", "flight.offset")
NO_FLIGHT = -1

_FIXED = ("seed", "num_streams")


class Columns:
    """Places of the columns of a state row.

    Args:
        sources: Source names, in the order of their columns.
    """

    def __init__(self, sources: Sequence[str]) -> None:
        self.sources = list(sources)
        width = len(PER_SOURCE)
        self.epoch, self.position, self.tokens, self.since, self.window = (
            slice(i, width * len(self.sources), width) for i in range(width)
        )
        base = width * len(self.sources)
        self.flight = slice(base, base + len(FLIGHT))
        self.flight_source = base
        self.flight_offset = base + FLIGHT.index("flight.offset")
        self.width = base + len(FLIGHT)

    def fresh(self, streams: int, shuffle_window: int) -> np.ndarray:
        """Return the rows of a run that has read nothing (int64 `[S, K]`)."""
        rows = np.zeros((streams, self.width), dtype=np.int64)
        rows[:, self.window] = shuffle_window
        rows[:, self.flight] = NO_FLIGHT
        return rows

    def adopt(self, rows: np.ndarray, names: Sequence[str], shuffle_window: int) -> np.ndarray:
        """Return rows in these columns from rows whose columns belong to `names`, all of which these columns have."""
        old, new = Columns(names), self.fresh(len(rows), shuffle_window)
        place = np.array([self.sources.index(name) for name in old.sources], dtype=np.int64)
        width = len(PER_SOURCE)
        for i, target in enumerate(place):
            new[:, target * width : (target + 1) * width] = rows[:, i * width : (i + 1) * width]
        new[:, self.flight] = rows[:, old.flight]
        flying = rows[:, old.flight_source] != NO_FLIGHT
        new[flying, self.flight_source] = place[rows[flying, old.flight_source]]
        return new


State = dict[str, Any]
"""`{"header": {...}, "streams": int64 [n], "rows": int64 [n, K]}`: plain values and tensors only."""


def make_state(header: dict[str, Any], streams: np.ndarray, rows: np.ndarray) -> State:
    """Return a state of some or all streams that shares no memory with its arguments."""
    return {"header": dict(header), "streams": torch.from_numpy(streams.copy()), "rows": torch.from_numpy(rows.copy())}


def merge_states(states: Sequence[State]) -> State:
    """Merge the states of all ranks into the one state of the run.

    Args:
        states: `StreamLoader.state_dict()` of every rank, in any order, all taken after the same step.

    Returns:
        A state for `StreamLoader(..., state=...)` on any number of ranks.

    Raises:
        ValueError: If the states are of different runs or steps, or some stream is missing.
    """
    if not states:
        raise ValueError("merge_states got no state; pass the state_dict() of every rank")
    header = states[0]["header"]
    for other in states[1:]:
        for key in header:
            if other["header"].get(key) != header[key]:
                raise ValueError(
                    f"the states differ in {key}: {header[key]} and {other['header'].get(key)}; "
                    "merge states that all ranks took after the same step of one run"
                )
    streams = torch.cat([state["streams"] for state in states])
    found, first = np.unique(streams.numpy(), return_index=True)
    missing = sorted(set(range(header["num_streams"])) - set(found.tolist()))
    if missing:
        raise ValueError(
            f"the states lack stream {missing[0]} ({len(missing)} of {header['num_streams']}); pass every rank's"
        )
    rows = torch.cat([state["rows"] for state in states]).numpy()[first]
    return make_state(header, found, rows)


def check_same_run(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Refuse a state that belongs to another run.

    Args:
        saved: Header of the state.
        current: Header of the run that is to go on from it.

    Raises:
        ValueError: With the first difference, its two values, and the way out.
    """
    if not isinstance(saved, dict) or saved.get("version") != VERSION:
        version = saved.get("version") if isinstance(saved, dict) else None
        raise ValueError(f"data state has version {version!r}; this release reads version {VERSION}")
    for key in _FIXED:
        if saved[key] != current[key]:
            raise ValueError(
                f"the data state is of another run: {key} was {saved[key]} and is {current[key]}; "
                f"set {key}={saved[key]} to go on with it, or start anew without the state"
            )
    shared = set(saved["listings"]) & set(current["listings"])
    if not shared:
        raise ValueError(
            f"the data state is of another run: its sources are {sorted(saved['listings'])}, "
            f"this run's are {sorted(current['listings'])}"
        )
    for name in sorted(shared):
        then, now = saved["listings"][name], current["listings"][name]
        if then != now:
            raise ValueError(
                f"source {name!r} is not what the run started with: {then['files']} files of {then['bytes']:,} bytes then, "
                f"{now['files']} files of {now['bytes']:,} bytes now; restore its files, and add new ones as another source"
            )
