"""Reading parts of files that belong to somebody else.

Files are read with `pread` and every length is checked: a file that was cut after the listing gives an error that names
it, where a memory map would end the process with a bus error. Descriptors are kept open, a bounded number of them, and
shared freely between threads and forked processes because `pread` has no position.
"""

import os
from collections import OrderedDict
from pathlib import Path

from lightning_fms.data.sources.source import DocumentError

_OPEN_FILES = 64
_BLOCK = 1 << 16


class FileReader:
    """Bounded cache of open files."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, int] = OrderedDict()

    def read(self, path: Path, start: int, length: int) -> bytes:
        """Read exactly `length` bytes.

        Raises:
            DocumentError: If the file is gone, unreadable, or ends early.
        """
        data = self.read_upto(path, start, length)
        if len(data) != length:
            raise DocumentError(
                f"{path}: ends at byte {start + len(data)}, {length - len(data)} bytes short: it was cut or replaced after "
                "the run listed it; restore it"
            )
        return data

    def read_upto(self, path: Path, start: int, length: int) -> bytes:
        """Read up to `length` bytes; fewer only at the end of the file."""
        try:
            descriptor, parts = self._descriptor(path), []
            while length > 0 and (part := os.pread(descriptor, length, start)):
                parts.append(part)
                start, length = start + len(part), length - len(part)
        except OSError as error:
            raise DocumentError(f"{path}: cannot be read at byte {start} ({error.strerror})") from None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def find_newline(self, path: Path, start: int) -> int:
        """Return the position of the first newline at or after `start`, or the size of the file."""
        while True:
            block = self.read_upto(path, start, _BLOCK)
            found = block.find(b"\n")
            if found >= 0 or len(block) < _BLOCK:
                return start + (found if found >= 0 else len(block))
            start += len(block)

    def _descriptor(self, path: Path) -> int:
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        while len(self._open) >= _OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        self._open[path] = os.open(path, os.O_RDONLY)
        return self._open[path]

    def __getstate__(self) -> dict:
        return {"_open": OrderedDict()}  # descriptors mean nothing in another process

    def __del__(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
