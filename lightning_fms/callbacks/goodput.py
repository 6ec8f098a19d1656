"""Where the time of a run goes, kept across restarts; see `lineage` for what counts."""

import socket
import time
from pathlib import Path
from typing import Any

import lightning as L

from lightning_fms.callbacks.cadence import StepClock, logging_due
from lightning_fms.callbacks.data_clock import DataWait, data_wait_of, end_data_clock
from lightning_fms.callbacks.lineage import Attempt, goodput, process_started, read_attempts
from lightning_fms.local_paths import local_path


class GoodputLog(L.Callback):
    """Keep a file for each attempt of a run, log `goodput` (0 to 1) with the other metrics, and say where the time went at the end.

    The times are those of the first rank's host. The first step, which compiles, is part of the startup.

    Args:
        dirpath: folder of the attempts' files; the same for all attempts of a run.
        every_n_steps: optimizer steps between two updates of the file. 10: what a killed attempt did since is not known, and counts
            as down time.

    Raises:
        ValueError: for a number of steps below 1.
    """

    def __init__(self, dirpath: str | Path, every_n_steps: int = 10) -> None:
        if every_n_steps < 1:
            raise ValueError(f"{every_n_steps=}: must be at least 1")
        self.folder, self.every_n_steps = local_path(dirpath, "GoodputLog"), every_n_steps
        self._clock = StepClock()
        self._attempt: Attempt | None = None
        self._file = self.folder
        self._mark = 0.0  # up to here the time is accounted for
        self._gap = "startup"  # what the time since then was for
        self._data_wait: DataWait | None = None
        self._first = True

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """A new attempt, which began with the process, or with this fit if the process has had another one."""
        if stage != "fit" or not trainer.is_global_zero:
            return
        started = process_started() if self._attempt is None else time.time()
        self._attempt = Attempt(started, trainer.world_size, socket.gethostname())
        self._file = self.folder / f"{started:.3f}.json"
        self._mark, self._gap, self._first = started, "startup", True

    def _account(self, cause: str, then: str) -> None:
        """The time since the last mark was for `cause`, and what follows is for `then`."""
        if self._attempt is None:
            return
        now = time.time()
        spent, waited = now - self._mark, self._data_wait.take() if self._data_wait is not None else 0.0
        if cause == "step":
            waited = min(waited, spent)
            self._attempt.step_seconds += spent - waited
            self._attempt.seconds["data_wait"] += waited
        else:
            self._attempt.seconds[cause] += spent
        self._mark, self._gap = now, then

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The module is ready; next comes the checkpoint."""
        self._account("startup", "startup")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Here the steps begin."""
        self._clock.start(trainer)
        self._data_wait = data_wait_of(trainer)
        self._account("restore" if trainer.ckpt_path is not None else "startup", "startup")
        if self._attempt is not None:
            self._attempt.first_step = self._attempt.last_step = trainer.global_step
            self._attempt.write(self._file)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """What lies behind the last batch was the next one's, if it was nothing else."""
        self._account(self._gap, "step")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the step; now and then write and log."""
        self._account("startup" if self._first else "step", "step")
        if not self._clock.ended_step(trainer) or self._attempt is None:
            return
        self._first = False
        self._update(trainer)
        if trainer.global_step % self.every_n_steps == 0:
            self._attempt.write(self._file)
        if logging_due(trainer) and trainer.loggers:
            share = goodput([*self._former(), self._attempt]).share
            for logger in trainer.loggers:
                logger.log_metrics({"goodput": share}, step=trainer.global_step)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """A checkpoint is made between two batches."""
        if self._gap == "end":
            self._account("end", "save")
        elif self._gap in ("step", "validation"):
            self._gap = "save"

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """What follows is the validation."""
        if not trainer.sanity_checking:
            self._account(self._gap, "validation")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Up to here it was."""
        if not trainer.sanity_checking:
            self._account("validation", "step")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The last step is done."""
        self._account(self._gap, "end")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Say why the attempt ended."""
        if isinstance(exception, SystemExit):
            why = f"exit code {exception.code}"
        else:
            why = f"{type(exception).__name__}: {exception}".splitlines()[0][:300]
        self._end(trainer, why)
        end_data_clock(trainer)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """The end of a run: say where the time went."""
        end_data_clock(trainer)
        if stage == "fit" and self._attempt is not None:
            self._end(trainer, "finished")
            print(goodput(read_attempts(self.folder)), flush=True)

    def _end(self, trainer: L.Trainer, why: str) -> None:
        if self._attempt is None or self._attempt.end is not None:
            return
        self._account(self._gap, "end")
        self._attempt.end = why
        self._update(trainer)
        self._attempt.write(self._file)

    def _update(self, trainer: L.Trainer) -> None:
        assert self._attempt is not None
        self._attempt.updated = time.time()
        if self._attempt.first_step >= 0:
            self._attempt.last_step = trainer.global_step
        saved = [getattr(callback, "last_committed_step", -1) for callback in vars(trainer)["callbacks"]]
        self._attempt.last_committed_step = max(saved, default=-1)

    def _former(self) -> list[Attempt]:
        assert self._attempt is not None
        return [one for one in read_attempts(self.folder) if one.started < self._attempt.started]
