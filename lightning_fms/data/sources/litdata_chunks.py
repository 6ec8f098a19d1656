"""litdata chunks (`litdata.optimize`), read in place: tokens, text, or integer arrays.

A chunk begins with its number of items and a table of their offsets (uint32 each), so a document is found without reading
the others, and it comes out exactly as it went in: litdata's own block reader of tokens drops the tail of every chunk.
What an item is made of, and where the offsets stand in a chunk of table rows, is in `litdata_items`.
"""

import json
from collections import OrderedDict
from pathlib import Path

import numpy as np
from litdata.constants import _INDEX_FILENAME

from lightning_fms.data.sources.files import FileReader
from lightning_fms.data.sources.listing import Listing, list_files
from lightning_fms.data.sources.litdata_items import Column, Leaf, choose_leaf
from lightning_fms.data.sources.source import Document, DocumentError, Window

_TABLES = 256
_WORD = 4  # bytes of a uint32


class LitdataChunks:
    """A folder of litdata chunks; a document is an item, or one field of it.

    Args:
        folder: The folder that holds `index.json`, or its listing.
        text_key: Which field of an item is the document: a string, or a 1-D integer array. `None` is the only field, or
            `"text"`. Fields of fields are named with dots.

    Raises:
        ValueError: If the folder holds no readable index, chunks that are compressed, or no such field.
    """

    listing: Listing

    def __init__(self, folder: str | Path | Listing, text_key: str | None = None) -> None:
        listing = folder if isinstance(folder, Listing) else list_files(folder)
        index = _read_index(listing)
        self._leaf = choose_leaf(index["config"], index["chunks"], listing.root, text_key)
        self.cut = {"text_key": text_key}
        self.holds_tokens = self._leaf.dtype is not None
        names = tuple(chunk["filename"] for chunk in index["chunks"])
        chunks = listing.existing(names)
        if missing := sorted(set(names) - set(chunks.names)):
            raise ValueError(
                f"{listing.root / missing[0]}: the chunk is named in {_INDEX_FILENAME} but missing; restore it"
            )
        self.listing = chunks.unsplittable()
        self._files = FileReader(self.listing)
        self._tables: OrderedDict[int, tuple[np.ndarray, np.ndarray, Leaf | Column]] = OrderedDict()

    def window(self, file: int, start: int, stop: int) -> Window:
        """Find the items that start in bytes `[start, stop)` of a chunk."""
        starts, lengths, _ = self._table(file)
        first, last = np.searchsorted(starts, [start, stop])
        return Window((starts[first:last] - start).astype(np.uint32), lengths[first:last].astype(np.uint32))

    def read(self, file: int, start: int, length: int) -> Document:
        """Read the document of the item that starts at byte `start`."""
        form = self._table(file)[2]
        try:
            return form.document(self._files.read(file, start, length))
        except ValueError as error:
            if isinstance(error, DocumentError):
                raise
            raise DocumentError(f"{self.listing.path(file)}: the item at byte {start} {error}") from None

    def _table(self, file: int) -> tuple[np.ndarray, np.ndarray, Leaf | Column]:
        """Return where the items of a chunk start and their bytes (int64, ascending starts), and what the bytes mean."""
        if file in self._tables:
            self._tables.move_to_end(file)
            return self._tables[file]
        path, size = self.listing.path(file), int(self.listing.sizes[file])
        items = int(np.frombuffer(self._files.read(file, 0, _WORD), dtype=np.uint32)[0])
        if (items + 2) * _WORD > size:
            raise DocumentError(f"{path}: claims {items} items, more than its {size} bytes can hold")
        table = np.frombuffer(self._files.read(file, _WORD, (items + 1) * _WORD), dtype=np.uint32).astype(np.int64)
        if np.any(np.diff(table) < 0) or table[-1] > size:
            raise DocumentError(f"{path}: its table of offsets is broken; write the chunk again")
        found: tuple[np.ndarray, np.ndarray, Leaf | Column] = (table[:-1], np.diff(table), self._leaf)
        if items and table[0] == table[-1] and self._leaf.count:  # rows of a table lie behind it, in Arrow's own form
            body = int(table[-1])
            try:
                starts, lengths, column = self._leaf.column(self._files.read(file, body, size - body), items)
            except ValueError as error:
                raise DocumentError(f"{path}: {error}") from None
            found = starts + body, lengths, column
        self._tables[file] = found
        while len(self._tables) > _TABLES:
            self._tables.popitem(last=False)
        return found


def _read_index(listing: Listing) -> dict:
    path = listing.root / _INDEX_FILENAME
    if _INDEX_FILENAME not in listing.names:
        raise ValueError(f"{path}: not a readable litdata index (No such file)")
    file = listing.names.index(_INDEX_FILENAME)
    try:
        index = json.loads(FileReader(listing).read(file, 0, int(listing.sizes[file])))
    except ValueError as error:
        raise ValueError(f"{path}: not a readable litdata index ({error})") from None
    if not isinstance(index, dict) or not index.get("chunks") or not isinstance(index.get("config"), dict):
        raise ValueError(f"{path}: not a litdata index with chunks; write the folder with litdata.optimize")
    if not all(isinstance(chunk, dict) and isinstance(chunk.get("filename"), str) for chunk in index["chunks"]):
        raise ValueError(f"{path}: not a readable litdata index (a chunk without filename); write the folder again")
    return index
