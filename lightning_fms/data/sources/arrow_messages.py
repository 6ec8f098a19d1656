"""Where the messages of an Arrow IPC file or stream lie, read from their headers alone.

Both formats are the same row of messages: schema, dictionaries, record batches, each a small flatbuffer and a body. (The file
format puts a magic word before them and a footer behind.) pyarrow tells the rows of a batch only after reading its body;
the header has them in a few bytes, so a file is surveyed by hopping from header to header.

A flatbuffer table begins with the distance back to its vtable, which holds the place of each field in the table, 0 for an
absent one. The fields that we need, by their numbers in Arrow's `Message.fbs`: Message 1 header type, 2 header, 3 length of
the body; RecordBatch 0 length in rows, 1 nodes. The first node is the first column's and must have as many rows: those of a
damaged header would be looked for one by one.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_fms.data.sources.source import DocumentError

_MAGIC = b"ARROW1"
_CONTINUATION = 0xFFFFFFFF
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_FIRST_READ = 4096


@dataclass
class Messages:
    """Messages of a file, in its order; ranges are `(first byte, end)`."""

    others: list[tuple[int, int]] = field(default_factory=list)  # schema and dictionaries
    batches: list[tuple[int, int]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # of each batch


def find_messages(read: Callable[[int, int], bytes], size: int) -> Messages:
    """Survey a file.

    Args:
        read: Reads `(start, length)`.
        size: Bytes of the file.

    Raises:
        DocumentError: If it is no Arrow file or ends early.
    """
    head = read(0, min(8, size))
    is_file = head.startswith(_MAGIC)
    if is_file and read(size - len(_MAGIC), len(_MAGIC)) != _MAGIC:
        raise DocumentError(f"begins as an Arrow file and does not end as one at byte {size}: it is cut; restore it")
    if head.startswith(b"FEA1"):
        raise DocumentError("is a Feather file of version 1; write it again as version 2")
    at, found = 8 if is_file else 0, Messages()
    while at < size:
        try:
            kind, rows, end = _header(read, at, size)
        except (struct.error, IndexError):
            raise DocumentError(f"has no Arrow message at byte {at}: it is no Arrow file, or damaged") from None
        if end > size:
            raise DocumentError(f"ends at byte {size}, inside the message that begins at byte {at}; restore it")
        if kind == 0:
            break
        if kind == _BATCH:
            found.batches.append((at, end))
            found.rows.append(rows)
        elif kind in (_SCHEMA, _DICTIONARY):
            found.others.append((at, end))
        at = end
    if not found.others:
        raise DocumentError("has no Arrow schema; is it empty?")
    return found


def _header(read: Callable[[int, int], bytes], at: int, size: int) -> tuple[int, int, int]:
    """Return kind (0 at the end), rows, and end of the message at a byte."""
    data = read(at, min(_FIRST_READ, size - at))
    mark, length = struct.unpack_from("<Ii", data)
    if mark != _CONTINUATION or length < 0:
        raise IndexError
    if length == 0:
        return 0, 0, at + 8
    if 8 + length > len(data):
        data = read(at, min(8 + length, size - at))
    table = _Table(data[8 : 8 + length], struct.unpack_from("<I", data, 8)[0])
    kind, body = table.number(1, "<B"), table.number(3, "<q")
    rows = 0
    if kind == _BATCH:
        batch = table.table(2)
        rows = batch.number(0, "<q")
        if rows != batch.first_of(1, "<q", default=rows):
            raise IndexError
    if body < 0 or rows < 0:
        raise IndexError
    return kind, rows, at + 8 + length + body


class _Table:
    """A flatbuffer table at a position of its buffer."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at
        self._vtable = at - struct.unpack_from("<i", data, at)[0]
        self._size = struct.unpack_from("<H", data, self._vtable)[0]

    def _field(self, number: int) -> int:
        slot = 4 + 2 * number
        offset = struct.unpack_from("<H", self._data, self._vtable + slot)[0] if slot < self._size else 0
        return self._at + offset if offset else 0

    def number(self, number: int, kind: str) -> int:
        """Return a number, 0 if it is absent."""
        at = self._field(number)
        return struct.unpack_from(kind, self._data, at)[0] if at else 0

    def first_of(self, number: int, kind: str, default: int) -> int:
        """Return the number that begins a field's vector of structs; the default if that is empty or absent."""
        at = self._field(number)
        vector = at + struct.unpack_from("<I", self._data, at)[0] if at else 0
        if not at or struct.unpack_from("<I", self._data, vector)[0] == 0:
            return default
        return struct.unpack_from(kind, self._data, vector + 4)[0]

    def table(self, number: int) -> "_Table":
        """Return the table that a field points to."""
        at = self._field(number)
        if not at:
            raise IndexError
        return _Table(self._data, at + struct.unpack_from("<I", self._data, at)[0])
