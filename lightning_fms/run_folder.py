"""Where a run lives: `<root>/<name>/<number>`, with `run.yaml`, `config.yaml`, `checkpoints/` and the loggers' folders.

A new run gets a number of its own, so it can never overwrite or mix with an older one. A run that is resumed stays in
its folder. The folder is reserved before anything is built, because loggers and checkpoints need the path, but it
becomes a run only with `run.yaml`, written when the first batch has been trained; if a run fails before, the folder is
removed. What is no run is never resumed and never counted as one.
"""

import re
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lightning as L
from omegaconf import DictConfig, OmegaConf

from lightning_fms.distributed.checkpoint import is_committed, latest_committed

RECORD = "run.yaml"
CHECKPOINTS = "checkpoints"


def is_run(folder: Path) -> bool:
    """Whether a run has trained in this folder."""
    return (folder / RECORD).is_file()


def numbered(folder: Path) -> list[Path]:
    """Subfolders whose names are numbers, smallest first."""
    found = [path for path in folder.glob("*") if path.name.isdecimal() and path.is_dir()] if folder.is_dir() else []
    return sorted(found, key=lambda path: int(path.name))


def reserve(root: Path, name: str) -> Path:
    """Make and return `<root>/<name>/<next number>`; two processes at once get two folders."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    number = int(numbered(folder)[-1].name) + 1 if numbered(folder) else 1
    while True:
        try:
            path = folder / f"{number:03}"
            path.mkdir()
            return path
        except FileExistsError:
            number += 1


def discard(folder: Path) -> None:
    """Remove a reserved folder in which nothing was trained, and its parents as far as they are empty."""
    if is_run(folder):
        return
    shutil.rmtree(folder, ignore_errors=True)
    for parent in (folder.parent, folder.parent.parent):
        try:
            parent.rmdir()
        except OSError:
            return


def newest_checkpoint(run: Path) -> Path | None:
    """The newest valid checkpoint of a run: a committed folder, or a file of a stock Lightning strategy."""
    folder = run / CHECKPOINTS
    found = [path for path in folder.glob("*.ckpt") if path.is_file()]
    committed = latest_committed(folder) if folder.is_dir() else None
    return max([*found, committed] if committed else found, key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    """The optimizer step in a checkpoint's name, `step=<N>`; -1 if there is none."""
    match = re.search(r"step=(\d+)", checkpoint.name)
    return int(match[1]) if match else -1


def find(root: Path, name: str | None) -> tuple[Path, Path] | None:
    """The newest run that has a checkpoint, and the checkpoint.

    Args:
        root: folder of all runs.
        name: whose runs to look at; the one with the highest number wins. `None` = all; the one last started wins.
    """
    if name is not None:
        runs = [run for run in numbered(root / name) if is_run(run)][::-1]
    else:
        every = (run for folder in root.glob("*") for run in numbered(folder) if is_run(run))
        runs = sorted(every, key=lambda run: attempts(run)[-1]["started"], reverse=True)
    for run in runs:
        checkpoint = newest_checkpoint(run)
        if checkpoint is not None:
            return run, checkpoint
    return None


def locate(path: Path) -> Path:
    """The checkpoint that a user means by a path: itself, or the newest one of a run's folder.

    Raises:
        ValueError: if there is none.
    """
    if is_run(path):
        checkpoint = newest_checkpoint(path)
        if checkpoint is None:
            raise ValueError(f"resume={path}: this run has no valid checkpoint; start a new run with resume=null")
        return checkpoint
    if path.is_file() or (path.is_dir() and is_committed(path)):
        return path
    what = "is no complete checkpoint" if path.exists() else "does not exist"
    raise ValueError(f"resume={path}: {what}; give the path of a checkpoint or of a run, or resume=auto")


def attempts(run: Path) -> list[dict[str, Any]]:
    """The starts of a run, oldest first, each with `started` (UTC, ISO 8601) and `overrides` (command line)."""
    record: Any = OmegaConf.to_container(OmegaConf.load(run / RECORD))
    return record["attempts"]


class RunRecord(L.Callback):
    """Write `config.yaml` and `run.yaml` when the first batch has been trained: from then on the folder is a run."""

    def __init__(self, folder: Path, config: DictConfig, overrides: list[str]) -> None:
        self.folder, self.config, self.overrides = folder, config, overrides
        self.started = datetime.now(UTC).isoformat(timespec="microseconds")
        self._written = False

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Once, on the first rank."""
        if self._written or not trainer.is_global_zero:
            return
        self._written = True
        former = attempts(self.folder) if is_run(self.folder) else []
        record = {"attempts": [*former, {"started": self.started, "overrides": self.overrides}]}
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, content in (("config.yaml", self.config), (RECORD, OmegaConf.create(record))):
            aside = self.folder / f".{name}"
            aside.write_text(OmegaConf.to_yaml(content))
            aside.replace(self.folder / name)
