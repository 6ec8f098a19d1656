"""Where a run is: a header of plain values and one row of integers a stream.

There is nothing else to save. A stream holds no data that cannot be read again from its row, so the state is a few
kilobytes, the same for any amount of data, and whoever holds the rows of all streams can go on with any number of ranks.

Columns go by source NAME: for each source the epoch and position from which its documents have to be drawn again, the tokens
taken from it, the tokens drawn since the weights last changed (the mixture's counts), and the `shuffle_window` in force (low
half: in that epoch, high half: in later ones that were begun, 0 if none). Then what was counted, and the documents that were
drawn from those positions on and are not all used up: `ahead` has a bit for each, set if it is used, below a leading 1;
`drawn` says which source each is from; `offset` counts the tokens used of the oldest unused one. A stream that packs its
documents one after the other has one such document, the one in flight; `best_fit` chooses from up to `LOOK_AHEAD`.

Legend: S streams, K columns.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lightning_fms.versions import Migration, check_version, migrate

FIRST_RELEASED, VERSION = 5, 5
MIGRATIONS: dict[int, Migration] = {}
"""What turns a state of that version into one of the next; 1 to 4 were never in a release."""

PER_SOURCE = ("epoch", "position", "tokens", "since", "window")
COUNTERS = ("padding", "split", "cut", "skipped")
"""Tokens of padding, tokens in another row than their document's beginning, tokens cut off, documents given up."""

LOOK_AHEAD = 62
"""Documents drawn and not all used, at most: as many bits, and their leading 1, as fit into a positive int64."""

_BITS = 62
_FIXED = ("seed", "num_streams")


class Columns:
    """Places of the columns of a state row.

    Args:
        sources: Source names, in the order of their columns.
    """

    def __init__(self, sources: Sequence[str]) -> None:
        self.sources = list(sources)
        width, base = len(PER_SOURCE), len(PER_SOURCE) * len(self.sources)
        self.epoch, self.position, self.tokens, self.since, self.window = (slice(i, base, width) for i in range(width))
        self.counters = slice(base, base + len(COUNTERS))
        self.padding, self.split, self.cut, self.skipped, self.offset, self.ahead = range(base, base + 6)
        self._bits = max(1, (len(self.sources) - 1).bit_length())
        self._packed = _BITS // self._bits
        self.drawn = slice(base + 6, base + 6 + -(-LOOK_AHEAD // self._packed))
        self.width = self.drawn.stop

    def tokens_of(self, source: int) -> int:
        """Return the column of the tokens taken from a source."""
        return self.tokens.start + source * len(PER_SOURCE)

    def fresh(self, streams: int, shuffle_window: int) -> np.ndarray:
        """Return the rows of a run that has read nothing (int64 `[S, K]`)."""
        rows = np.zeros((streams, self.width), dtype=np.int64)
        rows[:, self.window] = shuffle_window
        rows[:, self.ahead] = 1
        return rows

    def read_ahead(self, row: np.ndarray) -> list[tuple[int, bool]]:
        """Return source, and whether it is used up, of every document drawn, in the order of the draws."""
        ahead, words = int(row[self.ahead]), row[self.drawn].tolist()
        mask, bits, packed = (1 << self._bits) - 1, self._bits, self._packed
        return [
            (words[i // packed] >> (i % packed * bits) & mask, bool(ahead >> i & 1))
            for i in range(ahead.bit_length() - 1)
        ]

    def write_ahead(self, row: np.ndarray, drawn: Sequence[tuple[int, bool]]) -> None:
        """Set what `read_ahead` returns."""
        assert len(drawn) <= LOOK_AHEAD, len(drawn)
        ahead, words = 1 << len(drawn), [0] * (self.drawn.stop - self.drawn.start)
        for i, (source, used) in enumerate(drawn):
            ahead |= used << i
            words[i // self._packed] |= source << (i % self._packed * self._bits)
        row[self.ahead], row[self.drawn] = ahead, words

    def adopt(self, rows: np.ndarray, names: Sequence[str], shuffle_window: int) -> np.ndarray:
        """Return rows in these columns from rows whose columns belong to `names`, all of which these columns have."""
        old, new = Columns(names), self.fresh(len(rows), shuffle_window)
        place = [self.sources.index(name) for name in old.sources]
        width = len(PER_SOURCE)
        for i, target in enumerate(place):
            new[:, target * width : (target + 1) * width] = rows[:, i * width : (i + 1) * width]
        new[:, self.counters], new[:, self.offset] = rows[:, old.counters], rows[:, old.offset]
        for before, after in zip(rows, new, strict=True):
            self.write_ahead(after, [(place[source], used) for source, used in old.read_ahead(before)])
        return new


State = dict[str, Any]
"""`{"header": {...}, "streams": int64 [n], "rows": int64 [n, K]}`: plain values and tensors only."""


def as_written_now(state: State) -> State:
    """Return a state as this release writes it, whichever release wrote it.

    Raises:
        ValueError: If its version is newer than ours, was never released, or is missing.
    """
    header = state.get("header")
    version = header.get("version") if isinstance(header, dict) else None
    version = check_version(version, FIRST_RELEASED, VERSION, "the data state")
    return migrate({**state, "header": dict(state["header"])}, version, VERSION, MIGRATIONS)


def make_state(header: dict[str, Any], streams: np.ndarray, rows: np.ndarray) -> State:
    """Return a state of some or all streams that shares no memory with its arguments."""
    return {"header": dict(header), "streams": torch.from_numpy(streams.copy()), "rows": torch.from_numpy(rows.copy())}


def give_up_begun(rows: np.ndarray, columns: Columns, absent: Sequence[str] = (), changed: Sequence[str] = ()) -> int:
    """Give up the rest of documents that were begun and cannot be gone on with.

    Args:
        rows: int64 `[S, K]`, changed in place.
        columns: Their columns.
        absent: Sources that are not part of the run now: what was drawn of them and is not begun is drawn when they are back.
        changed: Sources whose documents make other tokens than before, so that offsets into them mean nothing.

    Returns:
        How many documents lose their rest; they are counted as skipped.
    """
    gone, other = ({columns.sources.index(name) for name in names} for names in (absent, changed))
    lost = 0
    for row in rows:
        drawn = columns.read_ahead(row)
        if row[columns.offset]:
            first = next(i for i, (_, used) in enumerate(drawn) if not used)
            if drawn[first][0] in gone | other:
                drawn[first] = (drawn[first][0], True)
                row[columns.offset] = 0
                row[columns.skipped] += 1
                lost += 1
        # Of a source that is not there, what waits behind its last used document is not drawn yet.
        drawn = [(s, used) for i, (s, used) in enumerate(drawn) if s not in gone or (s, True) in drawn[i:]]
        columns.write_ahead(row, drawn)
    return lost


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
        saved: Header of the state, as this release writes it.
        current: Header of the run that is to go on from it.

    Raises:
        ValueError: With the first difference, its two values, and the way out.
    """
    for key in _FIXED:
        if saved[key] != current[key]:
            raise ValueError(
                f"the data state is of another run: {key} was {saved[key]} and is {current[key]}; "
                f"set {key}={saved[key]} where the data is built (fms-train: data.{key}={saved[key]}) to go on with it, or start "
                "anew without the state"
            )
    shared = set(saved["listings"]) & set(current["listings"])
    if not shared:
        raise ValueError(
            f"the data state is of another run: its sources are {sorted(saved['listings'])}, "
            f"this run's are {sorted(current['listings'])}"
        )
    for name in sorted(shared):
        then, now = saved["listings"][name], current["listings"][name]
        if then["cut"] != now["cut"]:
            raise ValueError(
                f"source {name!r}: its files were cut into documents by {then['cut']} when the run started and are by "
                f"{now['cut']} now, which moves every document; set it back, or add the files as another source"
            )
        if then["digest"] != now["digest"]:
            counts_differ = any(then[key] != now[key] for key in ("files", "bytes"))
            raise ValueError(
                f"source {name!r} is not what the run started with: {then['files']} files of {then['bytes']:,} bytes then, "
                f"{now['files']} files of {now['bytes']:,} bytes now{'' if counts_differ else ', of other names or sizes each'}; "
                "restore its files, and add new ones as another source"
            )
