"""`bucket://`: an object store for tests, real across processes: objects are files below the folder in FMS_TEST_BUCKET.

As on a store, an object appears when its stream is closed, a put is one step, nothing is renamed, and names with slashes need no
folders. It counts what changes it, and with `fatal` set dies before that change, and with it all that would come.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem


class Killed(BaseException):
    """Not an Exception: nothing in between may swallow it."""


class Bucket(AbstractFileSystem):
    protocol = "bucket"
    cachable = True
    count, fatal, dead = 0, -1, False
    kill: Callable[[], None] | None = None

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(path).removeprefix("bucket://").strip("/")

    @staticmethod
    def _file(path: str) -> Path:
        return Path(os.environ["FMS_TEST_BUCKET"]) / Bucket._strip_protocol(path)

    @classmethod
    def _change(cls) -> None:
        if cls.dead or cls.count == cls.fatal:
            cls.dead = True
            if cls.kill is not None:
                cls.kill()
            raise Killed
        cls.count += 1

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        file = self._file(path)
        if not file.exists():
            raise FileNotFoundError(path)
        size = file.stat().st_size if file.is_file() else 0
        return {"name": self._strip_protocol(path), "size": size, "type": "file" if file.is_file() else "directory"}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        file, key = self._file(path), self._strip_protocol(path)
        if not file.exists():
            raise FileNotFoundError(path)
        names = [key] if file.is_file() else [f"{key}/{entry.name}" for entry in file.iterdir()]
        return [self.info(name) for name in names] if detail else names

    def _put(self, path: str, content: bytes) -> None:
        self._change()
        file = self._file(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=os.environ["FMS_TEST_BUCKET"] + ".tmp", delete=False) as aside:
            aside.write(content)
        os.replace(aside.name, file)

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        self._put(path, value)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        return self._file(path).read_bytes()[start:end]

    def _rm(self, path: str) -> None:
        self._change()
        file = self._file(path)
        file.unlink()
        for parent in file.parents:  # an empty folder is nothing
            if parent == Path(os.environ["FMS_TEST_BUCKET"]) or any(parent.iterdir()):
                break
            parent.rmdir()

    def rm_file(self, path: str) -> None:
        self._rm(path)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        for name in sorted(self.find(path)):
            self._rm(name)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "rb" and not self._file(path).is_file():
            raise FileNotFoundError(path)
        return _Object(self, path, mode, **{key: value for key, value in options.items() if key == "cache_options"})


class _Object(AbstractBufferedFile):
    def _initiate_upload(self) -> None:
        self.parts = b""

    def _upload_chunk(self, final: bool = False) -> bool:
        self.parts += self.buffer.getvalue()
        if final:
            self.fs._put(self.path, self.parts)
        return True

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.cat_file(self.path, start, end)


def open_bucket(folder: Path) -> Path:
    """The folder behind `bucket://`, also of processes that are started from here on."""
    folder.mkdir(parents=True, exist_ok=True)
    Path(f"{folder}.tmp").mkdir(exist_ok=True)
    os.environ["FMS_TEST_BUCKET"] = str(folder)
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    Bucket.count, Bucket.fatal, Bucket.dead, Bucket.kill = 0, -1, False, None
    return folder
