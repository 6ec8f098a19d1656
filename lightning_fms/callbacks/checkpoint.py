"""Checkpoints by optimizer step: when they are made, which stay, and what happens when one fails.

How a checkpoint is written is the strategy's business. `ModelCheckpoint` leaves out the end of a run unless its last step is
a multiple, writes everything twice for `save_last`, and counts what it has asked for, not what is there. Here a failed save
costs a warning and is tried again, the last of a run excepted, and nothing is deleted before something newer is complete.
"""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_warn

from lightning_fms.callbacks.cadence import StepClock
from lightning_fms.callbacks.retention import Retention, Saved
from lightning_fms.callbacks.save_schedule import SaveSchedule

SCORES = "scores.json"
# At the end of a run, or before it stops, there is no later step to try again at.
_LAST_TRIES, _LAST_WAIT_S = 3, 1.0


class StepCheckpoint(Checkpoint):
    """Save every so many optimizer steps, and at the last one.

    Args:
        dirpath: folder of the checkpoints, each named `step-<N>.ckpt`: a `=` in a name cannot be typed as a Hydra override.
            `None` = `checkpoints` in the logger's folder, or else in the trainer's.
        every_n_steps: optimizer steps between two checkpoints; with `mean_hours_to_failure` the most.
        keep: how many of the newest stay; -1 keeps all. 2, so that one is left if the newest turns out to be damaged.
        keep_every_hours: of older ones, how many hours apart some stay. `None` = none.
        monitor: a logged metric by which the best stay, too; its value when the step was saved, or of the validation after it.
        mode: `"min"` or `"max"`, which values of it are better.
        keep_best: how many of the best stay.
        mean_hours_to_failure: of the whole job. Saves come at the interval that loses least, from the measured time of a
            save. `None` = every `every_n_steps`.

    Attributes:
        last_committed_step: the newest step that is complete in storage; -1 before there is one.
        save_seconds: how long the last save held training up.

    Raises:
        ValueError: for settings that save or keep nothing.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        every_n_steps: int = 1000,
        keep: int = 2,
        keep_every_hours: float | None = None,
        monitor: str | None = None,
        mode: str = "min",
        keep_best: int = 1,
        mean_hours_to_failure: float | None = None,
    ) -> None:
        super().__init__()
        self.dirpath, self.monitor = Path(dirpath) if dirpath is not None else None, monitor
        self.schedule = SaveSchedule(every_n_steps, mean_hours_to_failure)
        self.retention = Retention(keep, keep_every_hours, keep_best if monitor is not None else 0, mode)
        self.last_committed_step, self.save_seconds = -1, 0.0
        self._clock = StepClock()
        self._began = (0, 0.0)  # (step, time) from which the time of a step is measured
        self._saved_step = -1
        self._ours: set[str] = set()  # names of checkpoints that are of this run

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Settle the folder, the same on all ranks."""
        if stage == "fit":
            folder = self.dirpath or Path(trainer.log_dir or trainer.default_root_dir) / "checkpoints"
            self.dirpath = Path(trainer.strategy.broadcast(str(folder)))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The step that a run begins at was saved by the run that made it, and so were those before."""
        self._clock.start(trainer)
        self.schedule.start(trainer.global_step)
        self._saved_step = trainer.global_step
        self._began = trainer.global_step, time.monotonic()
        self._ours = set()
        if trainer.ckpt_path is not None and Path(trainer.ckpt_path).parent.resolve() == self._folder.resolve():
            self.last_committed_step = trainer.global_step
            self._ours = {one.path.name for one in self._found(trainer) if one.step <= trainer.global_step}

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save the step that ended, if it is due."""
        if self._clock.ended_step(trainer) and self.schedule.due(trainer.global_step) and not _is_trial(trainer):
            self._save(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """What was just measured is the score of the step that was just saved."""
        if not trainer.sanity_checking and self._saved_step == trainer.global_step == self.last_committed_step:
            self._tidy(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the last step if it was not one of those."""
        if not _is_trial(trainer):
            self.save_now(trainer)

    def save_now(self, trainer: L.Trainer) -> None:
        """Save the step that the run is at, unless it is saved; called on all ranks.

        Raises:
            Exception: what the strategy raised at the last of three tries.
        """
        tries = 0
        while self._saved_step != trainer.global_step:
            tries += 1
            error = self._save(trainer)
            if error is not None and tries == _LAST_TRIES:
                raise error
            if error is not None:
                time.sleep(_LAST_WAIT_S)

    def _save(self, trainer: L.Trainer) -> Exception | None:
        """Save; returns what went wrong in storage, which all ranks see. Other errors are raised."""
        step, began = trainer.global_step, time.monotonic()
        path = self._path(step)
        try:
            trainer.save_checkpoint(path)
        except getattr(trainer.strategy, "save_errors", ()) as error:
            steps = self.schedule.failed(step)
            rank_zero_warn(f"saving step {step} failed, training goes on, next try in {steps} step(s): {error}")
            return error
        self.save_seconds = time.monotonic() - began
        self._saved_step = self.last_committed_step = step
        self._ours.add(path.name)
        self._plan(trainer, began)
        self._tidy(trainer)
        return None

    def _plan(self, trainer: L.Trainer, began: float) -> None:
        step, since = self._began
        measured = self.save_seconds, (began - since) / max(1, trainer.global_step - step)
        if self.schedule.mean_hours_to_failure is not None:
            measured = trainer.strategy.broadcast(measured)  # clocks differ
        self.schedule.saved(trainer.global_step, *measured)
        self._began = trainer.global_step, time.monotonic()

    @property
    def _folder(self) -> Path:
        assert self.dirpath is not None, "Lightning calls setup first"
        return self.dirpath

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step}.ckpt"

    def newest(self, trainer: L.Trainer) -> tuple[int, Path] | None:
        """The newest complete checkpoint of this run, and its step; the same on all ranks."""
        step = int(trainer.strategy.broadcast(self.last_committed_step))
        return (step, self._path(step)) if step >= 0 else None

    # -- what stays

    def _found(self, trainer: L.Trainer) -> list[Saved]:
        """Complete checkpoints in the folder."""
        scores = _read_scores(self._folder)
        complete = getattr(trainer.strategy, "is_complete", lambda path: True)
        found = []
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            step = _step_of(path.name)
            if step is not None and complete(path):
                found.append(Saved(path, step, path.stat().st_mtime, scores.get(path.name)))
        return found

    def _is_past(self, name: str) -> bool:
        step = _step_of(name)
        return step is not None and step <= self.last_committed_step

    def _tidy(self, trainer: L.Trainer) -> None:
        """Note the score of the newest, and delete what need not stay; rank 0 alone, and no error of it stops a run."""
        if not trainer.is_global_zero:
            return
        try:
            if self.monitor is not None and self.monitor in trainer.callback_metrics:
                name = self._path(self.last_committed_step).name
                _write_score(self._folder, self._ours, name, float(trainer.callback_metrics[self.monitor]))
            ours = [one for one in self._found(trainer) if one.path.name in self._ours]
            for one in self.retention.superfluous(ours):
                self._ours.discard(one.path.name)
                trainer.strategy.remove_checkpoint(one.path)
            if hasattr(trainer.strategy, "sweep"):
                trainer.strategy.sweep(self._folder, self._is_past)
        except OSError as error:
            rank_zero_warn(f"{self._folder}: old checkpoints could not be tidied up: {error}")


def _step_of(name: str) -> int | None:
    match = re.fullmatch(r"step-(\d+)\.ckpt", name)
    return int(match[1]) if match is not None else None


def _is_trial(trainer: L.Trainer) -> bool:
    return bool(getattr(trainer, "fast_dev_run", False))


def _read_scores(folder: Path) -> dict[str, float]:
    try:
        return {str(name): float(score) for name, score in json.loads((folder / SCORES).read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _write_score(folder: Path, names: set[str], name: str, score: float) -> None:
    scores = {known: value for known, value in _read_scores(folder).items() if known in names} | {name: score}
    aside = folder / f".{SCORES}.{os.getpid()}"
    aside.write_text(json.dumps(scores, indent=1, sort_keys=True))
    aside.replace(folder / SCORES)
