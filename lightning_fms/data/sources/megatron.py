"""Megatron's indexed datasets: `NAME.bin` holds the tokens of all sequences, `NAME.idx` says where each begins.

The index is a header (magic, version, type of the tokens, numbers of sequences and of documents) and three arrays: the
tokens of every sequence (int32), its first byte in `.bin` (int64), and the first sequence of every document (int64, with
one more entry, for the end). It grows with the data, to gigabytes, so it is not loaded: the documents of a byte range are
found by bisection with small reads.
"""

import struct
from bisect import bisect_left
from collections.abc import Callable

import numpy as np

from lightning_fms.data.sources.files import FileReader
from lightning_fms.data.sources.listing import Listing, Paths, list_files
from lightning_fms.data.sources.remote import Location
from lightning_fms.data.sources.source import Document, DocumentError, Window

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # by Megatron's code


_LOOKED_AT = 8  # a thousand files would take their time


def check_some(files: int, check: Callable[[int], object]) -> None:
    """See a mistake early: raise if none of the first files is what it should be; one that is not is met when it is read.

    Raises:
        DocumentError: What is wrong with the first.
    """
    first: DocumentError | None = None
    for file in range(min(files, _LOOKED_AT)):
        try:
            check(file)
            return
        except DocumentError as error:
            first = first or error
    if first is not None:
        raise first


class MegatronTokens:
    """Pairs of `.bin` and `.idx`; a document is what Megatron calls one, with all its sequences.

    Args:
        paths: The `.bin` files: file, folder, glob or list of them, or their listing. The `.idx` files lie beside them.

    Raises:
        ValueError: If an index is missing, broken, or belongs to another file.
    """

    listing: Listing
    holds_tokens = True

    def __init__(self, paths: Paths | Listing) -> None:
        listing = paths if isinstance(paths, Listing) else list_files(paths)
        bins = [i for i, name in enumerate(listing.names) if not name.endswith(".idx")]
        names = tuple(listing.names[i] for i in bins)
        self.listing, self._index_files = listing.take(bins), listing.existing(map(index_name, names))
        if missing := [name for name in map(index_name, names) if name not in self._index_files.names]:
            raise ValueError(f"{listing.root / missing[0]}: the index of a .bin file is missing; restore it")
        self._files, self._indexes = FileReader(self.listing), FileReader(self._index_files)
        self._opened: dict[int, _Index] = {}
        check_some(len(names), self._index)

    def window(self, file: int, start: int, stop: int) -> Window:
        """Find the documents whose first token is in bytes `[start, stop)`."""
        index = self._index(file)
        if stop <= start or index.documents == 0:
            return Window(np.empty(0, np.uint32), np.empty(0, np.uint32))
        first, last = (bisect_left(range(index.documents), mark, key=index.first_byte) for mark in (start, stop))
        edges = index.edges(first, last)
        lengths = np.diff(edges)
        if lengths.size and lengths.max() >= 1 << 32:
            at = int(edges[lengths.argmax()])
            raise DocumentError(f"{self.listing.path(file)}: the document at byte {at} is longer than 4 GiB; split it")
        return Window((edges[:-1] - start).astype(np.uint32), lengths.astype(np.uint32))

    def read(self, file: int, start: int, length: int) -> Document:
        """Read the tokens of the document that starts at byte `start`."""
        return np.frombuffer(self._files.read(file, start, length), dtype=self._index(file).dtype)

    def _index(self, file: int) -> "_Index":
        if file not in self._opened:
            sizes = int(self._index_files.sizes[file]), int(self.listing.sizes[file])
            self._opened[file] = _Index(self._indexes, file, self._index_files.path(file), *sizes)
        return self._opened[file]


class _Index:
    """One `.idx` file, read in parts.

    Args:
        files: Reads the index files.
        file: Which of them.
        path: Its path, for messages.
        size: Its bytes.
        data_size: Bytes of the `.bin` file.
    """

    def __init__(self, files: FileReader, file: int, path: Location, size: int, data_size: int) -> None:
        self._files, self._file, self._path = files, file, path
        if size < _HEADER.size:
            raise self._error(f"has {size} bytes, less than the header of a Megatron index")
        magic, version, code, self._sequences, entries = _HEADER.unpack(files.read(file, 0, _HEADER.size))
        if magic != _MAGIC or version != 1:
            raise self._error(f"begins with {magic!r} and version {version}, not with a Megatron index of version 1")
        if code not in _DTYPES:
            raise self._error(f"has tokens of type code {code}; known are the integers, {', '.join(map(str, _DTYPES))}")
        self.dtype = np.dtype(_DTYPES[code])
        self.documents = max(0, entries - 1)
        self._lengths = _HEADER.size
        self._pointers = self._lengths + 4 * self._sequences
        self._starts = self._pointers + 8 * self._sequences
        whole = self._starts + 8 * entries
        if size not in (whole, whole + self._sequences):  # one byte a sequence more: its mode, in multimodal data
            raise self._error(
                f"has {size:,} bytes where {self._sequences:,} sequences and {self.documents:,} documents take {whole:,}"
            )
        self._check(entries, data_size)

    def _check(self, entries: int, data_size: int) -> None:
        starts = [int(self._read(self._starts, "<i8", place)[0]) for place in ((0, entries - 1) if entries else ())]
        if starts not in ([0, self._sequences], []) or (self._sequences and not entries):
            raise self._error(f"has documents from sequence {starts} where there are {self._sequences:,} sequences")
        end = self._end_of(self._sequences - 1) if self._sequences else 0
        if end != data_size:
            raise self._error(f"says that its .bin file has {end:,} bytes, and it has {data_size:,}")

    def first_byte(self, document: int) -> int:
        """Return where a document begins in the `.bin` file."""
        sequence = int(self._read(self._starts, "<i8", document)[0])
        if not 0 <= sequence <= self._sequences:
            raise self._error(f"has document {document} at sequence {sequence} of {self._sequences}")
        if sequence == self._sequences:  # a last document without sequences
            return self._end_of(sequence - 1) if sequence else 0
        return int(self._read(self._pointers, "<i8", sequence)[0])

    def edges(self, first: int, last: int) -> np.ndarray:
        """Return where documents `first` to `last - 1` begin, and where the last of them ends (int64, bytes)."""
        if first >= last:
            return np.empty(0, dtype=np.int64)
        starts = self._read(self._starts, "<i8", first, last - first + 1)
        low, high = int(starts[0]), int(starts[-1])
        if np.any(np.diff(starts) < 0) or not 0 <= low <= high <= self._sequences:
            raise self._error(f"has documents {first} to {last} out of order")
        if low == high:
            return np.full(last - first + 1, self.first_byte(first), dtype=np.int64)
        begins = self._read(self._pointers, "<i8", low, high - low)
        ends = begins + self._read(self._lengths, "<i4", low, high - low).astype(np.int64) * self.dtype.itemsize
        if np.any(begins[1:] != ends[:-1]) or np.any(ends < begins):
            raise self._error(f"has sequences {low} to {high} that do not follow each other in the .bin file")
        return np.append(begins, ends[-1])[starts - low]

    def _end_of(self, sequence: int) -> int:
        pointer, length = self._read(self._pointers, "<i8", sequence), self._read(self._lengths, "<i4", sequence)
        return int(pointer[0]) + int(length[0]) * self.dtype.itemsize

    def _read(self, base: int, dtype: str, first: int, count: int = 1) -> np.ndarray:
        width = np.dtype(dtype).itemsize
        return np.frombuffer(self._files.read(self._file, base + first * width, count * width), dtype=dtype)

    def _error(self, what: str) -> DocumentError:
        return DocumentError(f"{self._path}: {what}; write the index again, or restore it")


def index_name(name: str) -> str:
    """Return the name of the index that belongs to a `.bin` file."""
    return name.removesuffix(".bin") + ".idx"
