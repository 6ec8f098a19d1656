"""From documents to rows, and from rows to the tensors of a batch.

`Concat` puts a stream's documents into one endless line and cuts it every `seq_len` tokens: no padding, and documents are cut
wherever a row ends. `BestFit` puts whole documents into a row, the oldest that waits first and then always the longest that
still fits (Ding et al., *Fewer Truncations Improve Language Modeling*, 2024): a little padding, and only documents longer
than a row are cut, into pieces that together hold all their tokens.

A row carries one token more than its inputs: `labels[t]` is the token after `input_ids[t]`. Where a document goes on behind
the row, that is the first input of the next row, so every token is an input once and a target once, except for the first
token of a document, which `BestFit` never makes a target (its neighbours in the row are there by accident) and `Concat` does
not with `mask_first`. Only tokens and the places where documents start travel between processes; the rest follows from them.

Legend: R rows, T seq_len.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_fms.data.draws import Draws

IGNORE = -100
"""Label of a position that is no target: the `ignore_index` that `cross_entropy` has by default."""

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Rows:
    """Packed rows of one or more streams.

    Args:
        tokens: int32 `[R, T + 1]`; what is behind a row's last token is 0.
        known: int32 `[R]`, how many of them are tokens: T + 1 unless the row ends with padding or with its document.
        starts: int32, the places in `[0, T]` where a document starts, row after row.
        counts: int32 `[R]`, how many of `starts` belong to each row.
    """

    tokens: np.ndarray
    known: np.ndarray
    starts: np.ndarray
    counts: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def row(tokens: np.ndarray, known: int, starts: list[int]) -> "Rows":
        """Return a single row."""
        counts = np.array([len(starts)], dtype=np.int32)
        return Rows(tokens[None], np.array([known], dtype=np.int32), np.array(starts, dtype=np.int32), counts)

    @staticmethod
    def none(seq_len: int) -> "Rows":
        """Return no rows."""
        nothing = np.empty(0, np.int32)
        return Rows(np.empty((0, seq_len + 1), np.int32), nothing, nothing, nothing)

    def take(self, rows: np.ndarray) -> "Rows":
        """Return the rows at the given indices, in that order."""
        ends = np.cumsum(self.counts)
        pieces = [self.starts[ends[r] - self.counts[r] : ends[r]] for r in rows]
        starts = np.concatenate(pieces) if pieces else self.starts[:0]
        return Rows(self.tokens[rows], self.known[rows], starts, self.counts[rows])

    def between(self, low: int, high: int) -> "Rows":
        """Return rows `low` to `high - 1`; nothing is copied."""
        if low == 0 and high == len(self.tokens):
            return self
        starts = self.starts[self._begins[low] : self._begins[high]]
        return Rows(self.tokens[low:high], self.known[low:high], starts, self.counts[low:high])

    @cached_property
    def _begins(self) -> list[int]:
        """Where the `starts` of each row begin, and their end."""
        return [0, *np.cumsum(self.counts).tolist()]

    def concatenate(self, others: "list[Rows]") -> "Rows":
        """Put rows of equal length behind these."""
        return Rows(
            **{name: np.concatenate([part.arrays()[name] for part in (self, *others)]) for name in self.arrays()}
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """Return what a process has to send, for `Rows(**arrays)` on the other side."""
        return {"tokens": self.tokens, "known": self.known, "starts": self.starts, "counts": self.counts}


class RowBuffer:
    """Rows under way, put in any order.

    Args:
        count: R.
        seq_len: T.
        memory: int32 `[>= R, T + 1]`, where the tokens go; `None` takes new memory.
    """

    def __init__(self, count: int, seq_len: int, memory: np.ndarray | None = None) -> None:
        self.tokens = np.empty((count, seq_len + 1), dtype=np.int32) if memory is None else memory[:count]
        self.known = np.full(count, seq_len + 1, dtype=np.int32)
        self.starts: list[Any] = [()] * count

    def put(self, place: int, row: Rows) -> None:
        """Put one row at a place."""
        self.tokens[place], self.known[place], self.starts[place] = row.tokens[0], row.known[0], row.starts

    def rows(self) -> Rows:
        """Return all rows; each place must have been put."""
        counts = np.array([len(starts) for starts in self.starts], dtype=np.int32)
        filled = [starts for starts in self.starts if len(starts)]
        starts = np.concatenate(filled, dtype=np.int32) if filled else np.empty(0, np.int32)
        return Rows(self.tokens, self.known, starts, counts)


class Packing(Protocol):
    """How a stream's documents become rows, and rows a batch."""

    @property
    def name(self) -> str:
        """What the state calls it."""
        ...

    @property
    def full(self) -> bool:
        """Whether every row has the same number of targets."""
        ...

    @property
    def row_tokens(self) -> int:
        """How many tokens a row takes, or how many would take as much memory."""
        ...

    def next_row(self, draws: Draws) -> Any:
        """Use up documents for one row and return it."""
        ...

    def next_rows(self, draws: Draws, buffer: Any, places: np.ndarray) -> int:
        """Put rows into a buffer's first places without a draw, as many as it takes to save time; return how many (0: none)."""
        ...

    def buffer(self, count: int, memory: np.ndarray | None) -> Any:
        """Return a place to put `count` rows, in given memory if it can; with methods `put` and `rows` as `RowBuffer` has."""
        ...

    def rows(self, **arrays: np.ndarray) -> Any:
        """Return rows from what `arrays` of rows gave in another process; none, if nothing came."""
        ...

    def merge(self, parts: list[Any], place: np.ndarray) -> Any:
        """Return row `place[i]` of all parts, one after the other, as row `i`; nothing of it shares memory with the parts."""
        ...

    def targets(self, rows: Any) -> int:
        """Return how many positions of rows are targets."""
        ...

    def valid(self, rows: Any) -> np.ndarray:
        """Return which rows hold anything (bool `[R]`)."""
        ...

    def collate(self, rows: Any, size: int) -> Batch:
        """Build the tensors of a micro-batch of `size` rows from at most that many."""
        ...


@dataclass(frozen=True)
class TokenPacking:
    """What the packings of tokens have in common.

    Args:
        seq_len: T.
        mask_first: Whether the first token of a document is no target.
    """

    seq_len: int
    mask_first: bool = False

    @property
    def row_tokens(self) -> int:
        """T."""
        return self.seq_len

    def next_rows(self, draws: Draws, buffer: RowBuffer, places: np.ndarray) -> int:
        """Put no rows: each needs a draw."""
        return 0

    def buffer(self, count: int, memory: np.ndarray | None = None) -> RowBuffer:
        """Return a place to put `count` rows."""
        return RowBuffer(count, self.seq_len, memory)

    def merge(self, parts: list[Rows], place: np.ndarray) -> Rows:
        """Return row `place[i]` of all parts, one after the other, as row `i`; nothing of it shares memory with the parts."""
        return merge(parts, place)

    def rows(self, **arrays: np.ndarray) -> Rows:
        """Return rows from their arrays; none, if there are no arrays."""
        return Rows(**arrays) if arrays else Rows.none(self.seq_len)

    def targets(self, rows: Rows) -> int:
        """Return how many positions are targets."""
        total = int(np.maximum(rows.known - 1, 0).sum())
        return total - int(np.count_nonzero(rows.starts)) if self.mask_first else total

    def valid(self, rows: Rows) -> np.ndarray:
        """Return which rows hold tokens (bool `[R]`)."""
        return rows.known > 0

    def collate(self, rows: Rows, size: int) -> Batch:
        """Build the tensors of a micro-batch; see `collate`."""
        return collate(rows, size, self.mask_first)


class Concat(TokenPacking):
    """Documents in one line, cut every `seq_len` tokens."""

    name: ClassVar[str] = "concat"

    @property
    def full(self) -> bool:
        """Whether every row has the same number of targets."""
        return not self.mask_first

    def next_rows(self, draws: Draws, buffer: RowBuffer, places: np.ndarray) -> int:
        """Cut rows that lie inside one long document, all at once."""
        current, offset = draws.current(), draws.offset
        if current is None or draws.trace is not None:
            return 0
        count = min(len(places), (current.length - 1 - offset) // self.seq_len)
        if count < 1:
            return 0
        buffer.tokens[places[:count]] = _cut(current.content, offset, count, self.seq_len)
        if offset == 0:
            buffer.starts[places[0]] = (0,)
        draws.use(current, count * self.seq_len)
        return count

    def next_row(self, draws: Draws) -> Rows:
        """Fill a row from the line; it ends early at the end of the data only."""
        out, starts, filled = np.zeros(self.seq_len + 1, dtype=np.int32), [], 0
        while (oldest := draws.oldest()) is not None:
            offset = draws.offset
            if offset == 0:
                starts.append(filled)
            if filled == self.seq_len:
                out[filled] = oldest.content[offset]  # the last label, an input of the next row
                return Rows.row(out, filled + 1, starts)
            taken = min(self.seq_len - filled, oldest.length - offset)
            out[filled : filled + taken] = oldest.content[offset : offset + taken]
            draws.use(oldest, taken)
            filled += taken
        draws.count(draws.recipe.columns.padding, self.seq_len - filled)
        return Rows.row(out, filled, starts)


class BestFit(TokenPacking):
    """Whole documents in a row, the longest that fits first; no target where a document starts."""

    name: ClassVar[str] = "best_fit"
    full: ClassVar[bool] = False

    def __init__(self, seq_len: int) -> None:
        super().__init__(seq_len, mask_first=True)

    def next_row(self, draws: Draws) -> Rows:
        """Fill a row with the oldest document, or with its next piece, and whatever fits beside it."""
        out, columns = np.zeros(self.seq_len + 1, dtype=np.int32), draws.recipe.columns
        waiting = draws.look_ahead()
        if not waiting:
            draws.count(columns.padding, self.seq_len)
            return Rows.row(out, 0, [])
        oldest, offset = waiting[0], draws.offset
        rest = oldest.content[offset : offset + self.seq_len + 1]
        out[: len(rest)] = rest
        filled = min(len(rest), self.seq_len)
        if offset:
            draws.count(columns.split, filled)
        starts = [] if offset else [0]
        draws.use(oldest, filled)
        if len(rest) > self.seq_len:
            return Rows.row(out, self.seq_len + 1, starts)
        while filled < self.seq_len:
            fitting = [drawn for drawn in draws.look_ahead() if drawn.length <= self.seq_len - filled]
            if not fitting:
                break
            best = max(fitting, key=lambda drawn: drawn.length)  # the oldest of them
            starts.append(filled)
            out[filled : filled + best.length] = best.content
            filled += best.length
            draws.use(best, best.length)
        draws.count(columns.padding, self.seq_len - filled)
        return Rows.row(out, filled, starts)


def _cut(content: np.ndarray, offset: int, count: int, seq_len: int) -> np.ndarray:
    """Return rows of `seq_len` tokens and the next one, one behind the other (`[count, T + 1]`); nothing is copied."""
    size = content.itemsize
    return np.ndarray((count, seq_len + 1), content.dtype, content, offset * size, (seq_len * size, size))


def merge(parts: list[Rows], place: np.ndarray) -> Rows:
    """Put the rows of several parts in another order, each token copied once.

    Args:
        parts: Rows of equal length.
        place: int64 `[R]`, which row of the parts, counted through them, comes at each place.
    """
    tokens = np.empty((len(place), parts[0].tokens.shape[1]), dtype=np.int32)
    ends = np.cumsum([len(part) for part in parts])
    part_of_row = np.searchsorted(ends, place, side="right")
    for i, part in enumerate(parts):
        mine = np.flatnonzero(part_of_row == i)
        from_row = place[mine] - (ends[i] - len(part))
        in_order = np.array_equal(from_row, np.arange(len(part)))
        tokens[mine] = part.tokens if in_order else part.tokens[from_row]
    known, counts, starts = (
        np.concatenate([part.arrays()[name] for part in parts]) for name in ("known", "counts", "starts")
    )
    first = (np.cumsum(counts) - counts)[place]
    counts = counts[place]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return Rows(tokens, known[place], starts[np.repeat(first, counts) + within], counts)


def collate(rows: Rows, size: int, mask_first: bool = False) -> Batch:
    """Build the tensors of a micro-batch.

    Args:
        rows: At most `size` packed rows.
        size: Rows of the micro-batch; missing ones are filled with zeros, all labels ignored.
        mask_first: Whether the first token of a document is no target.

    Returns:
        `input_ids`, `labels`, `position_ids`, `document_ids`: int64 `[size, T]`; `row_valid`: bool `[size]`, false for rows
        that are no part of the step.
        `position_ids` count from the document's first token in the row; `document_ids` number the documents of a row from 0,
        padding as if it were one more.
    """
    count, seq_len = rows.tokens.shape[0], rows.tokens.shape[1] - 1
    inputs, labels = np.empty((size, seq_len), np.int64), np.empty((size, seq_len), np.int64)
    inputs[:count], labels[:count] = rows.tokens[:, :-1], rows.tokens[:, 1:]
    inputs[count:], labels[count:] = 0, IGNORE
    known = np.zeros(size, dtype=np.int64)
    known[:count] = rows.known
    row_of_start = np.repeat(np.arange(count), rows.counts)
    first = np.zeros((size, seq_len + 2), dtype=bool)
    first[row_of_start, rows.starts] = True
    if mask_first:
        labels[first[:, 1:-1]] = IGNORE
    for row in np.flatnonzero(rows.known <= seq_len).tolist():
        labels[row, max(0, known[row] - 1) :] = IGNORE
    first[np.arange(size), known] = True
    first[:, 0] = True
    # A number for each document, from 0 in each row, and its first place; both spread over its tokens.
    begins = np.flatnonzero(first[:, :seq_len])
    row_of_document, place = np.divmod(begins, seq_len)
    lengths = np.diff(begins, append=size * seq_len)
    number = np.arange(len(begins)) - np.searchsorted(row_of_document, np.arange(size))[row_of_document]
    positions = np.repeat(-place, lengths).reshape(size, seq_len)
    positions += np.arange(seq_len)
    return {
        "input_ids": torch.from_numpy(inputs),
        "labels": torch.from_numpy(labels),
        "position_ids": torch.from_numpy(positions),
        "document_ids": torch.from_numpy(np.repeat(number, lengths).reshape(size, seq_len)),
        "row_valid": torch.from_numpy(known > 0),
    }
