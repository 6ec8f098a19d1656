"""A bounded cache on the local disk, shared by the processes of a node.

An entry is a folder of files that somebody can make again: a decoded part of a file, a block of a remote one. It is
written aside and renamed into place, so what is there is whole, also after a process was killed. A lock per group of keys
lets one process make an entry while the others wait for it. Beyond the limit, the entries that were opened longest ago are
unlinked; a process that has a file of theirs open reads on, and whoever comes later makes the entry again.

The cache deletes only entries (folders named by a hash, all of whose files have names that this package gives).
"""

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from itertools import count
from pathlib import Path

FOLDER_VARIABLE, LIMIT_VARIABLE = "LIGHTNING_FMS_CACHE", "LIGHTNING_FMS_CACHE_LIMIT"
DEFAULT_LIMIT = "50GB"

_VERSION = "v1"  # of what entries hold; a change of format starts another tree
_KEY = re.compile(r"(unit|block)-[0-9a-f]{32}")
_FILES = re.compile(r"chunk-0-\d+\.bin|index\.json|errors\.json|block\.bin")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", re.IGNORECASE)
_RESCAN = (
    64  # a process looks at the whole cache when it wrote 1/64 of the limit: P processes exceed it by P/64 at most
)
_serial = count()


def cache_key(kind: str, *parts: object) -> str:
    """Name an entry by everything that its content follows from."""
    return f"{kind}-{blake2b(repr(parts).encode(), digest_size=16).hexdigest()}"


class Cache:
    """Entries by key, in one folder.

    Args:
        folder: Where to keep them; default: the environment's `LIGHTNING_FMS_CACHE`, else `lightning_fms` in the user's cache
            folder. Runs of one user on one machine may share it; it is trusted, so others must not be able to write to it.
        limit: Bytes to stay under, a number or text such as `"50GB"`; default: the environment's
            `LIGHTNING_FMS_CACHE_LIMIT`, else 50 GB. One entry larger than that still works and goes with the next one.

    Raises:
        ValueError: For a limit that is no size.
    """

    def __init__(self, folder: str | Path | None = None, limit: int | str | None = None) -> None:
        home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
        chosen = folder or os.environ.get(FOLDER_VARIABLE) or Path(home, "lightning_fms")
        self.folder = Path(chosen).expanduser().absolute()
        self.limit = _parse_size(limit if limit is not None else os.environ.get(LIMIT_VARIABLE) or DEFAULT_LIMIT)
        self._tree, self._aside, self._locks = (self.folder / _VERSION / name for name in ("entries", "aside", "locks"))
        self._unseen = self.limit  # bytes written since the last look at the whole; the first write looks

    def open(self, key: str, name: str, write: Callable[[Path], None]) -> int:
        """Open a file of an entry for reading; the caller closes the descriptor.

        Args:
            key: From `cache_key`.
            name: Name of the file in the entry.
            write: Makes the entry's files in a folder that is given; called if the entry is not there.

        Raises:
            ValueError: If the cache cannot be written.
        """
        entry, written = self._entry(key), 0
        try:
            with suppress(FileNotFoundError):
                return self._open(entry, name)
            with self._lock(key):
                with suppress(FileNotFoundError):  # another process may have made it meanwhile
                    return self._open(entry, name)
                written = self._make(key, write)
                return self._open(entry, name)  # still locked: no other process can have evicted it
        except OSError as error:
            raise ValueError(
                f"{self.folder}: the cache cannot be used ({error.strerror or error}); make room, or set {FOLDER_VARIABLE} "
                f"to a folder with space (now limited to {self.limit} bytes by {LIMIT_VARIABLE})"
            ) from None
        finally:
            if written:
                self._wrote(written, key)

    def _entry(self, key: str) -> Path:
        return self._tree / key[-2:] / key

    def _open(self, entry: Path, name: str) -> int:
        descriptor = os.open(entry / name, os.O_RDONLY | os.O_CLOEXEC)
        with suppress(OSError):  # evicted a moment ago, or somebody else's: it can be read all the same
            os.utime(entry)  # when an entry was last opened is what eviction goes by
        return descriptor

    def _make(self, key: str, write: Callable[[Path], None]) -> int:
        """Write an entry aside and rename it; return its bytes. The caller holds the key's lock."""
        self._clear_aside(key)
        folder = self._aside / f"{key}.{os.getpid()}.{next(_serial)}"
        folder.mkdir(parents=True, mode=0o700)
        try:
            write(folder)
            written = sum(file.stat().st_size for file in folder.iterdir())
            entry = self._entry(key)
            entry.parent.mkdir(parents=True, exist_ok=True)
            if entry.exists():  # lacks a file: not ours to repair, so make way
                entry.rename(self._aside / f"{key}.damaged.{os.getpid()}.{next(_serial)}")
            folder.rename(entry)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return written

    @contextmanager
    def _lock(self, key: str, wait: bool = True) -> Iterator[bool]:
        """Hold the lock of a key's group, or yield `False` if another holds it and we do not wait.

        A group (256 a kind) and not a key, so that locks do not pile up as files. Kinds have their own: who makes a unit
        may wait for a block, and never the other way round.
        """
        self._locks.mkdir(parents=True, exist_ok=True)
        group = f"{key.partition('-')[0]}-{key[-2:]}"
        descriptor = os.open(self._locks / group, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                yield False
            else:
                yield True
        finally:
            os.close(descriptor)

    # -- eviction -------------------------------------------------------------------------------------------------------------

    def _wrote(self, written: int, key: str) -> None:
        self._unseen += written
        if self._unseen * _RESCAN >= self.limit:
            self._unseen = 0
            self._evict(keep=self._entry(key))

    def _evict(self, keep: Path) -> None:
        entries = sorted(self._entries())
        excess = sum(size for _, size, _ in entries) - self.limit
        for _, size, entry in entries:
            if excess <= 0:
                break
            if entry != keep and self._remove(entry):
                excess -= size
        for leftover in _folders(self._aside):
            key = leftover.name.partition(".")[0]
            with self._lock(key, wait=False) as held:
                if held:  # so its writer is dead
                    self._clear_aside(key)

    def _entries(self) -> Iterator[tuple[int, int, Path]]:
        """Yield `(last opened in ns, bytes, folder)` of every entry."""
        for group in _folders(self._tree):
            for entry in _folders(group):
                try:
                    used = entry.stat().st_mtime_ns
                    sizes = [file.stat().st_size for file in os.scandir(entry)]
                except FileNotFoundError:
                    continue  # another process evicts too
                yield used, sum(sizes), entry

    def _remove(self, entry: Path) -> bool:
        """Unlink an entry that nobody is making; return whether it is gone."""
        with self._lock(entry.name, wait=False) as held:
            if not held or not _is_ours(entry):
                return False
            aside = self._aside / f"{entry.name}.evicted.{os.getpid()}.{next(_serial)}"
            try:
                self._aside.mkdir(parents=True, exist_ok=True)
                entry.rename(aside)
            except OSError:
                return False
            shutil.rmtree(aside, ignore_errors=True)
            return True

    def _clear_aside(self, key: str) -> None:
        for folder in self._aside.glob(f"{key}.*"):
            if _is_ours(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _folders(folder: Path) -> list[Path]:
    try:
        return [Path(entry) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []


def _is_ours(folder: Path) -> bool:
    """Whether a folder is an entry and holds nothing but what entries hold."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return _KEY.fullmatch(folder.name.partition(".")[0]) is not None and all(map(_FILES.fullmatch, names))


def _parse_size(size: int | str) -> int:
    found = _SIZE.fullmatch(str(size).strip())
    if not found or float(found[1]) <= 0:
        raise ValueError(f"cache limit {size!r} is no size; give bytes, or a number with KB, MB, GB or TB")
    return int(float(found[1]) * 1000 ** " KMGT".index(found[2].upper() or " "))
