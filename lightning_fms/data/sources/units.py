"""Decoded documents in litdata's chunk format.

A unit (a compressed file, some row groups) is a folder with `index.json` and chunk files of at most 16 MiB, which stock
`litdata.StreamingDataset` reads. A chunk begins with its number of items and a table of their offsets (uint32 each), so a
document takes two reads at known places, and a process holds no table. A text is stored as litdata's `str`, a whole record
as its `pickle`: records of one file differ in their keys and types, which litdata's columns cannot.

The chunks are not written by litdata's `BinaryWriter`: it looks every text up as a file name, and warns of large ones.

Documents that cannot be decoded keep their places: they are stored empty, and `errors.json` says from which to which and what
is wrong with them.
"""

import json
import os
import pickle
import struct
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, repeat
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from litdata.constants import _INDEX_FILENAME
from litdata.utilities._pytree import tree_flatten, treespec_dumps

from lightning_fms.data.sources.cache import Cache
from lightning_fms.data.sources.source import Document, DocumentError

CHUNK_BYTES = 16 << 20
"""A process that decodes holds one chunk in memory."""

_ERRORS = "errors.json"
_MAX_ERRORS = 10_000  # runs of broken documents
_WORD = 4  # bytes of a uint32
_OPEN_UNITS, _OPEN_FILES = 1024, 32


class Broken(NamedTuple):
    """So many documents, one after the other, that cannot be decoded, and why."""

    documents: int
    error: str


Item = Document | DocumentError | Broken
"""A document, or what is wrong with it, or with several."""


def write_unit(folder: Path, items: Iterable[Item], pickled: bool) -> int:
    """Write a unit into an empty folder, holding at most one chunk; return its number of documents.

    Args:
        folder: Where to.
        items: The documents in order.
        pickled: Whether they are records rather than texts.

    Raises:
        DocumentError: If more than 10,000 documents are broken: then the file is not what it is taken for.
    """
    chunks: list[dict] = []
    held: list[bytes] = []
    errors: list[tuple[int, int, str]] = []
    size = 0
    for data in _encoded(items, pickled, errors):
        if held and size + len(data) + (len(held) + 3) * _WORD > CHUNK_BYTES:
            chunks.append(_write_chunk(folder, len(chunks), held))
            held, size = [], 0
        held.append(data)
        size += len(data)
    if held:
        chunks.append(_write_chunk(folder, len(chunks), held))
    if errors:
        (folder / _ERRORS).write_text(json.dumps(errors))
    config = {
        "compression": None, "chunk_size": None, "chunk_bytes": CHUNK_BYTES, "encryption": None,
        "data_format": ["pickle" if pickled else "str"], "data_spec": treespec_dumps(tree_flatten("")[1]),
        "item_loader": "PyTreeLoader", "broken": bool(errors),
    }  # fmt: skip
    (folder / _INDEX_FILENAME).write_text(json.dumps({"chunks": chunks, "config": config, "updated_at": "0"}))
    return sum(chunk["chunk_size"] for chunk in chunks)


def _encoded(items: Iterable[Item], pickled: bool, errors: list[tuple[int, int, str]]) -> Iterator[bytes]:
    """Encode items, empty ones for those that are broken; note these as `(first, end, what)`."""
    row = 0
    for item in items:
        count = 1
        if isinstance(item, (DocumentError, Broken)):
            count, what = item if isinstance(item, Broken) else (1, str(item))
            errors.append((row, row + count, what))
            if len(errors) > _MAX_ERRORS:
                raise DocumentError(f"more than {_MAX_ERRORS} documents cannot be read; the last: {what}")
            item = {} if pickled else ""
        yield from repeat(_encode(item, pickled), count)
        row += count


def _encode(item: Document, pickled: bool) -> bytes:
    data = pickle.dumps(item) if pickled else str(item).encode("utf-8", "surrogatepass")
    if len(data) >= 1 << 31:
        raise DocumentError(f"a document of {len(data)} bytes is longer than 2 GiB; split it")
    return struct.pack("<I", len(data)) + data


def _write_chunk(folder: Path, number: int, items: list[bytes]) -> dict:
    header = (len(items) + 2) * _WORD
    ends = header + np.cumsum([0, *map(len, items)])
    name = f"chunk-0-{number}.bin"
    with (folder / name).open("wb", buffering=1 << 20) as file:
        file.write(np.uint32(len(items)).tobytes() + ends.astype(np.uint32).tobytes())
        file.writelines(items)
    return {"chunk_bytes": int(ends[-1]), "chunk_size": len(items), "dim": None, "filename": name}


class _Unit(NamedTuple):
    first_rows: list[int]  # of each chunk; one more, which is the number of rows
    names: list[str]
    pickled: bool
    errors: list[tuple[int, int, str]]  # first, end, what


class Units:
    """Reads units through a cache; those that are not there are made.

    Args:
        cache: Where units are kept.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._units: OrderedDict[str, _Unit] = OrderedDict()
        self._open: OrderedDict[tuple[str, str], int] = OrderedDict()

    def rows(self, key: str, write: Callable[[Path], None]) -> int:
        """Return the number of documents of a unit."""
        return self._unit(key, write).first_rows[-1]

    def read(self, key: str, row: int, write: Callable[[Path], None]) -> Document:
        """Read document `row` of a unit.

        Raises:
            DocumentError: With what was wrong when it was decoded.
        """
        unit = self._unit(key, write)
        if unit.errors:
            _, end, what = unit.errors[max(bisect_right(unit.errors, row, key=itemgetter(0)) - 1, 0)]
            if unit.errors[0][0] <= row < end:
                raise DocumentError(what)
        chunk = bisect_right(unit.first_rows, row) - 1
        descriptor = self._descriptor(key, unit.names[chunk], write)
        at = (1 + row - unit.first_rows[chunk]) * _WORD
        start, stop = struct.unpack("<2I", _read(descriptor, at, 2 * _WORD))
        data = _read(descriptor, start + _WORD, stop - start - _WORD)
        return pickle.loads(data) if unit.pickled else data.decode("utf-8", "surrogatepass")

    def _unit(self, key: str, write: Callable[[Path], None]) -> _Unit:
        if key in self._units:
            self._units.move_to_end(key)
            return self._units[key]
        index = self._json(key, _INDEX_FILENAME, write)
        config, chunks = index["config"], index["chunks"]
        self._units[key] = _Unit(
            [0, *accumulate(chunk["chunk_size"] for chunk in chunks)],
            [chunk["filename"] for chunk in chunks],
            config["data_format"] == ["pickle"],
            self._json(key, _ERRORS, write) if config["broken"] else [],
        )
        while len(self._units) > _OPEN_UNITS:
            self._units.popitem(last=False)
        return self._units[key]

    def _json(self, key: str, name: str, write: Callable[[Path], None]) -> Any:
        with os.fdopen(self._cache.open(key, name, write), "rb") as file:
            return json.loads(file.read())

    def _descriptor(self, key: str, name: str, write: Callable[[Path], None]) -> int:
        if (key, name) not in self._open:
            while len(self._open) >= _OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
            self._open[key, name] = self._cache.open(key, name, write)
        self._open.move_to_end((key, name))
        return self._open[key, name]

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_open": OrderedDict()}  # descriptors mean nothing in another process

    def __del__(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)


def _read(descriptor: int, start: int, length: int) -> bytes:
    data = os.pread(descriptor, length, start)
    if len(data) != length:
        raise ValueError(
            f"a cached chunk ends before its byte {start + length}: the disk lost it; delete the cache folder"
        )
    return data
