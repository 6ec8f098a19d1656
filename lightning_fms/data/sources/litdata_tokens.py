"""litdata chunks of tokens (`litdata.optimize(..., item_loader=TokensLoader())`).

A chunk begins with its number of items and a table of their offsets (uint32 each), so a document is found without reading
the others, and it comes out exactly as it went in: litdata's own block reader drops the tail of every chunk.
"""

import json
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from litdata.constants import _INDEX_FILENAME, _NUMPY_DTYPES_MAPPING, _TORCH_DTYPES_MAPPING

from lightning_fms.data.sources.files import FileReader
from lightning_fms.data.sources.listing import Listing
from lightning_fms.data.sources.source import Document, DocumentError, Window

_TABLES = 256
_WORD = 4  # bytes of a uint32
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64)


class LitdataTokens:
    """A folder of litdata token chunks; a document is an item.

    Args:
        folder: The folder that holds `index.json`.

    Raises:
        ValueError: If the folder holds no readable index, or chunks that are compressed or no tokens.
    """

    listing: Listing

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder).expanduser().absolute()
        index = _read_index(folder / _INDEX_FILENAME)
        self._dtype = _token_dtype(index["config"], folder)
        names = tuple(chunk["filename"] for chunk in index["chunks"])
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ValueError(f"{folder / missing[0]}: the chunk is named in {_INDEX_FILENAME} but missing; restore it")
        sizes = np.array([(folder / name).stat().st_size for name in names], dtype=np.int64)
        self.listing = Listing(folder, names, sizes, splittable=False)
        self._files = FileReader(self.listing)
        self._tables: OrderedDict[int, np.ndarray] = OrderedDict()

    def window(self, file: int, start: int, stop: int) -> Window:
        """Find the items that start in bytes `[start, stop)` of a chunk."""
        table = self._table(file)
        first, last = np.searchsorted(table[:-1], [start, stop])
        offsets = table[first : last + 1].astype(np.int64)
        return Window((offsets[:-1] - start).astype(np.uint32), np.diff(offsets).astype(np.uint32))

    def read(self, file: int, start: int, length: int) -> Document:
        """Read the tokens of the item that starts at byte `start`."""
        if length % self._dtype.itemsize:
            raise DocumentError(
                f"{self.listing.path(file)}: the item at byte {start} has {length} bytes, no multiple of {self._dtype}"
            )
        return np.frombuffer(self._files.read(file, start, length), dtype=self._dtype)

    def _table(self, file: int) -> np.ndarray:
        if file in self._tables:
            self._tables.move_to_end(file)
            return self._tables[file]
        path = self.listing.path(file)
        items = int(np.frombuffer(self._files.read(file, 0, _WORD), dtype=np.uint32)[0])
        if (items + 2) * _WORD > self.listing.sizes[file]:
            raise DocumentError(
                f"{path}: claims {items} items, more than its {self.listing.sizes[file]} bytes can hold"
            )
        table = np.frombuffer(self._files.read(file, _WORD, (items + 1) * _WORD), dtype=np.uint32)
        if np.any(np.diff(table.astype(np.int64)) < 0) or table[-1] > self.listing.sizes[file]:
            raise DocumentError(f"{path}: its table of offsets is broken; write the chunk again")
        self._tables[file] = table
        while len(self._tables) > _TABLES:
            self._tables.popitem(last=False)
        return table


def _read_index(path: Path) -> dict:
    try:
        index = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable litdata index ({error})") from None
    if not isinstance(index, dict) or not index.get("chunks") or "config" not in index:
        raise ValueError(f"{path}: not a litdata index with chunks; write the folder with litdata.optimize")
    return index


def _token_dtype(config: dict, folder: Path) -> np.dtype:
    if config.get("compression") or config.get("encryption"):
        raise ValueError(f"{folder}: compressed or encrypted litdata chunks are not read; write them without")
    data_format = config.get("data_format") or []
    kind, _, code = data_format[0].partition(":") if len(data_format) == 1 else ("", "", "")
    number = int(code) if code.isdigit() else -1
    if kind == "no_header_numpy" and (dtype := np.dtype(_NUMPY_DTYPES_MAPPING.get(number))).kind in "iu":
        return dtype
    if kind == "no_header_tensor" and (found := _TORCH_DTYPES_MAPPING.get(number)) in _INTEGERS:
        return torch.empty(0, dtype=found).numpy().dtype
    raise ValueError(
        f"{folder}: holds litdata items of format {data_format}, not tokens; write them with "
        "litdata.optimize(..., item_loader=TokensLoader())"
    )
