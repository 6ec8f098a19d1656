"""Folders that appear complete or not at all: the commit protocol of checkpoints, on storage alone.

A checkpoint is several files from several processes. Written in place, a crash leaves half of it, and a loader that does
not check believes it. So: everything is written into a fresh hidden folder, a manifest lists every file with size and
checksum, a COMMIT file seals the manifest, all of it is synced, and one rename makes it visible. Whatever carries a valid
COMMIT is whole; all else is debris. Deleting goes the other way round: rename out of sight first, then break the seal.

    .step=4.3f9a1c.tmp/   being written           step=4/            committed: COMMIT manifest.json ...
    .step=4.3f9a1c.old/   on its way out; still valid until its COMMIT is unlinked

An object store has no rename. There a checkpoint is one or more *versions* below its name, each such a folder with a name of its
own; the COMMIT, written last and in one request, is what makes a version exist. The newest sealed version is the checkpoint, and
nothing is ever written twice under one name:

    step=4/3f9a1c22/      COMMIT manifest.json ...            step=4/90be77d1/     no COMMIT: being written, or debris

An overwritten target is renamed away before the new folder takes its name. A crash in between leaves both whole under
hidden names: `resolve` and `committed` find them there.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lightning_fms.remote_path import RemotePath, StoreError, place
from lightning_fms.versions import Migration, check_version, migrate

FIRST_RELEASED, FORMAT_VERSION = 1, 1
# What turns a manifest of that format into one of the next; `checkpoint.STATE_MIGRATIONS` does it for the state. COMMIT itself
# keeps its keys in all formats, so that any release can say of any checkpoint which format it has.
MANIFEST_MIGRATIONS: dict[int, Migration] = {}
COMMIT, MANIFEST = "COMMIT", "manifest.json"
_SEALED = {COMMIT, MANIFEST}
_VERSION = re.compile(r"[0-9a-f]{8}")
_HIDDEN = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}\.(?P<kind>tmp|old)")


class CheckpointError(ValueError):
    """A checkpoint that is damaged, incomplete, of another model, or could not be written."""


def staging_folder(path: Path, nonce: str) -> Path:
    """Where the checkpoint `path` is written before it is committed."""
    return path / nonce if isinstance(path, RemotePath) else path.parent / f".{path.name}.{nonce}.tmp"


def version_of(path: Path) -> Path:
    """Where the files of a checkpoint lie: in its folder, or on an object store in its newest sealed version, if there is one."""
    if not isinstance(path, RemotePath) or (path / COMMIT).is_file():
        return path
    sealed = [(_sealed_at(version), version) for version in _versions(path) if (version / COMMIT).is_file()]
    return max(sealed, key=lambda item: item[0])[1] if sealed else path


def _versions(path: Path) -> list[Path]:
    return [entry for entry in path.iterdir() if _VERSION.fullmatch(entry.name)]


def _sealed_at(version: Path) -> int:
    try:
        return int(read_header(version)["time_ns"])
    except CheckpointError:
        return -1  # behind any other, and before none, so that someone hears of it


def digest(file: Path) -> str:
    """Checksum of a file's content."""
    return str(file.ask(lambda: _digest(file)) if isinstance(file, RemotePath) else _digest(file))


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, new_checksum).hexdigest()


def digest_of(content: bytes) -> str:
    """Checksum of a content."""
    return new_checksum(content).hexdigest()


def new_checksum(content: bytes = b"") -> "hashlib.blake2b":
    """The checksum that manifests hold, to be updated."""
    return hashlib.blake2b(content, digest_size=16)


def describe(folder: Path, names: Iterable[str]) -> dict[str, list[Any]]:
    """Manifest entries `{name: [bytes, checksum]}` of files in a folder."""
    return {name: [(folder / name).stat().st_size, digest(folder / name)] for name in names}


def seal(folder: Path, files: dict[str, list[Any]], step: int) -> None:
    """Write the manifest and the COMMIT file that vouches for it, synced in this order."""
    manifest = folder / MANIFEST
    write_synced(manifest, json.dumps({"format": FORMAT_VERSION, "files": files}, indent=1, sort_keys=True).encode())
    sync_folder(folder)
    header = {"format": FORMAT_VERSION, "step": step, "time_ns": time.time_ns(), "manifest": digest(manifest)}
    write_synced(folder / COMMIT, json.dumps({**header, "header": _header_digest(header)}).encode())
    sync_folder(folder)


def publish(staging: Path, path: Path) -> None:
    """Give a sealed folder its name. What was there is renamed away first and removed afterwards."""
    if isinstance(path, RemotePath):  # it exists since it was sealed
        return _keep_only(path, staging)
    old = None
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        old = _hidden(path, "old")
        path.rename(old)
    staging.rename(path)
    sync_folder(path.parent)
    if old is not None:
        _destroy(old)
    sweep(path)


def sweep(path: Path) -> None:
    """Delete what attempts that died have left of the checkpoint `path`, which is whole itself."""
    if isinstance(path, RemotePath):
        return _keep_only(path, version_of(path))
    for leftover in hidden_versions(path):
        _destroy(leftover)


def sweep_folder(folder: Path, of: Callable[[str], bool]) -> None:
    """Delete what attempts that died have left in a folder of checkpoints.

    Args:
        folder: the checkpoints' folder.
        of: whether nothing is needed any more of the checkpoint of this name but what stands under it.
    """
    if isinstance(folder, RemotePath):
        for checkpoint in [entry for entry in folder.iterdir() if of(entry.name)]:
            _keep_only(checkpoint, version_of(checkpoint))
        return
    for entry in list(folder.iterdir()):
        match = _HIDDEN.fullmatch(entry.name)
        if match is not None and of(match["name"]):
            _destroy(entry)


def remove(path: Path) -> None:
    """Delete a checkpoint (folder, file or link) so that no crash leaves a half one under its name."""
    if isinstance(path, RemotePath):
        for version in _versions(path):
            (version / COMMIT).unlink(missing_ok=True)
        path.remove_tree()
    elif path.is_symlink():
        path.unlink()
    elif path.exists():
        old = _hidden(path, "old")
        path.rename(old)
        sync_folder(path.parent)
        _destroy(old)


def _keep_only(path: Path, kept: Path) -> None:
    for version in _versions(path):
        if version != kept:
            _destroy(version)


def discard(staging: Path) -> None:
    """Delete what was never sealed, as far as that goes."""
    with contextlib.suppress(OSError):
        _destroy(staging)


def check_target(path: Path) -> None:
    """Refuse to overwrite a folder that is no checkpoint (ValueError)."""
    if isinstance(path, RemotePath):
        if path.is_file() or any(not _VERSION.fullmatch(entry.name) for entry in path.iterdir()):
            raise ValueError(f"{path} holds other things than a checkpoint; it is not overwritten. Choose another name")
    elif path.is_dir() and not path.is_symlink() and any(path.iterdir()):
        known = (COMMIT, MANIFEST, ".metadata")
        if not any((path / name).exists() for name in known):
            raise ValueError(f"{path} is a folder that holds no checkpoint; it is not overwritten. Choose another name")


def verify(path: Path, names: Iterable[str] | None = None) -> dict[str, Any]:
    """Check a committed folder against its manifest and return the COMMIT header.

    Args:
        path: the checkpoint.
        names: check the content of these files only (ranks share the work); presence and sizes are always checked.

    Raises:
        CheckpointError: not committed, a format that is newer or was never released, or a file that is missing, short, foreign
            or changed.
        StoreError: whether it is, cannot be known now.
    """
    path = version_of(path)
    header = read_header(path)
    manifest = path / MANIFEST
    if not manifest.is_file() or digest(manifest) != header["manifest"]:
        raise CheckpointError(f"{path}: {MANIFEST} is missing or damaged")
    files = _files_in(manifest.read_bytes())
    present = {entry.name for entry in path.iterdir()} - _SEALED
    if missing := sorted(set(files) - present):
        raise CheckpointError(f"{path}: missing {', '.join(missing)}")
    if foreign := sorted(present - set(files)):
        raise CheckpointError(f"{path}: {', '.join(foreign)} does not belong to it; move it away")
    for name, (size, _) in files.items():
        if (found := (path / name).stat().st_size) != size:
            raise CheckpointError(f"{path}: {name} has {found} bytes instead of {size}")
    for name in files if names is None else names:
        if digest(path / name) != files[name][1]:
            raise CheckpointError(f"{path}: the content of {name} has changed since it was saved")
    return header


def read_header(path: Path) -> dict[str, Any]:
    """What COMMIT says: `format`, `step`, `time_ns`, `manifest` (a checksum).

    Raises:
        CheckpointError: not committed, a format that is newer or was never released, or a changed file.
    """
    path = version_of(path)
    header = _read_json(path / COMMIT, f"{path} was never committed")
    try:
        check_version(header.get("format"), FIRST_RELEASED, FORMAT_VERSION, str(path))
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    if header.pop("header", None) != _header_digest(header):
        raise CheckpointError(f"{path}: the content of {COMMIT} has changed since it was saved")
    return header


def listed_files(path: Path) -> list[str]:
    """Names in the manifest, sorted; empty if there is none, or a damaged one."""
    try:
        return sorted(_files_in((version_of(path) / MANIFEST).read_bytes()))
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError):
        return []


def _files_in(manifest: bytes) -> dict[str, list[Any]]:
    """`{name: [bytes, checksum]}` of a manifest of any format that can be read."""
    content = dict(json.loads(manifest))
    version = check_version(content.get("format"), FIRST_RELEASED, FORMAT_VERSION, MANIFEST)
    return dict(migrate(content, version, FORMAT_VERSION, MANIFEST_MIGRATIONS)["files"])


def committed(folder: Path) -> list[Path]:
    """Sealed folders in `folder`, newest first (by step, then time of commit); their content is not checked yet.

    Raises StoreError where a store does not say what there is, or how new it is.
    """
    found = []
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.is_dir() and not entry.is_symlink() and (version_of(entry) / COMMIT).is_file():
            try:
                header = read_header(entry)
                found.append(((int(header["step"]), int(header["time_ns"])), entry))
            except StoreError:
                raise
            except (ValueError, OSError):
                found.append(((sys.maxsize, 0), entry))  # first in line, so that someone hears of it
    return [entry for _, entry in sorted(found, key=lambda item: item[0], reverse=True)]


def resolve(path: Path) -> Path:
    """`path`, or where a crash in the middle of an overwrite left its newest whole version; that version on an object store."""
    path = place(path)
    if isinstance(path, RemotePath) or path.exists():
        return version_of(path)
    sealed = [p for p in committed(path.parent) if _is_version_of(path.name, p.name)]
    return sealed[0] if sealed else path


def adopt(folder: Path) -> Path:
    """Give a whole folder whose rename a crash prevented its visible name, if that is free; returns where it is."""
    match = _HIDDEN.fullmatch(folder.name)
    if match is None or match["kind"] != "tmp" or (target := folder.parent / match["name"]).exists():
        return folder
    folder.rename(target)
    sync_folder(target.parent)
    return target


def hidden_versions(path: Path) -> list[Path]:
    """Unfinished or outgoing folders of the checkpoint `path`."""
    return [p for p in path.parent.iterdir() if _is_version_of(path.name, p.name)]


def _is_version_of(name: str, hidden: str) -> bool:
    match = _HIDDEN.fullmatch(hidden)
    return match is not None and match["name"] == name


def write_synced(file: Path, content: bytes) -> None:
    """Write a file and sync it to storage."""
    if isinstance(file, RemotePath):
        file.write_bytes(content)
        return
    with file.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Make names in the folder durable."""
    if isinstance(folder, RemotePath):
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hidden(path: Path, kind: str) -> Path:
    return path.parent / f".{path.name}.{os.urandom(4).hex()}.{kind}"


def _destroy(path: Path) -> None:
    if isinstance(path, RemotePath):
        (path / COMMIT).unlink(missing_ok=True)
        path.remove_tree()
    elif path.is_dir() and not path.is_symlink():
        (path / COMMIT).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _header_digest(header: dict[str, Any]) -> str:
    return digest_of(json.dumps(header, sort_keys=True).encode())


def _read_json(file: Path, error: str) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_bytes()))
    except FileNotFoundError:
        raise CheckpointError(error) from None
    except ValueError:
        raise CheckpointError(f"{file} is damaged") from None
