"""Committed checkpoints that load on any number of ranks: DCP for tensors, one plain object for the rest.

PyTorch's distributed checkpoint (DCP) saves each rank's shards and reads any slice back, bit-exactly, on any mesh. It
does not protect itself: overwriting in place and a kill, a flipped bit, a missing file all load silently. So it writes
inside the commit protocol of `commit`, and a load verifies every byte before a weight is touched.

    __{rank}_0.distcp, .metadata   tensors: `model.NAME`, `optimizer.INDEX.NAME.KEY`
    state.pt                       everything else, from rank 0; plain types, read with weights_only=True
    manifest.json, COMMIT          see `commit`

All ranks call `save` and `load`. Every phase in which one rank alone can fail ends in an exchange of errors, so a full
disk raises on all ranks instead of leaving the others in a barrier. Everything after the tensors are in the hands of
`save` works on its arguments and on `group` alone: an asynchronous save is the same call in a thread, with tensors that
were copied to the CPU and a gloo group of its own.
"""

import io
import logging
import os
import pickle
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_fms.distributed import commit
from lightning_fms.distributed.commit import CheckpointError
from lightning_fms.distributed.full_disk import said_of_full_disk
from lightning_fms.distributed.objects import Objects, ObjectWriter
from lightning_fms.local_paths import refuse_remote
from lightning_fms.remote_path import RemotePath, StoreError, place
from lightning_fms.versions import Migration, migrate

log = logging.getLogger(__name__)
STATE_FILE = "state.pt"
# What turns the content of `state.pt` of that format (`commit.FORMAT_VERSION`) into that of the next.
STATE_MIGRATIONS: dict[int, Migration] = {}


def save(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, Any] | bytes,
    step: int,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write and commit a checkpoint. Called on all ranks with the same path; returns when it is durable.

    Args:
        path: target folder on a file system that all ranks share, or on an object store; overwritten safely if it is a checkpoint.
        tensors: this rank's tensors; DTensors are saved as shards, others once.
        state: everything else, also as the bytes that `serialize` makes of it; rank 0's copy is saved.
        step: optimizer steps done, the order among checkpoints.
        group: process group for coordination; None is the default group, or one process without any.

    Raises:
        CheckpointError: a rank could not write; the target is untouched.
        ValueError: the target is a folder that is no checkpoint.
    """
    path, rank = place(path), rank_in(group)
    content = (
        state if isinstance(state, bytes) else everywhere(lambda: serialize(state) if rank == 0 else b"", group)[0]
    )
    everywhere(lambda: commit.check_target(path) if rank == 0 else None, group)
    nonce = broadcast(os.urandom(4).hex(), group)
    staging = commit.staging_folder(path, nonce)
    try:
        everywhere(lambda: staging.mkdir(parents=True) if rank == 0 else None, group)
        files = everywhere(lambda: _write(staging, tensors, content, rank, group), group)
        if not isinstance(staging, RemotePath):
            files = everywhere(lambda: commit.describe(staging, _own_files(staging, rank)), group)
        merged = {name: entry for part in files for name, entry in part.items()}
        everywhere(lambda: _commit(staging, path, merged, step) if rank == 0 else None, group)
    except Exception:
        if rank == 0 and not is_committed(staging):  # sealed but not renamed, it is whole: `commit.resolve` finds it
            commit.discard(staging)
        raise


def read_metadata(path: Path) -> dict[str, TensorStorageMetadata]:
    """Names, global shapes and dtypes of a checkpoint's tensors."""
    entries = _reader(path).read_metadata().state_dict_metadata
    return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def load_tensors(path: Path, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Read the named tensors in place, each rank its own slices. Verify first.

    Raises CheckpointError where storage fails in the middle; some tensors may be overwritten by then.
    """
    try:
        with _silent_alone():
            dcp.load(dict(tensors), storage_reader=_reader(path), process_group=group)
    except CheckpointException as error:
        raise CheckpointError(f"{path}: {_described(error)}") from error


def load_state(path: Path, weights_only: bool | None = None) -> dict[str, Any]:
    """The part that is no tensor, as this release has it. With `weights_only` None or True no pickled code is executed.

    Raises CheckpointError where it holds objects that need `weights_only=False`.
    """
    folder = commit.version_of(path)
    content = _torch_load(folder / STATE_FILE, weights_only)
    return migrate(content, commit.read_header(folder)["format"], commit.FORMAT_VERSION, STATE_MIGRATIONS)


def _torch_load(file: Path, weights_only: bool | None, mmap: bool = False) -> dict[str, Any]:
    try:
        source = file.buffered() if isinstance(file, RemotePath) else file
        return dict(torch.load(source, map_location="cpu", mmap=mmap, weights_only=weights_only is not False))
    except pickle.UnpicklingError as error:
        lines = str(error).strip().splitlines()
        what = next((line.strip() for line in lines if "GLOBAL" in line), lines[0])
        raise CheckpointError(
            f"{file} holds objects of other classes ({what}). If you trust where it "
            f"comes from, load it with `weights_only=False`; save plain types to avoid this"
        ) from error
    except StoreError:
        raise
    except (OSError, RuntimeError, EOFError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error


def verify(path: Path, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Check every byte of a committed checkpoint, the ranks sharing the files; see `commit.verify`."""
    rank, world = rank_in(group), dist.get_world_size(group) if dist.is_initialized() else 1
    return everywhere(lambda: commit.verify(path, commit.listed_files(path)[rank::world]), group)[0]


def is_committed(path: Path) -> bool:
    """Whether the folder carries a COMMIT; its content is not checked."""
    return (commit.version_of(path) / commit.COMMIT).is_file()


def latest_committed(folder: str | Path) -> Path | None:
    """The newest valid checkpoint directly inside a folder, or None where none was ever committed.

    To be called on one process, whose answer the others take. Newest is by step; each candidate is verified in full,
    and a damaged one is passed over for the next older one, with a word about it. A whole checkpoint that a crash left
    under a hidden name is given its own. A store that cannot be read says nothing about a checkpoint: none is passed over for it.

    Raises:
        CheckpointError: there are committed checkpoints, but none is valid (starting afresh would hide the loss).
        StoreError: the store failed several times in a row.
    """
    candidates = commit.committed(place(folder))
    for candidate in candidates:
        try:
            commit.verify(candidate)
        except StoreError:
            raise
        except (CheckpointError, OSError) as error:
            _say_once(f"passing over a damaged checkpoint: {error}")
        else:
            return commit.adopt(candidate)
    if candidates:
        raise CheckpointError(
            f"none of the {len(candidates)} checkpoints in {folder} is valid; newest: {candidates[0]}"
        )
    return None


@cache
def _say_once(text: str) -> None:
    """Printed and not logged: whose handlers there are, and what they put in front, depends on the program around us."""
    print(text, flush=True)


def everywhere(task: Callable[[], Any], group: dist.ProcessGroup | None = None) -> list[Any]:
    """Run a task on all ranks and exchange the results; an error on one is raised on all, naming the rank.

    It is a ValueError where it was one, a mistake that trying again does not mend, and else a CheckpointError.
    """
    try:
        result, error = task(), None
    except (Exception, CheckpointException) as caught:  # DCP's own is no Exception
        result, error = None, caught
    if not dist.is_initialized():
        if error is None:
            return [result]
        if isinstance(error, ValueError):
            raise error
        raise CheckpointError(_described(error)) from error
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    mistake = isinstance(error, ValueError) and not isinstance(error, CheckpointError)
    described = None if error is None else (mistake, _described(error))
    dist.all_gather_object(outcomes, (result, described), group=group)
    failures = [(rank, *failure) for rank, (_, failure) in enumerate(outcomes) if failure]
    if failures:
        rank, mistake, text = failures[0]
        if isinstance(error, ValueError) and rank == rank_in(group):
            raise error
        raise (ValueError if mistake else CheckpointError)(f"rank {rank}: {text}") from error
    return [outcome for outcome, _ in outcomes]


def _described(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:  # its text is a traceback
        rank, (error, _) = next(iter(error.failures.items()))
        return f"on rank {rank}, {type(error).__name__}: {error}"
    return f"{type(error).__name__}: {error}"


def read_everywhere(read: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """What each rank reads for itself; an error on one is raised on all."""
    found: list[Any] = []
    everywhere(lambda: found.append(read()), group)
    return found[0]


def broadcast(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Rank 0's value on all ranks."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]


def write_plain_file(path: Path, state: Mapping[str, Any], foreign: bool = False) -> None:
    """One file by `torch.save`, complete or not at all; replaces a file, or a checkpoint folder, of that name.

    Raises ValueError for what `serialize` refuses.
    """
    refuse_remote(path, "checkpoint_format='consolidated'")
    content = serialize(state, foreign)
    commit.check_target(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = commit.staging_folder(path, os.urandom(4).hex())
    try:
        commit.write_synced(staging, content)
        if path.is_dir() and not path.is_symlink():
            commit.publish(staging, path)
        else:
            staging.replace(path)
            commit.sync_folder(path.parent)
    except Exception:
        if staging.is_file() and not staging.is_symlink():
            staging.unlink()
        raise
    commit.sweep(path)


def check_plain_file(path: Path) -> None:
    """Refuse a file that is missing, cut short or changed since `torch.save` wrote its checksums (CheckpointError)."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such checkpoint")
    refuse_remote(path, "a plain file")
    if not zipfile.is_zipfile(path):
        raise CheckpointError(f"{path} is damaged: cut short, or no file of `torch.save`")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: the content of {damaged} has changed since it was saved")


def load_plain_file(path: Path, weights_only: bool | None = None) -> dict[str, Any]:
    """The dict in one plain file, its tensors mapped into memory; `weights_only` and errors as for `load_state`."""
    return _torch_load(path, weights_only, mmap=True)


def serialize(state: Mapping[str, Any], foreign: bool = False) -> bytes:
    """`torch.save` to memory.

    Args:
        state: what to save.
        foreign: let objects pass that will load with `weights_only=False` only, with a word about each.

    Raises:
        ValueError: it holds such objects, and `foreign` is False.
    """
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    try:
        buffer.seek(0)
        torch.load(buffer, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as error:
        found = [f"{place} is a {kind}" for place, kind in foreign_objects(state)] or [str(error).splitlines()[0]]
        what = "; ".join(found[:4])
        if not foreign:
            raise ValueError(
                f"checkpoint: {what}: loading it would execute code of that class. Save plain types (numbers, strings, lists, "
                "dicts, tensors), or give FSDPCompileStrategy(allow_pickle=True) and load with weights_only=False"
            ) from None
        log.warning(f"checkpoint: {what}; it will load with weights_only=False only. Save plain types")
    return buffer.getvalue()


def foreign_objects(value: Any, place: str = "state") -> list[tuple[str, str]]:
    """Where a nested state holds objects that need code of other classes to load: `[(place, class)]`."""
    if isinstance(value, dict):
        return [hit for key, item in value.items() for hit in foreign_objects(item, f"{place}[{key!r}]")]
    if type(value) in (list, tuple, set):
        return [hit for i, item in enumerate(value) for hit in foreign_objects(item, f"{place}[{i}]")]
    plain = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.dtype, torch.device, torch.Size)
    return [] if isinstance(value, plain) else [(place, type(value).__name__)]


def _write(
    staging: Path, tensors: Mapping[str, torch.Tensor], content: bytes, rank: int, group: Any
) -> dict[str, list[Any]]:
    """Write this rank's files; on an object store also returns their manifest entries."""
    writer = ObjectWriter(staging) if isinstance(staging, RemotePath) else dcp.FileSystemWriter(staging)
    try:
        with _silent_alone():
            dcp.save(dict(tensors), storage_writer=writer, process_group=group)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{staging}: {said_of_full_disk(error, staging)}{_described(error)}") from error
    if rank == 0:
        commit.write_synced(staging / STATE_FILE, content)
    if not isinstance(writer, ObjectWriter):
        return {}
    own = {STATE_FILE: [len(content), commit.digest_of(content)]} if rank == 0 else {}
    return {**writer.objects.written, **own}


@contextmanager
def _silent_alone() -> Iterator[None]:
    """DCP warns where there is no process group. A thread cannot have filters of its own, so it leaves them alone."""
    if dist.is_initialized() or threading.current_thread() is not threading.main_thread():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _own_files(staging: Path, rank: int) -> list[str]:
    names = [entry.name for entry in staging.iterdir()]
    return [n for n in names if n.startswith(f"__{rank}_") or (rank == 0 and not n.startswith("__"))]


def _commit(staging: Path, path: Path, files: dict[str, list[Any]], step: int) -> None:
    if isinstance(staging, RemotePath) and (lost := sorted(files.keys() - {entry.name for entry in staging.iterdir()})):
        raise CheckpointError(f"{staging} lacks {lost[0]} that a rank has written: is it one store for all ranks?")
    commit.seal(staging, files, step)
    commit.publish(staging, path)


def rank_in(group: dist.ProcessGroup | None = None) -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


class _MetadataUnpickler(pickle.Unpickler):
    """DCP keeps its index as a pickle: allow the classes of that index, and no code of anyone else."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if "." not in name else None  # a dot would reach into imported modules
        ours = isinstance(found, type) and module.startswith(_DCP) and found.__module__.startswith(_DCP)
        if not ours and not isinstance(found, torch.dtype) and (module, name) not in _METADATA_GLOBALS:
            raise CheckpointError(f"the checkpoint's index asks for {module}.{name}: it is no index, and is not opened")
        return found


_DCP = "torch.distributed.checkpoint."
_METADATA_GLOBALS = {
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
    ("builtins", "set"),
}


def _reader(path: Path) -> "_SafeReader":
    return _SafeReader(commit.version_of(path))


class _SafeReader(dcp.FileSystemReader):
    def __init__(self, path: Path) -> None:
        super().__init__(Path())
        self.folder = self.path = path
        if isinstance(path, RemotePath):
            self.fs = Objects()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (self.folder / ".metadata").open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata
