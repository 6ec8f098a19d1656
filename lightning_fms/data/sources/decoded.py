"""Formats whose documents cannot be read in place: they are decoded on first touch, a unit at a time.

A unit is what can be decoded alone: a compressed file, some row groups, some record batches. Its documents have no byte
addresses, so document `i` of the `n` of a unit gets the address at the same fraction of the unit's bytes,
`start + i * size // n`. Segments and windows cut a file by bytes as they do any other, and each document lies in one range.

Nothing is read when the source is opened. What units a file has is found when a stream first comes to the file; a unit is
decoded into the cache when a stream first reads one of its documents (a compressed file: already to count them).
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lightning_fms.data.sources.cache import Cache, cache_key
from lightning_fms.data.sources.files import FileReader
from lightning_fms.data.sources.listing import Listing
from lightning_fms.data.sources.source import Document, DocumentError, Window
from lightning_fms.data.sources.units import Item, Units, write_unit

UNIT_BYTES = 4 << 20
"""Row groups and record batches are taken together until they have so many bytes: a unit costs files."""

_LAYOUTS, _FAILED = 1024, 1024


class Layout(NamedTuple):
    """The units of a file.

    starts: `[units + 1]`, address of each unit's first document; the last is the size of the file.
    rows: `[units + 1]`, number in the file of each unit's first document; the last is the number of documents.
    parts: `[units + 1]`, number of each unit's first row group or record batch; the last is their number.
    """

    starts: list[int]
    rows: list[int]
    parts: list[int]


class _File(NamedTuple):
    identity: tuple
    layout: Layout
    keys: dict[int, str]  # of the units, in the cache


class Decoded(ABC):
    """A source whose documents are read from decoded units.

    Args:
        listing: Where the files are.
        cache: Where decoded units are kept.
        options: What else the decoded documents depend on; part of the cache's keys.
        pickled: Whether documents are records rather than texts.
    """

    def __init__(self, listing: Listing, cache: Cache, options: tuple, pickled: bool) -> None:
        self.listing = listing
        self._files = FileReader(listing, keep_open=2)  # a decoder reads one from its start to its end
        self._units = Units(cache)
        self._options, self._pickled = options, pickled
        self._layouts: OrderedDict[int, _File] = OrderedDict()
        self._failed: OrderedDict[str, str] = OrderedDict()  # by key of the unit: what is broken is not decoded again

    @abstractmethod
    def layout(self, file: int) -> Layout:
        """Find the units of a file."""

    @abstractmethod
    def decode(self, file: int, layout: Layout, unit: int) -> Iterator[Item]:
        """Decode the documents of a unit, in order, holding few at a time."""

    def window(self, file: int, start: int, stop: int) -> Window:
        """Find the documents whose addresses lie in bytes `[start, stop)`."""
        layout = self._file(file).layout
        addresses, rows = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        unit = bisect_right(layout.starts, start) - 1
        while unit < len(layout.starts) - 1 and layout.starts[unit] < stop:
            low, size = layout.starts[unit], layout.starts[unit + 1] - layout.starts[unit]
            count = layout.rows[unit + 1] - layout.rows[unit]
            first, last = (min(max(-(-(edge - low) * count // size), 0), count) for edge in (start, stop))
            found = np.arange(first, last, dtype=np.int64)
            whole, rest = divmod(size, max(count, 1))
            addresses.append(low - start + found * whole + found * rest // max(count, 1))  # found * size may overflow
            rows.append(layout.rows[unit] + found)
            unit += 1
        return Window(np.concatenate(addresses).astype(np.uint32), np.concatenate(rows).astype(np.uint32))

    def read(self, file: int, start: int, row: int) -> Document:
        """Read the document with number `row` in the file; its address is not needed."""
        identity, layout, keys = self._file(file)
        unit = bisect_right(layout.rows, row) - 1
        if unit not in keys:
            keys[unit] = self._key(identity, unit)
        try:
            write = partial(self._write, file, layout, unit)
            return self._units.read(keys[unit], row - layout.rows[unit], write)
        except DocumentError as error:
            raise self._named(file, error) from None

    def count(self, file: int) -> int:
        """Count the documents of a file by decoding it as its unit 0."""
        write = partial(self._write, file, Layout([0, 0], [0, 0], [0, 0]), 0)
        return self._units.rows(self._key(self._files.identity(file), 0), write)

    def _file(self, file: int) -> _File:
        if file not in self._layouts:
            identity = self._files.identity(file)
            try:
                self._layouts[file] = _File(identity, self.layout(file), {})
            except DocumentError as error:
                raise self._named(file, error) from None
            while len(self._layouts) > _LAYOUTS:
                self._layouts.popitem(last=False)
        self._layouts.move_to_end(file)
        return self._layouts[file]

    def _key(self, identity: tuple, unit: int) -> str:
        return cache_key("unit", type(self).__name__, self._options, identity, unit)

    def _write(self, file: int, layout: Layout, unit: int, folder: Path) -> None:
        identity = self._files.identity(file)
        if file in self._layouts and identity != self._layouts[file].identity:
            raise DocumentError("was replaced while the run reads it; restore it, or restart the run")
        key = self._key(identity, unit)
        if key in self._failed:
            raise DocumentError(self._failed[key])
        try:
            rows = write_unit(folder, self.decode(file, layout, unit), self._pickled)
        except DocumentError as error:
            self._failed[key] = str(error)
            while len(self._failed) > _FAILED:
                self._failed.popitem(last=False)
            raise
        expected = layout.rows[unit + 1] - layout.rows[unit]
        if rows != expected and file in self._layouts:
            raise DocumentError(f"holds {rows} documents where it claims {expected}; restore it")

    def _named(self, file: int, error: DocumentError) -> DocumentError:
        path = str(self.listing.path(file))
        return error if str(error).startswith(path) else DocumentError(f"{path}: {error}")


def group(sizes: np.ndarray, rows: np.ndarray, file_size: int) -> Layout:
    """Group neighbouring parts of a file into units of at least `UNIT_BYTES`.

    Args:
        sizes: int64, bytes of each part (row group, record batch).
        rows: int64, documents of each part.
        file_size: Bytes of the file, which the units share in proportion to theirs.
    """
    ends = np.concatenate(([0], np.cumsum(sizes)))
    edges = [0]
    for part in range(1, len(sizes)):
        if ends[part] - ends[edges[-1]] >= UNIT_BYTES and ends[-1] - ends[part] >= UNIT_BYTES:
            edges.append(part)
    edges.append(len(sizes))
    total = max(int(ends[-1]), 1)
    starts = [file_size * int(ends[part]) // total for part in edges[:-1]]
    return Layout([*starts, file_size], np.concatenate(([0], np.cumsum(rows)))[edges].astype(np.int64).tolist(), edges)
