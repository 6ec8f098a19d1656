"""Which documents of a source a stream reads in an epoch, and in which order.

In every epoch a keyed permutation puts the fragments of a source in line; the line is cut into S segments of equal bytes,
inside a fragment where needed, and another permutation says which stream gets which segment. Within its segment a stream
walks through windows (fixed byte ranges of a fragment) and reads the documents of a window in a permuted order, in groups
of `shuffle_window`. Small files are less than a window, and one after the other they would not mix: up to 16 neighbours, of
16 MiB together, are read in turn, a document of each, as if they were one window. Each document starts in exactly one
window of one segment, so exactly one stream reads it, once.

Position and document are functions of each other. A position is one int64, `window << 32 | index in the window`; where K
files take turns, the index is `K * (place in the file's order) + file`, so that a file that cannot be read is a hole which
moves nothing else. Resume opens what is next and goes on; nothing is replayed and nothing but the offsets of the current
window is held.

Legend: F fragments, S streams, K files in turn.
"""

from typing import NamedTuple

import numpy as np

from lightning_fms.data.order import Permutation, derive_key
from lightning_fms.data.sources import Document, DocumentError, Source

WINDOW_BYTES = 4 << 20
"""Bytes of a window: its offsets take kilobytes, and reading it to find them takes milliseconds."""

IN_TURN = 16
"""Small files read in turn, at most: with dozens of streams, a thousand files mix."""

TURN_BYTES = 16 << 20
"""Bytes of small files read in turn, at most: their offsets are held, 12 bytes a document."""

_LINES = 3  # epochs whose line of fragments is kept: the streams of a source are rarely further apart
_INDEX_BITS = 32
_INDEX_MASK = (1 << _INDEX_BITS) - 1


class Unsearchable(DocumentError):
    """A range of a file in which documents cannot be found.

    span: which: file, start, stop. behind: the position to go on from. alone: whether nothing else is left in the window; then
    all of it is passed over, otherwise the file's turn is. counts: whether the stream comes to the range for the first time.
    """

    def __init__(
        self, error: DocumentError, span: tuple[int, int, int], behind: int, alone: bool, counts: bool
    ) -> None:
        super().__init__(str(error))
        self.span, self.behind, self.alone, self.counts = span, behind, alone, counts


class SourceOrder:
    """Orders of one source, for all streams and epochs.

    Args:
        source: Where the documents are.
        name: The source's name in the run; part of every key.
        seed: Seed of the run.
        streams: S.
    """

    def __init__(self, source: Source, name: str, seed: int, streams: int) -> None:
        self.source, self.name, self.seed, self.streams = source, name, seed, streams
        self.file, self.start, self.size = source.listing.fragments
        self.total_bytes = int(self.size.sum())
        self._lines: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def _line(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the fragments in line order, where each begins in the line (`[F + 1]`, bytes), and each stream's place."""
        if epoch not in self._lines:
            order = self._permuted(len(self.size), epoch, "fragments")
            begin = np.concatenate(([0], np.cumsum(self.size[order])))
            self._lines[epoch] = order, begin, self._permuted(self.streams, epoch, "segments")
            if len(self._lines) > _LINES:
                del self._lines[next(iter(self._lines))]
        return self._lines[epoch]

    def _permuted(self, count: int, epoch: int, what: str) -> np.ndarray:
        return Permutation(count, derive_key(self.seed, self.name, epoch, what))(np.arange(count))

    def segment(self, stream: int, epoch: int, shuffle_window: int) -> "Segment":
        """Return what a stream reads of the source in an epoch."""
        line, begin, places = self._line(epoch)
        place = int(places[stream])
        low = self.total_bytes * place // self.streams
        high = self.total_bytes * (place + 1) // self.streams
        first = int(np.searchsorted(begin, low, side="right")) - 1
        last = int(np.searchsorted(begin, high, side="left"))
        fragments = line[first:last] if high > low else line[:0]
        begins, ends = begin[first : first + len(fragments)], begin[first + 1 : first + 1 + len(fragments)]
        offset = self.start[fragments] - begins  # from a place in the line to one in the file
        starts, stops = np.maximum(begins, low) + offset, np.minimum(ends, high) + offset
        key = derive_key(self.seed, self.name, epoch, "documents")
        return Segment(self.source, self.file[fragments], starts, stops, shuffle_window, key)


class _Part(NamedTuple):
    """A byte range of a file, its documents, and their order."""

    file: int
    base: int
    starts: np.ndarray
    refs: np.ndarray
    order: np.ndarray


class Segment:
    """The windows of one stream, source and epoch.

    Args:
        source: Where the documents are.
        files: int64, the file of every piece of a fragment, in line order.
        starts: int64, first byte of every piece in its file.
        stops: int64, end of every piece in its file.
        shuffle_window: Documents that are permuted together.
        key: Key of the permutations of this source and epoch.
    """

    def __init__(
        self, source: Source, files: np.ndarray, starts: np.ndarray, stops: np.ndarray, shuffle_window: int, key: int
    ) -> None:
        self._source, self._files, self._starts, self._stops = source, files, starts, stops
        self._shuffle_window, self._key = shuffle_window, key
        ranges = -(-stops // WINDOW_BYTES) - starts // WINDOW_BYTES
        self._small = ranges == 1
        # A window is a range of a large piece, or as many small pieces in a row as TURN_BYTES and IN_TURN allow.
        before = np.cumsum(self._small) - 1
        size = np.where(self._small, stops - starts, 0)
        cut = np.stack((before // IN_TURN, (np.cumsum(size) - size) // TURN_BYTES, self._small))
        begins = np.ones(len(files), dtype=bool)
        begins[1:] = (cut[:, 1:] != cut[:, :-1]).any(axis=0)
        self._first_window = np.concatenate(([0], np.cumsum(np.where(self._small, begins, ranges))))
        self._current = -1

    @property
    def windows(self) -> int:
        """Number of windows."""
        return int(self._first_window[-1])

    def find(self, position: int) -> tuple[int, int, int, int] | None:
        """Return the first document at or after a position: `(position, file, start, ref)`; `None` at the end.

        Raises:
            Unsearchable: If a file there cannot be read.
        """
        window, index = position >> _INDEX_BITS, position & _INDEX_MASK
        entered = index
        while window < self.windows:
            self._open(window)
            missed = 0
            while missed < len(self._parts):
                turn, which = divmod(index, len(self._parts))
                part = self._part(which)
                if isinstance(part, DocumentError):
                    turns = max(self._longest(), 1)
                    # A position behind all turns says that files have become unreadable since: nothing of them is left. At
                    # the very end of them it may have been so before: then it is told of again, and not counted again.
                    beyond = entered - len(self._parts) * turns
                    alone = len(self._parts) == 1 or beyond >= 0
                    if alone or turn < turns:
                        piece, start, stop = self._ranges[which]
                        behind = (window + 1) << _INDEX_BITS if alone else window << _INDEX_BITS | index + 1
                        counts = turn == 0 or (alone and beyond != 0)
                        raise Unsearchable(part, (int(self._files[piece]), start, stop), behind, alone, counts)
                elif turn < len(part.order):
                    document = part.order[turn]
                    start, ref = part.base + int(part.starts[document]), int(part.refs[document])
                    return window << _INDEX_BITS | index, part.file, start, ref
                index, missed = index + 1, missed + 1
            window, index, entered = window + 1, 0, 0
        return None

    def read(self, file: int, start: int, ref: int) -> Document:
        """Read a document that `find` returned."""
        return self._source.read(file, start, ref)

    def _open(self, window: int) -> None:
        """Find out which ranges of files take turns in a window."""
        if window == self._current:
            return
        piece, after = (np.searchsorted(self._first_window, [window, window + 1], side="right") - 1).tolist()
        if self._small[piece]:
            self._ranges = [(p, int(self._starts[p]), int(self._stops[p])) for p in range(piece, after)]
        else:
            begin, end = int(self._starts[piece]), int(self._stops[piece])
            mark = (begin // WINDOW_BYTES + window - int(self._first_window[piece])) * WINDOW_BYTES
            self._ranges = [(piece, max(begin, mark), min(end, mark + WINDOW_BYTES))]
        self._parts: list[_Part | DocumentError | None] = [None] * len(self._ranges)
        self._current = window

    def _part(self, which: int) -> _Part | DocumentError:
        """Return the documents of a range and their order, or why they cannot be found."""
        part = self._parts[which]
        if part is None:
            piece, base, end = self._ranges[which]
            file = int(self._files[piece])
            try:
                starts, refs = self._source.window(file, base, end)
                part = _Part(file, base, starts, refs, self._permuted(file, base, len(starts)))
            except DocumentError as error:
                part = error
            self._parts[which] = part
        return part

    def _longest(self) -> int:
        """Return the most documents that a range of the window has."""
        parts = [self._part(which) for which in range(len(self._parts))]
        return max((len(part.order) for part in parts if not isinstance(part, DocumentError)), default=0)

    def _permuted(self, file: int, base: int, count: int) -> np.ndarray:
        key = derive_key(self._key, file, base)
        groups = []
        for start in range(0, count, self._shuffle_window):
            size = min(self._shuffle_window, count - start)
            groups.append(start + Permutation(size, key + start)(np.arange(size)))
        return np.concatenate(groups).astype(np.uint32) if groups else np.empty(0, dtype=np.uint32)
