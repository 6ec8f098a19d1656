"""Weights as safetensors files, the form in which models are handed on: read and written tensor by tensor.

A large model is several files and an index that says which tensor is where. Readers elsewhere take what files they find, so a
folder with a file missing loads without a word; here every name is looked up before the first is read. Nothing in such a
file is executed. Writing goes aside and ends in one rename, as for checkpoints.

Format: https://huggingface.co/docs/safetensors; the index is `model.safetensors.index.json` of `transformers`.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lightning_fms.distributed import commit
from lightning_fms.distributed.commit import CheckpointError
from lightning_fms.local_paths import refuse_remote

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Entry:
    """Where a tensor is, and its shape."""

    file: Path
    shape: torch.Size


def is_safetensors(path: Path) -> bool:
    """Whether a path is a safetensors file, or a folder of them."""
    if path.is_dir():
        return (path / INDEX).is_file() or any(path.glob("*.safetensors"))
    return path.suffix == ".safetensors"


def entries(path: Path) -> dict[str, Entry]:
    """All tensors of a file or folder by name.

    Raises:
        CheckpointError: a file is missing or damaged, or lacks a tensor that the index has.
    """
    refuse_remote(path, "safetensors")
    if not path.is_dir():
        return _entries_of(path)
    if (path / INDEX).is_file():
        try:
            index = json.loads((path / INDEX).read_text())["weight_map"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path / INDEX} is damaged: {error!r}") from error
        found = {name: e for file in sorted(set(index.values())) for name, e in _entries_of(path / file).items()}
        if lost := sorted(index.keys() - found.keys()):
            raise CheckpointError(
                f"{path} lacks {lost[0]}, which its index has in {index[lost[0]]} ({len(lost)} in all)"
            )
        return found
    return {name: e for file in sorted(path.glob("*.safetensors")) for name, e in _entries_of(file).items()}


def _entries_of(file: Path) -> dict[str, Entry]:
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: Entry(file, torch.Size(opened.get_slice(name).get_shape())) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} is missing or damaged: {error}") from error


def read(found: Mapping[str, Entry], names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield named tensors, one at a time, on the CPU; each file is opened once."""
    for file in sorted({found[name].file for name in names}):
        with safe_open(file, framework="pt") as opened:
            for name in names:
                if found[name].file == file:
                    yield name, opened.get_tensor(name)


def write(
    folder: Path,
    sizes: Mapping[str, int],
    load: Callable[[Sequence[str]], Mapping[str, Tensor]],
    others: Mapping[str, Any],
    shard_bytes: int,
) -> list[str]:
    """Write a new folder; returns the names of the files with tensors.

    Args:
        folder: must not exist.
        sizes: bytes of each tensor, in the order in which they are written.
        load: gives the tensors of one file, contiguous and without shared memory.
        others: JSON files to put beside them, by name.
        shard_bytes: size from which another file is begun.

    Raises:
        ValueError: the folder exists.
    """
    refuse_remote(folder, "a folder of safetensors")
    if folder.exists():
        raise ValueError(f"{folder} exists; give a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = commit.staging_folder(folder, os.urandom(4).hex())
    staging.mkdir()
    try:
        shards = _shards(sizes, shard_bytes)
        files = (
            [SINGLE]
            if len(shards) == 1
            else [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        )
        for file, names in zip(files, shards, strict=True):
            save_file(dict(load(names)), staging / file, metadata={"format": "pt"})
        if len(files) > 1:
            where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
            others = {**others, INDEX: {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}}
        for name, content in others.items():
            (staging / name).write_text(json.dumps(content, indent=2) + "\n")
        for file_path in staging.iterdir():
            _sync(file_path)
        commit.sync_folder(staging)
        staging.rename(folder)
        commit.sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return files


def _shards(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if shards[-1] and held + size > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    return shards


def _sync(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
