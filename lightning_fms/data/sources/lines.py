"""Files made of lines: JSON lines, and plain text.

Lines end at the byte `\\n` and at nothing else: U+2028, U+0085 and a lone carriage return are ordinary characters, which
`str.splitlines` would break records at. A carriage return before the newline and a byte-order mark at the start of a file
are not part of a document. Empty lines are no documents.
"""

import json
from typing import Literal

import numpy as np

from lightning_fms.data.sources.files import FileReader
from lightning_fms.data.sources.listing import Listing, Paths, list_files
from lightning_fms.data.sources.source import Document, DocumentError, Window

BLOCK_BYTES = 64 << 10
"""Size of a plain-text document when `split="block"`: long enough for context, short enough to spread over streams."""

_NEWLINE, _RETURN = 10, 13
_BOM = b"\xef\xbb\xbf"


class _Lines:
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
        if lengths.max() >= 1 << 32:
            at = start + int(starts[lengths.argmax()])
            raise DocumentError(f"{self.listing.path(file)}: the line at byte {at} is longer than 4 GiB; split it")
        filled = (lengths > 1) | ((lengths == 1) & (data[starts + before] != _RETURN))
        return Window(starts[filled].astype(np.uint32), lengths[filled].astype(np.uint32))

    def _text(self, file: int, start: int, length: int) -> str:
        data = self._files.read(file, start, length)
        if start == 0:
            data = data.removeprefix(_BOM)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise DocumentError(
                f"{self.listing.path(file)}: byte {start + length - len(data) + error.start} is not valid UTF-8 "
                f"({error.reason}); convert the file to UTF-8"
            ) from None


class JsonLines(_Lines):
    """JSON lines: one object a line, its text under one key.

    Args:
        paths: File, folder, glob or list of them, or their listing.
        text_key: Key of the text.
    """

    def __init__(self, paths: Paths | Listing, text_key: str = "text") -> None:
        super().__init__(paths)
        self.text_key = text_key

    def read(self, file: int, start: int, length: int) -> Document:
        """Read the text of the record that starts at byte `start`; a blank line is an empty document."""
        line = self._text(file, start, length)
        if not line.strip():
            return ""
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise self._error(file, start, f"is not valid JSON ({error.msg} at character {error.pos})") from None
        except (ValueError, RecursionError) as error:  # a number of 5,000 digits, brackets 10,000 deep
            raise self._error(file, start, f"cannot be read ({error})") from None
        if not isinstance(record, dict):
            raise self._error(file, start, f"is a {type(record).__name__}, not an object with a key {self.text_key!r}")
        if self.text_key not in record:
            keys = ", ".join(map(repr, record)) or "none"
            raise self._error(file, start, f"has no key {self.text_key!r}; it has {keys}: set text_key to one of them")
        text = record[self.text_key]
        if not isinstance(text, str):
            raise self._error(file, start, f"has {self.text_key!r} of type {type(text).__name__}; it must be a string")
        return text

    def _error(self, file: int, start: int, what: str) -> DocumentError:
        return DocumentError(f"{self.listing.path(file)}: the record at byte {start} {what}")


class Text(_Lines):
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

    def read(self, file: int, start: int, length: int) -> Document:
        """Read the text that starts at byte `start`."""
        text = self._text(file, start, length)
        return text.removesuffix("\r") if self.split == "line" else text
