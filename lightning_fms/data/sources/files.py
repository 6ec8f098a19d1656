"""Reading parts of files that belong to somebody else.

Files are read with `pread` and every length is checked: a file that was cut after the listing gives an error that names
it, where a memory map would end the process with a bus error. Descriptors are kept open, a bounded number of them;
forked processes may share them, because `pread` has no position.
"""

import os
from collections import OrderedDict

from lightning_fms.data.sources.listing import Listing
from lightning_fms.data.sources.source import DocumentError

_OPEN_FILES = 64
_BLOCK = 1 << 16


class FileReader:
    """Reads the files of a listing; keeps a bounded number of them open.

    Args:
        listing: Where the files are; callers name a file by its index.
    """

    def __init__(self, listing: Listing) -> None:
        self._listing = listing
        self._open: OrderedDict[int, int] = OrderedDict()

    def read(self, file: int, start: int, length: int) -> bytes:
        """Read exactly `length` bytes.

        Raises:
            DocumentError: If the file is gone, unreadable, or ends early.
        """
        at, missing, parts = start, length, []
        try:
            descriptor = self._descriptor(file)
            while missing > 0 and (part := os.pread(descriptor, missing, at)):
                parts.append(part)
                at, missing = at + len(part), missing - len(part)
        except OSError as error:
            raise DocumentError(f"{self._listing.path(file)}: cannot be read at byte {at} ({error.strerror})") from None
        if missing:
            raise DocumentError(
                f"{self._listing.path(file)}: ends at byte {os.fstat(descriptor).st_size}, before byte {start + length}: "
                "it was cut or replaced after the run listed it; restore it"
            )
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def find_newline(self, file: int, start: int, end: int) -> int:
        """Return the position of the first newline in `[start, end)`, or `end`.

        Raises:
            DocumentError: If the file is gone, unreadable, or ends early.
        """
        while start < end:
            block = self.read(file, start, min(_BLOCK, end - start))
            if (found := block.find(b"\n")) >= 0:
                return start + found
            start += len(block)
        return end

    def _descriptor(self, file: int) -> int:
        if file in self._open:
            self._open.move_to_end(file)
            return self._open[file]
        while len(self._open) >= _OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        self._open[file] = os.open(self._listing.path(file), os.O_RDONLY)
        return self._open[file]

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_open": OrderedDict()}  # descriptors mean nothing in another process

    def __del__(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
