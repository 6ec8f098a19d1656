"""Checkpoints by optimizer step: when they are made, which stay, and what happens when one fails.

How a checkpoint is written is the strategy's business. `ModelCheckpoint` leaves out the end of a run unless its last step is
a multiple, writes everything twice for `save_last`, and counts what it has asked for, not what is there. Here a failed save
costs a warning and is tried again, the last of a run excepted, and nothing is deleted before something newer is complete.
A strategy that saves in the background is asked for the outcome beside the steps (see `agreement`), so that all ranks learn of it
at the same one.
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
from torch.optim import Optimizer

from lightning_fms.callbacks.agreement import agreement_of, end_agreement, forget_agreement
from lightning_fms.callbacks.cadence import StepClock
from lightning_fms.callbacks.retention import Retention, Saved
from lightning_fms.callbacks.save_schedule import SaveSchedule
from lightning_fms.remote_path import RemotePath, place

SCORES = "scores.json"
_SAVING = "saving"
# At the end of a run, or before it stops, there is no later step to try again at.
_LAST_TRIES, _LAST_WAIT_S = 3, 1.0


class StepCheckpoint(Checkpoint):
    """Save every so many optimizer steps, and at the last one.

    Args:
        dirpath: folder of the checkpoints, or an address such as `s3://bucket/run`, each named `step-<N>.ckpt`: a `=` in a name
            cannot be typed as a Hydra override.
            `None` = `checkpoints` in the logger's folder, or else in the trainer's.
        every_n_steps: optimizer steps between two checkpoints; with `mean_hours_to_failure` the most.
        keep: how many of the newest stay; -1 keeps all. 2, so that one is left if the newest turns out to be damaged.
        keep_every_hours: of older ones, how many hours apart some stay. `None` = none.
        monitor: a logged metric by which the best stay, too; its value when the step was saved, or of the validation after it.
        mode: `"min"` or `"max"`, which values of it are better.
        keep_best: how many of the best stay.
        asynchronous: write while training goes on, where the strategy can (`FSDPCompileStrategy` can); the memory of the host
            then holds a copy of this rank's shards.
        mean_hours_to_failure: of the whole job. Saves come at the interval that loses least, from the measured time of a
            save. `None` = every `every_n_steps`.

    Attributes:
        last_committed_step: the newest step that is complete in storage; -1 before there is one.
        save_seconds: how long the last save held training up.

    Raises:
        ValueError: for settings that save or keep nothing; in `fit` for an address under a strategy that writes to none, and for
            one that holds checkpoints of another run.
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
        asynchronous: bool = False,
    ) -> None:
        super().__init__()
        self.dirpath, self.monitor = place(dirpath) if dirpath is not None else None, monitor
        self.schedule = SaveSchedule(every_n_steps, mean_hours_to_failure)
        self.retention = Retention(keep, keep_every_hours, keep_best if monitor is not None else 0, mode)
        self.last_committed_step, self.save_seconds = -1, 0.0
        self._clock = StepClock()
        self._began = (0, 0.0)  # (step, time) from which the time of a step is measured
        self._saved_step = -1
        self.asynchronous = asynchronous
        self._pending: tuple[int, Any] | None = None  # (step, what the strategy gave)
        self._overdue = False
        self._asked = 0  # exchanges since the pending save began
        self._ours: set[str] = set()  # names of checkpoints that are of this run

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Settle the folder, the same on all ranks."""
        if stage == "fit":
            folder = self.dirpath or place(trainer.log_dir or trainer.default_root_dir) / "checkpoints"
            self.dirpath = place(trainer.strategy.broadcast(str(folder)))
            if isinstance(self.dirpath, RemotePath) and not getattr(trainer.strategy, "saves_in_background", False):
                raise ValueError(
                    f"StepCheckpoint({str(self.dirpath)!r}): only FSDPCompileStrategy with checkpoint_format='sharded' writes to "
                    f"addresses, not this {type(trainer.strategy).__name__}; give a folder"
                )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The step that a run begins at was saved by the run that made it, and so were those before."""
        self._clock.start(trainer)
        self.schedule.start(trainer.global_step)
        self._saved_step = trainer.global_step
        self._began = trainer.global_step, time.monotonic()
        self._ours, self._pending, self._overdue = set(), None, False
        # Only folders are checked; for one plain file the whole model would be gathered for nothing.
        strategy: Any = trainer.strategy
        if getattr(strategy, "saves_in_background", False) and not _is_trial(trainer):
            strategy.check_state(trainer._checkpoint_connector.dump_checkpoint(False))
        if self._in_background(trainer):
            agreement_of(trainer)
        if trainer.ckpt_path is not None and place(trainer.ckpt_path).parent.resolve() == self._folder.resolve():
            self.last_committed_step = trainer.global_step
            self._ours = {one.path.name for one in self._found(trainer) if one.step <= trainer.global_step}
        elif isinstance(self._folder, RemotePath) and trainer.global_step == 0:
            self._refuse_foreign(trainer)

    def _refuse_foreign(self, trainer: L.Trainer) -> None:
        """A run has no folder of its own at an address: another's newer checkpoints would be taken for this one's at a resume."""
        found, problem = list[str](), None
        try:
            found = [one.path.name for one in self._found(trainer)] if trainer.is_global_zero else []
        except OSError as error:  # the others wait
            problem = str(error)
        found, problem = trainer.strategy.broadcast((found, problem))
        if problem is not None:
            raise OSError(f"StepCheckpoint({str(self._folder)!r}): cannot be looked at: {problem}")
        if found:
            raise ValueError(
                f"StepCheckpoint({str(self._folder)!r}): holds {found[0]} of another run; give an address of its own to each run, "
                "or go on with that one (resume=<address>)"
            )

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Learn what became of a save in the background, and save the step that ended, if it is due."""
        if not self._clock.ended_step(trainer) or _is_trial(trainer):
            return
        if self._pending is not None and self._all_are_through(trainer):
            self._finish(trainer)
        if (
            0 < trainer.max_steps <= trainer.global_step
        ):  # behind the end, weights may be averaged ones (`WeightAveraging`)
            self.save_now(trainer)
        elif self.schedule.due(trainer.global_step) or (self._overdue and self._pending is None):
            self._save(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the last step of a run that is so many epochs long, or was told to stop: averaged weights come behind it."""
        last = trainer.current_epoch + 1 == trainer.max_epochs or trainer.should_stop
        if last and not _is_trial(trainer):
            self.save_now(trainer)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Weights change next: what is copied of them must be through."""
        if self._pending is not None:
            self._pending[1].copied()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Callbacks may exchange weights next."""
        if self._pending is not None:
            self._pending[1].copied()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """What was just measured is the score of the step that was just saved."""
        if not trainer.sanity_checking and self._saved_step == trainer.global_step:
            self._note_score(trainer)
            if self._pending is None:
                self._tidy(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the last step if it is not saved."""
        if not _is_trial(trainer):
            self.save_now(trainer)
        end_agreement(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """What ranks agreed upon is not for the next fit."""
        forget_agreement(trainer)

    def is_committed(self, trainer: L.Trainer) -> bool:
        """Whether the step that the run is at is; waits for a save of it. The same on all ranks, which all call it."""
        if self._pending is not None:
            self._finish(trainer)
        return self._saved_step == trainer.global_step

    def save_now(self, trainer: L.Trainer) -> None:
        """Save the step that the run is at, unless it is saved; called on all ranks.

        Raises:
            Exception: what the strategy raised at the last of three tries.
        """
        tries = 0
        while not self.is_committed(trainer):
            tries += 1
            error = self._save_and_wait(trainer)
            if error is not None and tries == _LAST_TRIES:
                raise error
            if error is not None:
                time.sleep(_LAST_WAIT_S)

    def _in_background(self, trainer: L.Trainer) -> bool:
        return self.asynchronous and bool(getattr(trainer.strategy, "saves_in_background", False))

    def _save(self, trainer: L.Trainer) -> None:
        """Save, or begin to, or wait for the save that is on its way."""
        if not self._in_background(trainer):
            self._save_and_wait(trainer)
        elif self._pending is not None:
            if not self._overdue:
                rank_zero_warn(
                    f"step {trainer.global_step} is not saved yet: step {self._pending[0]} is still being written; "
                    "if this comes again, save less often"
                )
            self._overdue = True
        else:
            step, began = trainer.global_step, time.monotonic()
            self._overdue, self._asked = False, 0
            state = trainer._checkpoint_connector.dump_checkpoint(False)
            self._pending = step, trainer.strategy.save_in_background(state, self._path(step))  # type: ignore[attr-defined]
            self._began_well(trainer, began)

    def _save_and_wait(self, trainer: L.Trainer) -> Exception | None:
        """Save; returns what went wrong in storage, which all ranks see. Other errors are raised."""
        step, began = trainer.global_step, time.monotonic()
        try:
            trainer.save_checkpoint(self._path(step))
        except getattr(trainer.strategy, "save_errors", ()) as error:
            self._failed(step, step, error)
            return error
        self._began_well(trainer, began)
        self._committed(trainer, step)
        return None

    def _all_are_through(self, trainer: L.Trainer) -> bool:
        """Whether all ranks were through with the save when the step before this one ended."""
        assert self._pending is not None
        agreement = agreement_of(trainer)
        agreement.put(_SAVING, 0.0 if self._pending[1].done() else 1.0)
        agreement.exchange(("step", trainer.global_step))
        self._asked += (
            1  # what the first one reads was sent before this save; steps may count double, with two optimizers
        )
        return self._asked >= 2 and agreement.get(_SAVING) == 0.0

    def _finish(self, trainer: L.Trainer) -> None:
        """Wait for the save in the background, and take note of how it ended; the same on all ranks."""
        assert self._pending is not None
        (step, pending), self._pending = self._pending, None
        try:
            pending.result()
        except getattr(trainer.strategy, "save_errors", ()) as error:
            self._saved_step, self._overdue = -1, False  # the next try has its own time
            self._failed(step, trainer.global_step, error)
        else:
            self._committed(trainer, step)

    def _failed(self, step: int, now: int, error: Exception) -> None:
        steps = self.schedule.failed(now)
        rank_zero_warn(f"saving step {step} failed, training goes on, next try in {steps} step(s): {error}")

    def _began_well(self, trainer: L.Trainer, began: float) -> None:
        self.save_seconds = time.monotonic() - began
        self._saved_step = trainer.global_step
        self._note_score(trainer)
        self._plan(trainer, began)

    def _committed(self, trainer: L.Trainer, step: int) -> None:
        self.last_committed_step = step
        self.schedule.committed()
        self._ours.add(self._path(step).name)
        self._tidy(trainer)

    def _plan(self, trainer: L.Trainer, began: float) -> None:
        step, since = self._began
        measured = self.save_seconds, (began - since) / max(1, trainer.global_step - step)
        if self.schedule.mean_hours_to_failure is not None:
            measured = trainer.strategy.broadcast(measured)  # clocks differ
        self.schedule.began(trainer.global_step, *measured)
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
        made = getattr(trainer.strategy, "committed_at", lambda path: path.stat().st_mtime)
        found = []
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            step = _step_of(path.name)
            if step is None or not complete(path):
                continue
            try:
                at = made(path)
            except ValueError:  # its seal cannot be read; a resume passes over it, and it is not counted, nor deleted
                continue
            found.append(Saved(path, step, at, scores.get(path.name)))
        return found

    def _is_past(self, name: str) -> bool:
        step = _step_of(name)
        return step is not None and step <= self.last_committed_step

    def _note_score(self, trainer: L.Trainer) -> None:
        """Keep the metric of the step that was saved last; rank 0 alone."""
        if self.monitor is None or self.monitor not in trainer.callback_metrics or not trainer.is_global_zero:
            return
        score, name = float(trainer.callback_metrics[self.monitor]), self._path(self._saved_step).name
        try:
            _write_score(self._folder, self._ours | {name}, name, score)
        except OSError as error:
            rank_zero_warn(f"{self._folder}: the score of {name} could not be kept: {error}")

    def _tidy(self, trainer: L.Trainer) -> None:
        """Delete what need not stay; rank 0 alone, and no error of it stops a run."""
        if not trainer.is_global_zero:
            return
        try:
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
    """Scores by name. An error of reading them is one (OSError): without its score, the best checkpoint would be deleted."""
    try:
        return {str(name): float(score) for name, score in json.loads((folder / SCORES).read_text()).items()}
    except (FileNotFoundError, ValueError, AttributeError, TypeError):
        return {}


def _write_score(folder: Path, names: set[str], name: str, score: float) -> None:
    scores = {known: value for known, value in _read_scores(folder).items() if known in names} | {name: score}
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(scores, indent=1, sort_keys=True)
    if isinstance(folder, RemotePath):  # whole, or not written
        (folder / SCORES).write_text(text)
        return
    aside = folder / f".{SCORES}.{os.getpid()}"
    aside.write_text(text)
    aside.replace(folder / SCORES)
