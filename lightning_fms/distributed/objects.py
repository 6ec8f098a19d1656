"""DCP on object stores: its reader and writer over `RemotePath`, without a rename, and with checksums taken on the way out.

PyTorch's `FsspecWriter` renames its index into place, which on a store copies it, and would have to be read back for a checksum.
Here each object is written once under its final name and hashed as it goes; the commit protocol decides what counts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem

from lightning_fms.distributed import commit
from lightning_fms.remote_path import RemotePath

_ASIDE = ".tmp"  # DCP writes its index under this ending, and renames it


class _Hashed:
    """Passes writes on, counts and hashes them."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self.checksum, self.size = stream, commit.new_checksum(), 0

    def write(self, data: Any) -> int:
        content = bytes(data)
        self._stream.write(content)
        self.checksum.update(content)
        self.size += len(content)
        return len(content)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        pass  # a store takes parts of a size that it wants, and the rest when the stream is closed

    def close(self) -> None:
        pass  # by whoever opened it


class Objects(FileSystem):
    """What DCP asks of a file system.

    Attributes:
        written: manifest entries of what this process wrote, by name.
    """

    def __init__(self) -> None:
        self.written: dict[str, list[Any]] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """A stream; what was written is an object when it is closed."""
        if mode == "rb":
            with path.open(mode) as stream:
                yield stream
            return
        target = path.parent / path.name.removesuffix(_ASIDE)
        with target.open(mode) as stream:
            hashed = _Hashed(stream)
            yield hashed
        self.written[target.name] = [hashed.size, hashed.checksum.hexdigest()]

    def concat_path(self, path: Any, suffix: str) -> Any:
        """Below."""
        return path / suffix

    def rename(self, path: Any, new_path: Any) -> None:
        """It has its final name already."""

    def init_path(self, path: Any) -> Any:
        """As it is."""
        return path

    def mkdir(self, path: Any) -> None:
        """For stores that have folders."""
        path.mkdir()

    def exists(self, path: Any) -> bool:
        """Never: what is written to is new."""
        return False

    def rm_file(self, path: Any) -> None:
        """Delete an object."""
        path.unlink()

    def ls(self, path: Any) -> list[str]:
        """Names below."""
        return [str(entry) for entry in path.iterdir()]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether it is an address."""
        return isinstance(checkpoint_id, RemotePath)


class ObjectWriter(dcp.FileSystemWriter):
    """DCP's writer, to a fresh folder on a store."""

    def __init__(self, path: RemotePath) -> None:
        super().__init__("", sync_files=False)
        self.objects = Objects()
        self.fs, self.path = self.objects, path

    @property
    def checkpoint_id(self) -> str:
        """The address, as text: it goes into the index, which holds no classes of ours."""
        return str(self.path)
