"""Where a run lives: `<root>/<name>/<number>`, with `run.yaml`, `config.yaml`, `checkpoints/` and the loggers' folders.

A new run gets a number of its own, so it can never overwrite or mix with an older one. A run that is resumed stays in
its folder. The folder is reserved before anything is built, because loggers and checkpoints need the path, but it
becomes a run only with `run.yaml`, written when the first batch has been trained; if a run fails before, what it made is
removed, but for a snapshot of memory, and nothing else. What is no run is never resumed and never counted as one.
`result.json` is added at the end.

A folder that the user names may be anything, a project or a home. Only one that is missing or empty is taken, and it is
marked, so that what a killed start left there is known as ours by the restart.
"""

import re
import shutil
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lightning as L
from omegaconf import DictConfig, OmegaConf

import lightning_fms.conf  # noqa: F401  # makes the resolver known that a saved config can use
from lightning_fms.config_check import ConfigError
from lightning_fms.distributed.checkpoint import is_committed, latest_committed
from lightning_fms.distributed.commit import CheckpointError, committed, sync_folder, write_synced
from lightning_fms.launch.result import RESULT
from lightning_fms.local_paths import refuse_remote
from lightning_fms.remote_path import RemotePath, is_remote, place

RECORD = "run.yaml"
CHECKPOINTS = "checkpoints"
RESERVED = ".reserved"
# What a start can have left in a folder that is not its own: checkpoints, the loggers' folders, records.
_SNAPSHOTS = "memory"
_LEFT = (CHECKPOINTS, "tensorboard", "csv", "lightning_logs", "config.yaml", ".config.yaml", f".{RECORD}")


@dataclass(frozen=True)
class Reservation:
    """A folder for a run, and the folders that were made for it, outermost first."""

    folder: Path
    made: tuple[Path, ...]


def is_run(folder: Path) -> bool:
    """Whether a run has trained in this folder."""
    return (folder / RECORD).is_file()


def numbered(folder: Path) -> list[Path]:
    """Subfolders whose names are numbers, smallest first."""
    found = [path for path in folder.glob("*") if path.name.isdecimal() and path.is_dir()] if folder.is_dir() else []
    return sorted(found, key=lambda path: int(path.name))


def reserve(root: Path, name: str) -> Reservation:
    """Make `<root>/<name>/<next number>`; two processes at once get two folders."""
    refuse_remote(root, "paths.root")
    folder = root / name
    number = int(numbered(folder)[-1].name) + 1 if numbered(folder) else 1
    made: list[Path] = []
    while True:
        made += _make(folder)
        try:
            path = folder / f"{number:03}"
            path.mkdir()
            (path / RESERVED).touch()
            return Reservation(path, (*made, path))
        except FileExistsError:
            number += 1
        except FileNotFoundError:  # A start that failed at this moment has removed the parent that it had made.
            continue


def reserve_given(folder: Path, resume: bool) -> Reservation:
    """Take the folder that the user names.

    Args:
        folder: missing or empty.
        resume: also take what a killed start left.

    Raises:
        ConfigError: if the folder holds a run, or anything else.
    """
    refuse_remote(folder, "paths.run")
    if is_run(folder):
        raise ConfigError(f"paths.run={folder}: holds a run already; go on with resume=auto, or give another folder")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"paths.run={folder}: exists and is no folder; give a new or empty folder")
    holds = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if holds - {_SNAPSHOTS} and not (
        resume and (folder / RESERVED).is_file()
    ):  # snapshots of a start without memory may stay
        if (folder / RESERVED).is_file():
            raise ConfigError(
                f"paths.run={folder}: holds what a start without training left; go on with resume=auto, "
                "or give a new or empty folder"
            )
        raise ConfigError(f"paths.run={folder}: exists and is no run; give a new or empty folder")
    reservation = Reservation(folder, tuple(_make(folder)))
    (folder / RESERVED).touch()
    return reservation


def _make(folder: Path) -> list[Path]:
    """Make a folder and its parents; those that this call made, outermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    made = []
    for path in reversed(missing):
        try:
            path.mkdir()
            made.append(path)
        except FileExistsError:  # By another start, at the same time.
            continue
    return made


def discard(reservation: Reservation) -> None:
    """Undo a reservation in which nothing was trained: what was there before stays, and so do snapshots of memory.

    A first step that runs out of memory is the one whose snapshot is wanted most.
    """
    folder = reservation.folder
    if is_run(folder):
        return
    if folder in reservation.made and any((folder / _SNAPSHOTS).glob("*.pickle")):
        for path in [path for path in folder.iterdir() if path.name != _SNAPSHOTS]:
            _remove(path)
    elif folder in reservation.made:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        _clear(folder)
    for parent in [path for path in reservation.made if path != folder][::-1]:
        with suppress(OSError):  # Others run in it.
            parent.rmdir()


def _clear(folder: Path) -> None:
    for name in _LEFT:
        _remove(folder / name)
    if [path.name for path in folder.iterdir()] == [RESERVED]:
        (folder / RESERVED).unlink()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def newest_checkpoint(run: Path) -> Path | None:
    """The newest valid checkpoint of a run: a committed folder, or a file of a stock Lightning strategy.

    Raises:
        CheckpointError: there are checkpoints, but none is valid (starting afresh would hide the loss).
    """
    return newest_in(checkpoints_of(run))


def checkpoints_of(run: Path) -> Path:
    """Where a run's checkpoints are: in its folder, or at the address that its config gives."""
    address = None
    if (run / "config.yaml").is_file():
        with suppress(Exception):  # a config that cannot be read is told of where it is needed
            address = OmegaConf.select(OmegaConf.load(run / "config.yaml"), "callbacks.checkpoint.dirpath")
    return place(address) if isinstance(address, str) and is_remote(address) else run / CHECKPOINTS


def newest_in(folder: Path) -> Path | None:
    """The same for a folder of checkpoints."""
    if isinstance(folder, RemotePath):
        return latest_committed(folder)
    files = sorted((path for path in folder.glob("*.ckpt") if path.is_file()), key=step_of, reverse=True)
    newest = latest_committed(folder) if folder.is_dir() else None
    for path in files:
        if newest is not None and step_of(path) <= step_of(newest):
            return newest
        if is_whole(path):
            return path
        print(f"passing over a damaged checkpoint: {path}", flush=True)
    if files and newest is None:
        raise CheckpointError(f"none of the {len(files)} checkpoints in {folder} is valid; newest: {files[0]}")
    return newest


def is_whole(checkpoint: Path) -> bool:
    """Whether every byte of a stock checkpoint, which is a zip archive, has the checksum that it was written with."""
    try:
        with zipfile.ZipFile(checkpoint) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, OSError, EOFError):
        return False


def step_of(checkpoint: Path) -> int:
    """The optimizer step in a checkpoint's name, `step-<N>`; -1 if there is none."""
    match = re.search(r"step[-=](\d+)", checkpoint.name)
    return int(match[1]) if match else -1


def newest_run(root: Path, name: str | None) -> Path | None:
    """The newest run that has saved something; whether it is whole is looked at when it is loaded.

    Args:
        root: folder of all runs.
        name: whose runs to look at; the one with the highest number wins. `None` = all; the one last started wins.
    """
    if name is not None:
        runs = [run for run in numbered(root / name) if is_run(run)][::-1]
    else:
        every = (run for folder in root.glob("*") for run in numbered(folder) if is_run(run))
        started = {run: _started(run) for run in every}
        runs = sorted((run for run in started if started[run]), key=lambda run: started[run], reverse=True)
    return next((run for run in runs if saved(run)), None)


def saved(run: Path) -> list[Path]:
    """The checkpoints of a run, newest first, not verified."""
    folder = checkpoints_of(run)
    files = [] if isinstance(folder, RemotePath) else [path for path in folder.glob("*.ckpt") if path.is_file()]
    return sorted([*committed(folder), *files], key=step_of, reverse=True)


def locate(path: Path) -> Path:
    """The checkpoint that a user means by a path: itself, or the newest one of a run's folder or of a folder at an address.

    Raises:
        ValueError: if there is none.
    """
    if is_run(path) or (isinstance(path, RemotePath) and path.is_dir() and not is_committed(path)):
        checkpoint = newest_in(path) if isinstance(path, RemotePath) else newest_checkpoint(path)
        if checkpoint is None:
            raise ValueError(f"resume={path}: this run has no valid checkpoint; start a new run with resume=null")
        return checkpoint
    if path.is_file() or (path.is_dir() and is_committed(path)):
        return path
    what = "is no complete checkpoint" if path.exists() else "does not exist"
    raise ValueError(f"resume={path}: {what}; give the path of a checkpoint or of a run, or resume=auto")


def attempts(run: Path) -> list[dict[str, Any]]:
    """The starts of a run, oldest first, each with `started` (UTC, ISO 8601) and `overrides` (command line).

    Raises:
        ValueError: if the record cannot be read, or is that of something else.
    """
    try:
        record: Any = OmegaConf.to_container(OmegaConf.load(run / RECORD))
        found = [
            {"started": str(a["started"]), "overrides": [str(o) for o in a["overrides"]]} for a in record["attempts"]
        ]
        if not found:
            raise ValueError("no attempts")
        return found
    except Exception as error:  # Whatever a foreign file can make a parser raise, the mistake is the file.
        raise ValueError(f"{run / RECORD}: is no record of a run ({type(error).__name__})") from error


def _started(run: Path) -> str:
    """When a run was last started; empty, with a word about it, if its record does not say."""
    try:
        return attempts(run)[-1]["started"]
    except ValueError as error:
        print(f"passing over {error}", flush=True)
        return ""


def config_of(run: Path) -> DictConfig:
    """The config of a run's last start, with the folder where the run is now.

    Raises:
        ValueError: if the folder is no run, or its config cannot be read.
    """
    if not is_run(run):
        raise ValueError(
            f"{run}: is no run, which holds {RECORD} and config.yaml; give the folder of one, <root>/<name>/<number>"
        )
    try:
        cfg = OmegaConf.load(run / "config.yaml")
        assert isinstance(cfg, DictConfig)
        cfg.paths.run = str(run)
    except Exception as error:  # Whatever a foreign file can make a parser raise, the mistake is the file.
        raise ValueError(f"{run / 'config.yaml'}: is no config of a run ({type(error).__name__})") from error
    return cfg


class RunRecord(L.Callback):
    """Write `config.yaml` and `run.yaml` when the first batch has been trained: from then on the folder is a run.

    Attributes:
        report: lines for the summary at the start of a run.
    """

    def __init__(self, folder: Path, config: DictConfig, overrides: list[str]) -> None:
        self.folder, self.config, self.overrides = folder, config, overrides
        self.started = datetime.now(UTC).isoformat(timespec="microseconds")
        self.report: list[str] = []
        self._written = False

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Once, on the first rank."""
        if self._written or not trainer.is_global_zero:
            return
        self._written = True
        former = _attempts_so_far(self.folder)
        record = {"attempts": [*former, {"started": self.started, "overrides": self.overrides}]}
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, content in (("config.yaml", self.config), (RECORD, OmegaConf.create(record))):
            aside = self.folder / f".{name}"
            write_synced(aside, OmegaConf.to_yaml(content).encode())
            aside.replace(self.folder / name)
            sync_folder(self.folder)
        for name in (RESERVED, RESULT):  # The latter of the attempt before.
            (self.folder / name).unlink(missing_ok=True)


def _attempts_so_far(folder: Path) -> list[dict[str, Any]]:
    if not is_run(folder):
        return []
    try:
        return attempts(folder)
    except ValueError as error:
        print(f"writing a new record: {error}", flush=True)
        return []
