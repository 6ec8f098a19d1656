"""Folders on object stores, as paths: `s3://bucket/run`, `gs://...`, and whatever else fsspec has a file system for.

`Path("s3://bucket/run")` is without a word the folder `s3:/bucket/run` below the current one. `place` tells addresses from folders,
and gives for an address a `Path` whose file operations go to the store; `/`, `name`, `parent` are those of any path. There is no
rename: a store has none. Credentials and settings are those of the store's own package (`s3fs`, `gcsfs`, `adlfs`) or of fsspec's
configuration files. What a store raises is an OSError here, whatever it was; a request that only reads is made again before that.
"""

import fnmatch
import io
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PosixPath
from typing import Any

import fsspec

_ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/+(?P<rest>.*)", re.DOTALL)  # `Path` makes one slash of two

# Before a request that only reads is made again, in seconds. Packages of stores try again, too, but not all, and not for long.
_WAITS_S = (1.0, 4.0)
_ANSWERS = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


class StoreError(OSError):
    """A store that could not be read: nothing is known of what is there."""


def place(path: str | Path) -> Path:
    """A `Path` for a folder, or a `RemotePath` for an address, also where it has been through `Path` and lost a slash.

    Raises:
        ValueError: an address that fsspec, as it is installed, has no file system for.
    """
    match = _ADDRESS.fullmatch(str(path))
    if match is None or isinstance(path, RemotePath):
        return Path(path) if isinstance(path, str) else path
    scheme, rest = match["scheme"], match["rest"]
    if scheme in ("file", "local"):
        return Path(f"/{rest}")
    try:
        fsspec.get_filesystem_class(scheme)
    except (ValueError, ImportError) as error:
        raise ValueError(f"{path}: {error}; fsspec reaches {scheme}:// by a package of its own") from None
    return RemotePath(f"{scheme}:", rest)


def is_remote(path: str | Path) -> bool:
    """Whether a path is an address."""
    return _ADDRESS.fullmatch(str(path)) is not None


@contextmanager
def _os_errors(what: Any) -> Iterator[None]:
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # botocore's, google's, aiohttp's: no two stores agree
        raise OSError(f"{what}: {type(error).__name__}: {error}") from error


class RemotePath(PosixPath):
    """An address; made by `place`."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"{self.parts[0]}//{'/'.join(self.parts[1:])}"

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is no path of this machine")

    def __reduce__(self) -> tuple[Any, ...]:
        return place, (str(self),)

    def _do(self, operation: Callable[[Any, str], Any]) -> Any:
        with _os_errors(self):
            system = fsspec.filesystem(self.parts[0].removesuffix(":"))
            system.invalidate_cache()  # other processes write, too
            return operation(system, system._strip_protocol(str(self)))

    def ask(self, request: Callable[[], Any]) -> Any:
        """What a request that only reads returns; made again after a while where the store fails.

        Raises:
            FileNotFoundError: nothing is there, which is an answer.
            StoreError: the store failed each time, or refuses.
        """
        waits = list(_WAITS_S)
        while True:
            try:
                with _os_errors(self):
                    return request()
            except (StoreError, *_ANSWERS):
                raise
            except OSError as error:
                if not waits or isinstance(error, PermissionError):
                    raise StoreError(
                        f"{self}: the store cannot be read, so nothing is known of what is there: {error}. Check the network, the "
                        "credentials and the address, and start again"
                    ) from error
                time.sleep(waits.pop(0))

    def _read(self, operation: Callable[[Any, str], Any]) -> Any:
        return self.ask(lambda: self._do(operation))

    def _kind(self) -> str | None:
        """'file', 'directory' or None for nothing. fsspec's own questions take any error for a no: a store that is down, too."""
        try:
            return str(self._read(lambda system, key: system.info(key))["type"])
        except FileNotFoundError:
            return None

    def exists(self, **_: Any) -> bool:
        """Whether there is an object, or one below."""
        return self._kind() is not None

    def is_dir(self, **_: Any) -> bool:
        """Whether there is an object below."""
        return self._kind() == "directory"

    def is_file(self, **_: Any) -> bool:
        """Whether it is an object."""
        return self._kind() == "file"

    def is_symlink(self) -> bool:
        """Never."""
        return False

    def iterdir(self) -> Any:
        """What is directly below; nothing where nothing is."""
        try:
            names = self._read(lambda system, key: system.ls(key, detail=False))
        except FileNotFoundError:
            names = []
        last = {str(name).rstrip("/").rpartition("/")[2] for name in names}
        return iter([self / name for name in sorted(last - {"", self.name})])

    def glob(self, pattern: str, *_: Any, **__: Any) -> Any:
        """What is directly below, of such a name."""
        return iter([entry for entry in self.iterdir() if fnmatch.fnmatch(entry.name, pattern)])

    def rglob(self, pattern: str, *_: Any, **__: Any) -> Any:
        """All objects below; for the pattern `*` alone."""
        assert pattern == "*"
        base = len(self._do(lambda system, key: key.rstrip("/"))) + 1
        return iter([self / str(name)[base:] for name in self._read(lambda system, key: system.find(key))])

    def stat(self, **_: Any) -> os.stat_result:
        """Size, and no other field."""
        size = int(self._read(lambda system, key: system.info(key)).get("size") or 0)
        return os.stat_result((0, 0, 0, 0, 0, 0, size, 0, 0, 0))

    def resolve(self, strict: bool = False) -> "RemotePath":
        """An address is absolute."""
        return self

    def open(self, mode: str = "r", *_: Any, **__: Any) -> Any:
        """A stream; what is written appears when it is closed."""
        return self._do(lambda system, key: system.open(key, mode))

    def read_bytes(self) -> bytes:
        """The whole object."""
        return bytes(self._read(lambda system, key: system.cat_file(key)))

    def read_text(self, *_: Any, **__: Any) -> str:
        """The whole object as text."""
        return self.read_bytes().decode()

    def write_bytes(self, data: Any) -> int:
        """One request: afterwards the object is whole, or it was not written."""
        self._do(lambda system, key: system.pipe_file(key, bytes(data)))
        return len(data)

    def write_text(self, data: str, *_: Any, **__: Any) -> int:
        """The same for text."""
        return self.write_bytes(data.encode())

    def mkdir(self, *_: Any, **__: Any) -> None:
        """For stores that have folders; others take the name of an object as it is."""
        self._do(lambda system, key: system.makedirs(key, exist_ok=True))

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object."""
        try:
            self._do(lambda system, key: system.rm_file(key))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_tree(self) -> None:
        """Delete all below."""
        if self.exists():
            self._do(lambda system, key: system.rm(key, recursive=True))

    def buffered(self) -> io.BytesIO:
        """The whole object as a stream in which one can seek."""
        return io.BytesIO(self.read_bytes())
