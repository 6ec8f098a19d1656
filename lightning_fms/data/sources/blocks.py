"""Remote bytes through blocks in the local cache, the same for every format.

A block is an aligned range of 4 MiB, as large as a window, so that the documents of a window, in whatever order, cost one
request or two, and the processes of a node fetch it once.
"""

import os
from collections import OrderedDict
from functools import partial
from pathlib import Path

from lightning_fms.data.sources.cache import cache_key
from lightning_fms.data.sources.remote import Location, Remote, find_file
from lightning_fms.data.sources.source import DocumentError
from lightning_fms.data.sources.stores import open_store, persist

REMOTE_BLOCK = 4 << 20

_OPEN_BLOCKS = 32


class RemoteBlocks:
    """Reads remote files by blocks; keeps a bounded number of them open.

    Args:
        remote: Versions, options and cache of the listing.
    """

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._open: OrderedDict[tuple[int, int], int] = OrderedDict()

    def read(self, url: Location, file: int, size: int, start: int, length: int) -> bytes:
        """Read `length` bytes of a file of `size` bytes.

        Raises:
            DocumentError: If the file is gone or shorter.
            ValueError: If it cannot be reached.
        """
        if start + length > size:
            raise DocumentError(f"{url}: ends at byte {size}, before byte {start + length}; restore it")
        parts = []
        at, end = start, start + length
        while at < end:
            descriptor = self._block(str(url), file, size, at // REMOTE_BLOCK)
            part = os.pread(descriptor, end - at, at % REMOTE_BLOCK)
            if not part:
                raise ValueError(f"{url}: its cached block is damaged; delete the cache folder")
            parts.append(part)
            at += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _block(self, url: str, file: int, size: int, block: int) -> int:
        if (file, block) not in self._open:
            key = cache_key("block", url, size, self._remote.versions[file], block)
            descriptor = self._remote.cache.open(key, "block.bin", partial(self._fetch, url, size, block))
            while len(self._open) >= _OPEN_BLOCKS:
                os.close(self._open.popitem(last=False)[1])
            self._open[file, block] = descriptor
        self._open.move_to_end((file, block))
        return self._open[file, block]

    def _fetch(self, url: str, size: int, block: int, folder: Path) -> None:
        start = block * REMOTE_BLOCK
        length = min(REMOTE_BLOCK, size - start)
        data, failure = b"", ""
        try:
            data = persist(lambda: open_store(url, self._remote.options).read(url, start, length))
        except FileNotFoundError:
            raise DocumentError(f"{url}: is gone since the run listed it; restore it") from None
        except Exception as error:
            failure = str(error)
        if len(data) != length:
            there = find_file(url, self._remote.options)
            if there is None or there.size != size:
                raise DocumentError(
                    f"{url}: has {there.size if there else 0} bytes, {size} when the run listed it: it was cut or replaced; "
                    "restore it"
                )
            raise ValueError(
                f"{url}: cannot be read at byte {start} ({failure or 'a short answer'}); check credentials and network"
            )
        (folder / "block.bin").write_bytes(data)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_open": OrderedDict()}  # descriptors mean nothing in another process

    def __del__(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
