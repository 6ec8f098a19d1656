"""The listing that a run began with, kept in a file beside its checkpoints.

Every cut of the data is computed from the listing. A run that goes on must compute the same cuts, whatever has happened to
the files in between: so the first listing is kept, and used again. A file that is gone or shorter leaves a hole (its
documents cannot be read, and `on_error` says what that means), one that grew is read as far as it reached, and nothing else
moves. New files would move everything, so they are refused: they can be added as another source.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import numpy as np

from lightning_fms.data.sources.listing import Listing, Paths, list_files
from lightning_fms.data.sources.remote import Url

_SHOWN = 3


def kept_file(folder: Path, source: str) -> Path:
    """Return where the listing of a source is kept."""
    return folder / f"{quote(source, safe='')}.json"


def list_or_recall(file: Path, paths: Paths, **options: Any) -> Listing:
    """Return the listing kept in a file; list the paths and keep it, if there is none yet.

    Args:
        file: Where it is kept. It is written aside and renamed, so several processes may do so at once.
        paths: What to list; see `list_files`, which takes the options.

    Raises:
        ValueError: If the paths hold files that the kept listing does not, nothing can be listed, or the file is damaged.
    """
    if not file.exists():
        listing = list_files(paths, **options)
        _keep(file, listing)
        return listing
    kept, missing = _read(file), ""
    try:
        now = list_files(paths, **options)
    except ValueError as error:
        if kept["remote"]:
            raise
        now, missing = None, str(error)
    root, sizes = (kept["root"], {}) if now is None else _found(now, kept)
    if new := sorted(set(sizes) - set(kept["names"])):
        raise ValueError(
            f"{len(new)} files were added since the run began ({_some(new)}); a run reads the files that it began with: add "
            "these as another source"
        )
    changes = [_change(name, size, sizes.get(name)) for name, size in zip(kept["names"], kept["sizes"], strict=True)]
    if now is None and not any(Path(root, name).exists() for name in kept["names"]):
        raise ValueError(missing)
    listing = Listing(
        Url(root) if kept["remote"] else Path(root), tuple(kept["names"]), np.array(kept["sizes"], dtype=np.int64)
    )
    if now is not None and now.remote is not None:
        versions = dict(zip(now.names, now.remote.versions, strict=True))
        listing = replace(
            listing, remote=replace(now.remote, versions=tuple(versions.get(name, "") for name in listing.names))
        )
    return replace(listing, changes=tuple(filter(None, changes)))


def _found(now: Listing, kept: dict[str, Any]) -> tuple[str, dict[str, int]]:
    """Return the folder that the kept names are relative to now, and the sizes of the files there are by these names.

    It is the new listing's own if the data moved as a whole; it is the old one where files are missing that widened it.
    """
    sizes = dict(zip(now.names, now.sizes.tolist(), strict=True))
    below = kept["root"].rstrip("/") + "/"
    paths = [str(now.path(file)) for file in range(len(now.names))]
    if set(sizes) <= set(kept["names"]) or not all(path.startswith(below) for path in paths):
        return str(now.root), sizes
    return kept["root"], {path.removeprefix(below): size for path, size in zip(paths, now.sizes.tolist(), strict=True)}


def _change(name: str, then: int, now: int | None) -> str:
    if now == then:
        return ""
    if now is None:
        return f"{name} is gone"
    return f"{name} had {then:,} bytes and has {now:,}"


def _keep(file: Path, listing: Listing) -> None:
    content = {
        "root": str(listing.root), "remote": listing.remote is not None, "names": list(listing.names),
        "sizes": listing.sizes.tolist(),
    }  # fmt: skip
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f".{file.name}.{uuid4().hex}")  # processes of two nodes may have one id
    with aside.open("w") as out:
        json.dump(content, out)
        out.flush()
        os.fsync(out.fileno())
    aside.rename(file)


def _read(file: Path) -> dict[str, Any]:
    try:
        kept = json.loads(file.read_text())
        if len(kept["names"]) == len(kept["sizes"]) and {"root", "remote"} <= set(kept):
            return kept
    except (OSError, ValueError, TypeError, KeyError):
        pass
    raise ValueError(f"{file}: is no listing of a run's files; restore it, or remove it to list the files anew")


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
