"""What the items of a litdata chunk are made of, as its index describes them.

*Tokens* (`TokensLoader`): the bytes of an item are its ids. *Fields*: an item is a tree (a value, a dict, dicts in dicts) whose
leaves are stored one behind the other, with their sizes before them. *Table rows*: where all leaves are plain values, litdata
keeps the items of a chunk as an Arrow table instead. Its buffers are contiguous, so a value of an uncompressed one still has
an address in the file: the table is looked through once, and documents are read by their bytes like all others.
"""

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from litdata.constants import _NUMPY_DTYPES_MAPPING, _TORCH_DTYPES_MAPPING

from lightning_fms.data.sources.remote import Location
from lightning_fms.data.sources.source import Document, one_line

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64)
_FOOTER = struct.Struct("<I8s")
_ARROW_MAGIC = b"LDARW01\x00"


@dataclass(frozen=True)
class Column:
    """Values of a table column: text, or lists of integers.

    dtype: of the integers; `None` for text.
    """

    dtype: np.dtype | None

    def document(self, data: bytes) -> Document:
        """Return what the bytes of a value say.

        Raises:
            ValueError: With what is wrong; the caller knows where.
        """
        return _text(data) if self.dtype is None else _integers(data, self.dtype)


@dataclass(frozen=True)
class Leaf:
    """The leaf of an item that is the document.

    name: its path, with dots; empty where the item is the leaf. dtype: of its integers; `None` for text. place: its place among
    the leaves. count: how many leaves an item has, 0 where it is bare tokens, without sizes. nested: whether it is a list,
    which can be read from a table only.
    """

    name: str
    dtype: np.dtype | None
    place: int = 0
    count: int = 0
    nested: bool = False

    def document(self, data: bytes) -> Document:
        """Return the document in the bytes of an item.

        Raises:
            ValueError: With what is wrong; the caller knows where.
        """
        if self.nested:
            raise ValueError(f"holds {self.name!r} as a list in litdata's own form; write it as a 1-D array")
        if self.count:
            head = 4 * self.count
            sizes = np.frombuffer(data[:head], dtype=np.uint32).astype(np.int64) if len(data) >= head else np.zeros(0)
            if len(sizes) < self.count or head + sizes.sum() != len(data):
                raise ValueError(
                    f"has {len(data)} bytes, which do not hold {self.count} field(s); write the chunk again"
                )
            start = head + int(sizes[: self.place].sum())
            data = data[start : start + int(sizes[self.place])]
        return _text(data) if self.dtype is None else _integers(data, self.dtype)

    def column(self, data: bytes, items: int) -> tuple[np.ndarray, np.ndarray, Column]:
        """Return where the values of this leaf are in an Arrow table (int64: first bytes, lengths), and their type.

        Args:
            data: The bytes behind the table of offsets.
            items: Rows of the table.

        Raises:
            ValueError: If this is no uncompressed Arrow file with such a column.
        """
        if len(data) < _FOOTER.size or _FOOTER.unpack(data[-_FOOTER.size :])[1] != _ARROW_MAGIC:
            raise ValueError(f"has {items} items of 0 bytes and no table of rows; write the chunk again")
        length = _FOOTER.unpack(data[-_FOOTER.size :])[0]
        memory = pa.py_buffer(data)
        try:
            reader = pa.ipc.open_file(memory.slice(len(data) - _FOOTER.size - length, length))
            batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        except (pa.ArrowException, ValueError, OSError, IndexError) as error:
            raise ValueError(f"its table of rows cannot be read ({one_line(error)}); write the chunk again") from None
        parts = [_addresses(_descend(batch, self.name), self.name, memory) for batch in batches]
        if not parts or sum(len(starts) for starts, _, _ in parts) != items:
            raise ValueError(f"its table of rows does not hold its {items} items; write the chunk again")
        starts, lengths = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
        if items and (
            np.any(np.diff(starts) < 0) or starts[0] < 0 or np.any((lengths < 0) | (starts + lengths > len(data)))
        ):
            raise ValueError("its table of rows has offsets that lead out of it; write the chunk again")
        return starts, lengths, Column(parts[0][2])


def choose_leaf(config: dict[str, Any], chunks: Sequence[dict], folder: Location, text_key: str | None) -> Leaf:
    """Return the leaf that is the document.

    Args:
        config: `config` of the index.
        chunks: Its `chunks`.
        folder: Where it is, for messages.
        text_key: Name of the leaf; `None` is the only one, or `"text"`.

    Raises:
        ValueError: If the chunks are compressed or encrypted, or hold no such text or integer array.
    """
    if config.get("compression") or config.get("encryption") or config.get("ipc_compression"):
        raise ValueError(f"{folder}: compressed or encrypted litdata chunks are not read; write them without")
    formats = config.get("data_format") or []
    if config.get("item_loader", "TokensLoader" if chunks[0].get("dim") is not None else "") == "TokensLoader":
        if text_key is not None:
            raise ValueError(f"text_key={text_key!r} does not apply to a litdata folder of tokens; remove it")
        if len(formats) == 1 and (dtype := _array_dtype(formats[0])) is not None:
            return Leaf("", dtype)
        raise ValueError(f"{folder}: holds litdata items of format {formats}, not tokens; write integers of one dtype")
    if config.get("item_loader") == "ParquetLoader":
        raise ValueError(f"{folder}: is litdata's index of parquet files; name the parquet files themselves")
    try:
        names = list(_leaf_names(json.loads(config["data_spec"])[1]))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder}: its index does not say what items are made of ({error!r}); write it again"
        ) from None
    good = [name for name, kind in zip(names, formats, strict=False) if _readable(kind)]
    wanted = text_key if text_key is not None else names[0] if len(names) == 1 else "text"
    if wanted not in good or len(names) != len(formats) or names.count(wanted) > 1:
        shown = ", ".join(f"{name or 'the item'} ({kind})" for name, kind in zip(names, formats, strict=False))
        raise ValueError(
            f"{folder}: its litdata items have no text, tokens or 1-D integer array {wanted!r}; they hold {shown or 'nothing'}: "
            f"set text_key to one of {good}, or write tokens with litdata.optimize(..., item_loader=TokensLoader())"
        )
    place = names.index(wanted)
    return Leaf(wanted, _array_dtype(formats[place]), place, len(names), nested=formats[place] == "json")


def _leaf_names(spec: dict, name: str = "") -> Iterator[str]:
    """Yield the names of the leaves of a tree that torch's pytree has written down."""
    children = spec["children_spec"]
    if spec["type"] is None:
        yield name
        return
    keys = json.loads(spec["context"]) if spec["context"] else None
    for i, child in enumerate(children):
        key = keys[i] if isinstance(keys, list) and len(keys) == len(children) else i
        yield from _leaf_names(child, f"{name}.{key}" if name else str(key))


def _readable(kind: str) -> bool:
    return kind in ("str", "json") or _array_dtype(kind) is not None


def _array_dtype(kind: str) -> np.dtype | None:
    """Return the dtype of a 1-D integer array from litdata's name of its format, `None` for other formats."""
    kind, _, code = kind.partition(":")
    number = int(code) if code.isdigit() else -1
    if kind == "no_header_numpy" and (dtype := np.dtype(_NUMPY_DTYPES_MAPPING.get(number))).kind in "iu":
        return dtype
    if kind == "no_header_tensor" and (found := _TORCH_DTYPES_MAPPING.get(number)) in _INTEGERS:
        return torch.empty(0, dtype=found).numpy().dtype
    return None


def _descend(batch: pa.RecordBatch, name: str) -> pa.Array:
    """Return the column of a field, or of a field in fields."""
    array: Any = batch.to_struct_array()
    for part in name.split("."):
        try:
            array = array.field(part)
        except (KeyError, TypeError, AttributeError):
            raise ValueError(f"its table of rows has no column {name!r}; write the chunk again") from None
    return array


def _addresses(array: pa.Array, name: str, memory: pa.Buffer) -> tuple[np.ndarray, np.ndarray, np.dtype | None]:
    """Return where the values of a column lie in the memory that it was read from (int64), and the dtype of integers."""
    kind, wide = array.type, "int32"
    if pa.types.is_large_string(kind) or pa.types.is_large_list(kind):
        wide = "int64"
    elif not (pa.types.is_string(kind) or pa.types.is_list(kind)):
        raise ValueError(f"its column {name!r} holds {kind}; it must be text or lists of integers")
    values, dtype, width, first = array.buffers()[2], None, 1, 0
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        if not pa.types.is_integer(kind.value_type):
            raise ValueError(f"its column {name!r} holds {kind}; it must be text or lists of integers")
        dtype = np.dtype(kind.value_type.to_pandas_dtype())
        values, width, first = array.values.buffers()[1], dtype.itemsize, array.values.offset
    edges = np.frombuffer(array.buffers()[1], dtype=wide)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    base = values.address - memory.address if values is not None else 0
    if not 0 <= base <= memory.size:
        raise ValueError("its table of rows is compressed; write it without compression")
    return base + (first + edges[:-1]) * width, np.diff(edges) * width, dtype


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"is not valid UTF-8 ({error.reason} at its byte {error.start}); write it again") from None


def _integers(data: bytes, dtype: np.dtype) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise ValueError(f"has {len(data)} bytes, no multiple of {dtype}")
    return np.frombuffer(data, dtype=dtype)
