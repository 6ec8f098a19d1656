"""Reading parts of files that belong to somebody else.

Files are read with `pread` and every length is checked: a file that was cut after the listing gives an error that names
it, where a memory map would end the process with a bus error. Descriptors are kept open, a bounded number of them;
forked processes may share them, because `pread` has no position. Remote files are read through blocks in the cache.
"""

import io
import os
from collections import OrderedDict

from lightning_fms.data.sources.blocks import RemoteBlocks
from lightning_fms.data.sources.listing import Listing
from lightning_fms.data.sources.source import DocumentError

_OPEN_FILES = 64
_BLOCK = 1 << 16


class FileReader:
    """Reads the files of a listing; keeps a bounded number of them open.

    Args:
        listing: Where the files are; callers name a file by its index.
        keep_open: How many of them; each source has its own, and a process may often open no more than 1,024.
    """

    def __init__(self, listing: Listing, keep_open: int = _OPEN_FILES) -> None:
        self._listing, self._keep_open = listing, keep_open
        self._open: OrderedDict[int, int] = OrderedDict()
        self._blocks = RemoteBlocks(listing.remote) if listing.remote else None

    def read(self, file: int, start: int, length: int) -> bytes:
        """Read exactly `length` bytes.

        Raises:
            DocumentError: If the file is gone, unreadable, or ends early.
            ValueError: If a remote file cannot be reached.
        """
        if self._blocks is not None:
            return self._blocks.read(self._listing.path(file), file, int(self._listing.sizes[file]), start, length)
        size = int(self._listing.sizes[file])
        if not 0 <= start <= start + length <= size:  # by a damaged index; memory would be taken for it
            raise DocumentError(
                f"{self._listing.path(file)}: ends at byte {size}, and bytes {start} to {start + length} were asked for; restore it"
            )
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

    def identity(self, file: int) -> tuple:
        """Return what tells this file from another in its place.

        Raises:
            DocumentError: If the file is gone, or has another size than was listed.
        """
        path = self._listing.path(file)
        if self._listing.remote is not None:
            return str(path), int(self._listing.sizes[file]), self._listing.remote.versions[file]
        try:
            status = os.stat(path)
        except OSError as error:
            raise DocumentError(f"{path}: cannot be read ({error.strerror})") from None
        if status.st_size != self._listing.sizes[file]:
            raise DocumentError(
                f"{path}: has {status.st_size} bytes, {self._listing.sizes[file]} when the run listed it: it was cut or "
                "replaced; restore it"
            )
        return str(path), status.st_size, status.st_mtime_ns

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
        while len(self._open) >= self._keep_open:
            os.close(self._open.popitem(last=False)[1])
        self._open[file] = os.open(self._listing.path(file), os.O_RDONLY)
        return self._open[file]

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_open": OrderedDict()}  # descriptors mean nothing in another process

    def __del__(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)


class ListedFile(io.RawIOBase):
    """A file of a listing as a stream that can seek, for decoders that want one.

    Args:
        files: Reads the bytes.
        listing: Where the files are.
        file: Index of the file in the listing.
    """

    def __init__(self, files: FileReader, listing: Listing, file: int) -> None:
        self._files, self._file, self._size, self._at = files, file, int(listing.sizes[file]), 0

    def readable(self) -> bool:
        """Return true."""
        return True

    def seekable(self) -> bool:
        """Return true."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Read up to `size` bytes, all that remain if it is negative.

        Raises:
            DocumentError: If the file is gone, unreadable, or ends early.
        """
        rest = max(self._size - self._at, 0)
        length = rest if size is None or size < 0 else min(size, rest)
        data = self._files.read(self._file, self._at, length)
        self._at += length
        return data
