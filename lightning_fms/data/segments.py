"""Which documents of a source a stream reads in an epoch, and in which order.

In every epoch a keyed permutation puts the fragments of a source in line; the line is cut into S segments of equal bytes,
inside a fragment where needed, and another permutation says which stream gets which segment. Within its segment a stream
walks through windows (fixed byte ranges of a fragment) and reads the documents of a window in a permuted order, in groups
of `shuffle_window`. Each document starts in exactly one window of one segment, so exactly one stream reads it, once.

Position and document are functions of each other. A position is one int64, `window << 32 | index in the window`, so resume
opens one window and goes on; nothing is replayed and nothing but the offsets of the current window is held.

Legend: F fragments, S streams.
"""

import numpy as np

from lightning_fms.data.order import Permutation, derive_key
from lightning_fms.data.sources import Document, Source

WINDOW_BYTES = 4 << 20
"""Bytes of a window: its offsets take kilobytes, and reading it to find them takes milliseconds."""

_LINES = 3  # epochs whose line of fragments is kept: the streams of a source are rarely further apart
_INDEX_BITS = 32
_INDEX_MASK = (1 << _INDEX_BITS) - 1


def next_window(position: int) -> int:
    """Return the first position of the window behind the one of a position."""
    return ((position >> _INDEX_BITS) + 1) << _INDEX_BITS


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
        windows = -(-stops // WINDOW_BYTES) - starts // WINDOW_BYTES
        self._first_window = np.concatenate(([0], np.cumsum(windows)))
        self._current = -1

    @property
    def windows(self) -> int:
        """Number of windows."""
        return int(self._first_window[-1])

    def find(self, position: int) -> tuple[int, int, int, int] | None:
        """Return the first document at or after a position: `(position, file, start, ref)`; `None` at the end."""
        window, index = position >> _INDEX_BITS, position & _INDEX_MASK
        while window < self.windows:
            self._open(window)
            if index < len(self._order):
                document = self._order[index]
                start = self._base + int(self._documents.starts[document])
                return (window << _INDEX_BITS) | index, self._file, start, int(self._documents.refs[document])
            window, index = window + 1, 0
        return None

    def read(self, file: int, start: int, ref: int) -> Document:
        """Read a document that `find` returned."""
        return self._source.read(file, start, ref)

    def _open(self, window: int) -> None:
        """Load the offsets of a window and the order of its documents."""
        if window == self._current:
            return
        piece = int(np.searchsorted(self._first_window, window, side="right")) - 1
        begin, end = int(self._starts[piece]), int(self._stops[piece])
        mark = (begin // WINDOW_BYTES + window - int(self._first_window[piece])) * WINDOW_BYTES
        self._file, self._base = int(self._files[piece]), max(begin, mark)
        self._documents = self._source.window(self._file, self._base, min(end, mark + WINDOW_BYTES))
        self._order = self._permuted(len(self._documents.starts))
        self._current = window

    def _permuted(self, count: int) -> np.ndarray:
        key = derive_key(self._key, self._file, self._base)
        groups = []
        for start in range(0, count, self._shuffle_window):
            size = min(self._shuffle_window, count - start)
            groups.append(start + Permutation(size, key + start)(np.arange(size)))
        return np.concatenate(groups) if groups else np.empty(0, dtype=np.int64)
