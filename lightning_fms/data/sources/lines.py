"""Files made of lines: JSON lines, and plain text.

Lines end at the byte `\\n` and at nothing else: U+2028, U+0085 and a lone carriage return are ordinary characters, which
`str.splitlines` would break records at. A carriage return before the newline and a byte-order mark at the start of a file
are not part of a document. Empty lines are no documents.
"""

import json
from collections.abc import Iterator
from typing import IO, Any, Literal

import numpy as np

from lightning_fms.data.sources.files import FileReader
from lightning_fms.data.sources.listing import Listing, Paths, list_files
from lightning_fms.data.sources.source import Document, DocumentError, Window

BLOCK_BYTES = 64 << 10
"""Size of a plain-text document when `split="block"`: long enough for context, short enough to spread over streams."""

MAX_DOCUMENT_BYTES = (1 << 32) - 1
"""Lengths are uint32."""

_NEWLINE, _RETURN = 10, 13
_BOM = b"\xef\xbb\xbf"
_STREAM_BLOCK = 1 << 20


class Lines:
    """Finds and reads lines; what a line means is up to the subclass."""

    listing: Listing

    def __init__(self, paths: Paths | Listing) -> None:
        self.listing = paths if isinstance(paths, Listing) else list_files(paths)
        self._files = FileReader(self.listing)

    def window(self, file: int, start: int, stop: int) -> Window:
        """Find the lines that start in bytes `[start, stop)`; the last one may end beyond."""
        before = 1 if start else 0  # the byte before tells whether a line starts at `start`
        data = np.frombuffer(self._files.read(file, start - before, stop - start + before), dtype=np.uint8)
        newlines = np.flatnonzero(data == _NEWLINE) - before
        starts = newlines + 1 if start else np.concatenate(([0], newlines + 1))
        starts = starts[starts < stop - start]
        if len(starts) == 0:
            return Window(np.empty(0, np.uint32), np.empty(0, np.uint32))
        if len(newlines) and newlines[-1] >= starts[-1]:
            last = newlines[-1]
        else:
            last = self._files.find_newline(file, stop, int(self.listing.sizes[file])) - start
        lengths = np.append(starts[1:] - 1, last) - starts
        if lengths.max() > MAX_DOCUMENT_BYTES:
            at = start + int(starts[lengths.argmax()])
            raise DocumentError(f"{self.listing.path(file)}: the line at byte {at} is longer than 4 GiB; split it")
        filled = (lengths > 1) | ((lengths == 1) & (data[starts + before] != _RETURN))
        return Window(starts[filled].astype(np.uint32), lengths[filled].astype(np.uint32))

    def read(self, file: int, start: int, length: int) -> Document:
        """Read the document that starts at byte `start`."""
        data = self._files.read(file, start, length)
        try:
            return self.parse(data, start)
        except DocumentError as error:
            raise DocumentError(f"{self.listing.path(file)}: {error}") from None

    def parse(self, data: bytes, at: int) -> Document:
        """Make a document of the bytes from `at` on.

        Raises:
            DocumentError: If they are none; the message says where in the file, and the caller in which file.
        """
        raise NotImplementedError

    def split_stream(self, stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
        """Yield `(first byte, bytes)` of the documents in a stream: those that `window` finds in a file."""
        return ((at, line) for at, line in _split_lines(stream) if len(line) > 1 or (line and line[0] != _RETURN))


def _split_lines(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield `(first byte, line without its newline)`; what follows the last newline is a line if it is not empty."""
    at = 0
    parts: list[bytes] = []
    while block := stream.read(_STREAM_BLOCK):
        *ended, rest = block.split(b"\n")
        for line in ended:
            if parts:
                line, parts = b"".join((*parts, line)), []
            yield at, line
            at += len(line) + 1
        if rest:
            parts.append(rest)
    if parts:
        yield at, b"".join(parts)


def _decode(data: bytes, at: int) -> str:
    rest = data.removeprefix(_BOM) if at == 0 else data
    try:
        return rest.decode()
    except UnicodeDecodeError as error:
        position = at + len(data) - len(rest) + error.start
        raise DocumentError(f"byte {position} is not valid UTF-8 ({error.reason}); convert the file to UTF-8") from None


class JsonLines(Lines):
    """JSON lines: one object a line, its text under one key.

    Args:
        paths: File, folder, glob or list of them, or their listing.
        text_key: Key of the text; `None` makes a document of the whole object.
    """

    def __init__(self, paths: Paths | Listing, text_key: str | None = "text") -> None:
        super().__init__(paths)
        self.text_key = text_key

    def parse(self, data: bytes, at: int) -> Document:
        """Make a text (or an object) of a line; a blank line is an empty document."""
        line = _decode(data, at)
        if not line.strip():
            return "" if self.text_key is not None else {}
        try:
            return self._document(json.loads(line))
        except json.JSONDecodeError as error:
            what = f"is not valid JSON ({error.msg.removesuffix(' at')} at character {error.pos})"
        except DocumentError as error:
            what = str(error)
        except (ValueError, RecursionError) as error:  # a number of 5,000 digits, brackets 10,000 deep
            what = f"cannot be read ({error})"
        raise DocumentError(f"the record at byte {at} {what}")

    def _document(self, record: Any) -> Document:
        key = self.text_key
        if not isinstance(record, dict):
            wanted = f"an object with a key {key!r}" if key is not None else "an object"
            raise DocumentError(f"is a {type(record).__name__}, not {wanted}")
        if key is None:
            return record
        if key not in record:
            keys = ", ".join(map(repr, record)) or "none"
            raise DocumentError(f"has no key {key!r}; it has {keys}: set text_key to one of them")
        text = record[key]
        if not isinstance(text, str):
            raise DocumentError(f"has {key!r} of type {type(text).__name__}; it must be a string")
        return text


class Text(Lines):
    """Plain text.

    Args:
        paths: File, folder, glob or list of them, or their listing.
        split: `"block"`: pieces of about 64 KiB that end at a newline; nothing is lost between them, and a smaller file is one
            document. `"line"`: every line is a document.

    Raises:
        ValueError: For another `split`.
    """

    def __init__(self, paths: Paths | Listing, split: Literal["block", "line"] = "block") -> None:
        if split not in ("block", "line"):
            raise ValueError(f"split={split!r} must be 'block' or 'line'")
        super().__init__(paths)
        self.split = split
        self.cut = {"split": split}

    def window(self, file: int, start: int, stop: int) -> Window:
        """Find the documents that start in bytes `[start, stop)`."""
        if self.split == "line":
            return super().window(file, start, stop)
        edges = self._block_edges(file, start, stop)
        edges = edges[np.searchsorted(edges, start) :]
        return Window((edges[:-1] - start).astype(np.uint32), np.diff(edges).astype(np.uint32))

    def _block_edges(self, file: int, start: int, stop: int) -> np.ndarray:
        """Return where blocks start, from the last before `start` to the first at or after `stop` (int64, ascending).

        A block starts at the first line that starts at or after a multiple of the block size; the end of the file is one.
        """
        size = int(self.listing.sizes[file])
        edges: list[int] = []
        mark = start // BLOCK_BYTES * BLOCK_BYTES
        while not edges or edges[-1] < stop:
            if not edges or mark > edges[-1]:  # else a line longer than a block goes past this mark
                edges.append(min(self._files.find_newline(file, mark - 1, size) + 1, size) if mark else 0)
            mark += BLOCK_BYTES
        return np.array(edges, dtype=np.int64)

    def parse(self, data: bytes, at: int) -> Document:
        """Decode a piece of the file."""
        text = _decode(data, at)
        return text.removesuffix("\r") if self.split == "line" else text

    def split_stream(self, stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
        """Yield `(first byte, bytes)` of the documents in a stream: those that `window` finds in a file."""
        return super().split_stream(stream) if self.split == "line" else _split_blocks(stream)


def _split_blocks(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Cut a stream where `Text` cuts a file: at the first line that starts at or after each multiple of the block size."""
    held, first, mark = bytearray(), 0, BLOCK_BYTES  # `held` begins at byte `first`; the next cut is at or after `mark`
    searched = 0
    while block := stream.read(_STREAM_BLOCK):
        held += block
        while (newline := held.find(b"\n", max(searched, mark - 1 - first))) >= 0:
            yield first, bytes(held[: newline + 1])
            del held[: newline + 1]
            first, searched = first + newline + 1, 0
            mark = (first // BLOCK_BYTES + 1) * BLOCK_BYTES
        searched = len(held)
    if held:
        yield first, bytes(held)
