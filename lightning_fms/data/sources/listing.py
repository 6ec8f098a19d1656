"""What a source knows before it reads a byte: its files, their sizes, and the fragments cut from them.

Everything that follows (segments, windows, positions) is computed from this listing, so two processes that see the same
listing agree on every document without talking, and a changed listing is noticed by its digest.
"""

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

import numpy as np

FRAGMENT_BYTES = 64 << 20
"""A larger file is cut into fragments of this size, so that the permutation of fragments mixes within files too."""

Paths = str | os.PathLike | Sequence[str | os.PathLike]


@dataclass(frozen=True)
class Listing:
    """Files of a source, in one fixed order.

    Args:
        root: Folder that `names` are relative to; moving the data does not change the listing.
        names: File names, sorted.
        sizes: int64, bytes of each file.
        splittable: Whether documents can be found from any byte on; otherwise a file is one fragment.
    """

    root: Path
    names: tuple[str, ...]
    sizes: np.ndarray
    splittable: bool = True

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
        pieces = -(-self.sizes // FRAGMENT_BYTES) if self.splittable else (self.sizes > 0).astype(np.int64)
        file = np.repeat(np.arange(len(self.sizes)), pieces)
        ordinal = np.arange(len(file)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        start = ordinal * FRAGMENT_BYTES
        size = np.minimum(self.sizes[file] - start, FRAGMENT_BYTES) if self.splittable else self.sizes[file]
        return file, start, size

    def path(self, file: int) -> Path:
        """Return the path of a file."""
        return self.root / self.names[file]


def list_files(paths: Paths, splittable: bool = True) -> Listing:
    """List the files behind a path, a folder, a glob or a list of those, without opening any.

    Hidden files and those that begin with `_` are left out, unless a path names them outright.

    Raises:
        ValueError: If a path does not exist, matches nothing, or the files are all empty.
    """
    try:
        files = sorted({file for path in _as_list(paths) for file in _expand(Path(path).expanduser())})
    except OSError as error:
        raise ValueError(f"{error.filename}: cannot be listed ({error.strerror}); check its permissions") from None
    root = Path(os.path.commonpath([file.parent for file in files]))
    sizes = np.array([_size(file) for file in files], dtype=np.int64)
    if sizes.sum() == 0:
        raise ValueError(f"{_shown(paths)}: all {len(files)} files are empty; give a source with data")
    return Listing(root, tuple(str(file.relative_to(root)) for file in files), sizes, splittable)


def _as_list(paths: Paths) -> list[str | os.PathLike]:
    if isinstance(paths, (str, os.PathLike)):
        return [paths]
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
        return [p.absolute() for p in files]
    if path.is_dir():
        files = _files_below(path)
        if not files:
            raise ValueError(
                f"{path}: the folder holds no data file (hidden files and those that begin with _ do not count)"
            )
        return files
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder; check the path of the source")
    return [path.absolute()]


def _files_below(folder: Path) -> list[Path]:
    files = []
    for parent, folders, names in os.walk(folder.absolute(), onerror=_raise):
        folders[:] = filter(_visible, folders)
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
