"""Remote files as if they were local: found by address, folder or glob."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsspec.utils import glob_translate

from lightning_fms.data.sources.cache import Cache
from lightning_fms.data.sources.stores import RemoteFile, open_store, persist

_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")
_MAGIC = re.compile(r"[*?\[]")


class Url(str):
    """An address that names join like those of a `Path`."""

    def __truediv__(self, name: str) -> "Url":
        return Url(f"{self.rstrip('/')}/{name}")


Location = Path | Url


def is_remote(path: object) -> bool:
    """Whether a path begins with a scheme, other than that of local files."""
    return isinstance(path, str) and _SCHEME.match(path) is not None and not path.startswith("file://")


@dataclass(frozen=True)
class Remote:
    """What a listing of remote files has beside names and sizes.

    Args:
        versions: What tells each file from another under its name.
        options: For the store of the scheme (credentials, endpoint).
        cache: Where blocks are kept.
    """

    versions: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    cache: Cache = field(default_factory=Cache)


def find_remote(urls: Sequence[str], options: Mapping[str, Any] | None) -> dict[str, RemoteFile]:
    """Find the files behind addresses, folders and globs, in the order of their names.

    Hidden files and those that begin with `_` are left out, unless an address names them outright.

    Raises:
        ValueError: If an address cannot be reached, or nothing is there.
    """
    found: dict[str, RemoteFile] = {}
    for url in urls:
        found |= _expand(url, options)
    return dict(sorted(found.items()))


def find_file(url: str, options: Mapping[str, Any] | None) -> RemoteFile | None:
    """Find one file; `None` if it is not there.

    Raises:
        ValueError: If its address cannot be reached.
    """
    return _find(url, options).get(str(url))


def _find(url: str, options: Mapping[str, Any] | None) -> dict[str, RemoteFile]:
    try:
        return persist(lambda: open_store(url, options).find(url))
    except FileNotFoundError:
        return {}
    except Exception as error:
        raise ValueError(f"{url}: cannot be listed ({error}); check address, credentials and network") from None


def _expand(url: str, options: Mapping[str, Any] | None) -> dict[str, RemoteFile]:
    url = url.rstrip("/")
    magic = _MAGIC.search(url)
    below = _find(url[: magic.start()].rpartition("/")[0] if magic else url, options)
    pattern = re.compile(glob_translate(url)) if magic else None
    named = url.split("/")
    files = {
        name: file
        for name, file in below.items()
        if (pattern is None or pattern.match(name))
        and all(part in named or not part.startswith((".", "_")) for part in name.split("/"))
    }
    if not files:
        what = "the glob matches no file" if magic else "no such file or folder, or nothing in it"
        raise ValueError(f"{url}: {what}; check the address of the source")
    return files
