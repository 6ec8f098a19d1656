"""What a source knows before it reads a byte: its files, their sizes, and the fragments cut from them.

Everything that follows (segments, windows, positions) is computed from this listing, so two processes that see the same
listing agree on every document without talking, and a changed listing is noticed by its digest.
"""

import glob
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from lightning_fms.data.sources.cache import Cache
from lightning_fms.data.sources.remote import Remote, Url, find_file, find_remote, is_remote

FRAGMENT_BYTES = 64 << 20
"""A larger file is cut into fragments of this size, so that the permutation of fragments mixes within files too."""

MOST_FRAGMENTS = 1 << 20
"""Beyond 64 TiB fragments become larger instead of more: a process holds 72 bytes for each."""

Paths = str | os.PathLike | Sequence[str | os.PathLike]


@dataclass(frozen=True)
class Listing:
    """Files of a source, in one fixed order.

    Args:
        root: Folder or address that `names` are relative to; moving the data does not change the listing.
        names: File names, sorted.
        sizes: int64, bytes of each file.
        splittable: Whether documents can be found from any byte on; otherwise a file is one fragment.
        remote: How to read the files if they are remote; `None` if they are local.
        changes: What has become of files since the listing was made, in words; no part of the digest.
    """

    root: Path | Url
    names: tuple[str, ...]
    sizes: np.ndarray
    splittable: bool = True
    remote: Remote | None = None
    changes: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return int(self.sizes.sum())

    @cached_property
    def digest(self) -> str:
        """Hash of names and sizes: what makes two listings the same."""
        hasher = blake2b(digest_size=16)
        for name, size in zip(self.names, self.sizes, strict=True):
            hasher.update(f"{name}\0{size}\0".encode())
        return hasher.hexdigest()

    @cached_property
    def fragments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """File index, first byte and bytes of every fragment, in listing order (int64 each)."""
        whole = FRAGMENT_BYTES * -(-self.total_bytes // (FRAGMENT_BYTES * MOST_FRAGMENTS))
        pieces = -(-self.sizes // whole) if self.splittable else (self.sizes > 0).astype(np.int64)
        file = np.repeat(np.arange(len(self.sizes)), pieces)
        ordinal = np.arange(len(file)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        start = ordinal * whole
        size = np.minimum(self.sizes[file] - start, whole) if self.splittable else self.sizes[file]
        return file, start, size

    def path(self, file: int) -> Path | Url:
        """Return the path or address of a file."""
        return self.root / self.names[file]

    def unsplittable(self) -> "Listing":
        """Return the listing with every file one fragment."""
        return replace(self, splittable=False)

    def existing(self, names: Iterable[str]) -> "Listing":
        """Return the listing of the files of these names that there are, in the order given, listed here or not.

        Raises:
            ValueError: If a store cannot be reached.
        """
        known = {name: (int(size), i) for i, (name, size) in enumerate(zip(self.names, self.sizes, strict=True))}
        found: dict[str, tuple[int, str]] = {}
        for name in names:
            if name in known:
                size, file = known[name]
                found[name] = size, self.remote.versions[file] if self.remote else ""
            elif isinstance(self.root, Url):
                if (there := find_file(self.root / name, self.remote.options if self.remote else None)) is not None:
                    found[name] = there.size, there.version
            elif (self.root / name).is_file():
                found[name] = (self.root / name).stat().st_size, ""
        remote = self.remote and replace(self.remote, versions=tuple(version for _, version in found.values()))
        sizes = np.array([size for size, _ in found.values()], dtype=np.int64)
        return replace(self, names=tuple(found), sizes=sizes, remote=remote)

    def take(self, files: Iterable[int]) -> "Listing":
        """Return a listing of some of the files, in the order given."""
        chosen = list(files)
        remote = self.remote and replace(self.remote, versions=tuple(self.remote.versions[file] for file in chosen))
        names = tuple(self.names[file] for file in chosen)
        return replace(self, names=names, sizes=self.sizes[chosen], remote=remote)


def list_files(
    paths: Paths,
    splittable: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    cache: Cache | None = None,
) -> Listing:
    """List the files behind a path, a folder, a glob or a list of those, without opening any.

    Hidden files and those that begin with `_` are left out, unless a path names them outright.

    Args:
        paths: What to list, local or remote (`s3://bucket/folder`).
        splittable: Whether documents can be found from any byte on.
        storage_options: For the client of a remote store: credentials, endpoint.
        cache: Where blocks of remote files are kept; default: `Cache()`.

    Raises:
        ValueError: If a path does not exist, matches nothing, or the files are all empty; if a store cannot be reached.
    """
    given = _as_list(paths)
    if any(map(is_remote, given)):
        return _list_remote(given, splittable, storage_options or {}, cache or Cache())
    if storage_options:
        raise ValueError(f"storage_options={sorted(storage_options)} apply to remote paths, not to {_shown(paths)}")
    try:
        files = sorted({file for path in given for file in _expand(_local(path))})
    except OSError as error:
        raise ValueError(f"{error.filename}: cannot be listed ({error.strerror}); check its permissions") from None
    root = Path(os.path.commonpath([file.parent for file in files]))
    sizes = np.array([_size(file) for file in files], dtype=np.int64)
    names = tuple(str(file.relative_to(root)) for file in files)
    return _not_empty(paths, Listing(root, names, sizes, splittable))


def _list_remote(given: list[str | os.PathLike], splittable: bool, options: Mapping[str, Any], cache: Cache) -> Listing:
    urls = [str(path) for path in given]
    if len({url.partition("://")[0] if is_remote(url) else "" for url in urls}) > 1:
        raise ValueError(f"{_shown(urls)}: one source is all local, or all on one kind of store")
    files = find_remote(urls, options)
    folders = zip(*(url.split("/")[:-1] for url in files), strict=False)
    root = Url("/".join(parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, folders)))
    sizes = np.array([file.size for file in files.values()], dtype=np.int64)
    names = tuple(url[len(root) + 1 :] for url in files)
    remote = Remote(tuple(file.version for file in files.values()), options, cache)
    return _not_empty(urls, Listing(root, names, sizes, splittable, remote))


def _not_empty(paths: Paths, listing: Listing) -> Listing:
    if listing.total_bytes == 0:
        raise ValueError(f"{_shown(paths)}: all {len(listing.names)} files are empty; give a source with data")
    return listing


def _local(path: str | os.PathLike) -> Path:
    return Path(str(path).removeprefix("file://")).expanduser()


def _as_list(paths: Paths) -> list[str | os.PathLike]:
    if isinstance(paths, (str, os.PathLike)):
        return [paths]
    if not isinstance(paths, Sequence) or not all(isinstance(path, (str, os.PathLike)) for path in paths):
        raise ValueError(f"path={paths!r} is no path; give a file, folder, glob or address, or a list of them")
    if not paths:
        raise ValueError("a source's list of paths is empty; name at least one file, folder or glob")
    return list(paths)


def _expand(path: Path) -> list[Path]:
    if glob.has_magic(str(path)) and not path.exists():
        found = [Path(p) for p in glob.glob(str(path), recursive=True)]
        named = path.parts
        files = [p for p in found if p.is_file() and all(_visible(part) or part in named for part in p.parts)]
        if not files:
            raise ValueError(f"{path}: the glob matches no file; check the pattern and that the path exists")
        return [Path(os.path.abspath(p)) for p in files]
    if path.is_dir():
        files = _files_below(path)
        if not files:
            raise ValueError(
                f"{path}: the folder holds no data file (hidden files and those that begin with _ do not count)"
            )
        return files
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder; check the path of the source")
    return [Path(os.path.abspath(path))]  # without `..`, so that a file spelled twice is one


def _files_below(folder: Path) -> list[Path]:
    """Return the files below a folder, those in linked folders too; a folder that is reached twice counts once."""
    files, reached = [], set()
    for parent, folders, names in os.walk(folder.absolute(), onerror=_raise, followlinks=True):
        real = os.path.realpath(parent)
        if real in reached:
            folders.clear()
            continue
        reached.add(real)
        folders[:] = sorted(filter(_visible, folders))
        files += [path for name in names if _visible(name) and (path := Path(parent, name)).is_file()]
    return files


def _raise(error: OSError) -> None:
    raise error


def _visible(name: str) -> bool:
    return not name.startswith((".", "_"))


def _size(file: Path) -> int:
    if not os.access(file, os.R_OK):
        raise ValueError(f"{file}: cannot be read; check its permissions")
    return file.stat().st_size


def _shown(paths: Paths) -> str:
    return ", ".join(str(path) for path in _as_list(paths))
