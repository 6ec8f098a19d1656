"""The end of a job in which one rank no longer moves.

The others wait for it in a collective, up to the timeout of the process group, half an hour by default, and what they say then
does not name it. Here each rank has a thread that notices when its training thread has come to no hook for too long. It
writes down the stack of every thread and the collectives that wait, to stderr and into a file of its own, and ends the
process, so that whoever started the job starts it again. The rank whose list lacks the collective in which all others wait is
the one to look at. A process that was stopped as a whole, by a debugger or a sleeping laptop, is not counted as hanging.
"""

import faulthandler
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L

from lightning_fms.callbacks.collectives import waiting
from lightning_fms.callbacks.stop_signals import leave, say, say_stacks
from lightning_fms.local_paths import local_path

EXIT_CODE = 124  # as of `timeout`


class HangWatchdog(L.Callback):
    """End the process, with exit code 124 and a report, when training or a validation does not move.

    Args:
        timeout_s: seconds without a batch, a backward pass or an optimizer step. 600: much more than any step, much less than an
            unnoticed night.
        patient_s: the same where something long is to be expected: before the first step is done (compilation, reading a
            checkpoint), at the beginning of a validation, while a checkpoint is written, at the end.
        dirpath: folder for the reports, `rank-<r>.txt`. `None` = stderr only.

    Raises:
        ValueError: for times that are not above 0, or less patience than the timeout.
    """

    def __init__(self, timeout_s: float = 600.0, patient_s: float = 3600.0, dirpath: str | Path | None = None) -> None:
        if timeout_s <= 0 or patient_s < timeout_s:
            raise ValueError(f"{timeout_s=}, {patient_s=}: must be above 0, the second at least the first")
        self.timeout_s, self.patient_s = timeout_s, patient_s
        self.dirpath = local_path(dirpath, "HangWatchdog") if dirpath is not None else None
        self._rank, self._step, self._first = 0, 0, True
        self._state = ("start", time.monotonic(), patient_s)  # what was begun, when, and how long it may take
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def _beat(self, what: str, patient: bool = False) -> None:
        self._state = what, time.monotonic(), self.patient_s if patient else self.timeout_s

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Begin to watch; testing and predicting are left alone."""
        if stage not in ("fit", "validate"):
            return
        self._rank = trainer.global_rank
        self._first = True
        self._beat("start", patient=True)
        if self._thread is None or self._over.is_set():
            self._over = threading.Event()
            self._thread = threading.Thread(target=self._watch, name="hang-watchdog", daemon=True)
            self._thread.start()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """A sign of life; the first batch of a run compiles."""
        self._step = trainer.global_step
        self._beat("training step", patient=self._first)

    def on_before_optimizer_step(self, *_: Any) -> None:
        """A sign of life."""
        self._beat("optimizer step", patient=self._first)

    def on_train_batch_end(self, *_: Any) -> None:
        """A sign of life: what follows is the next batch."""
        self._first = False
        self._beat("loading of a batch")

    def on_validation_batch_start(self, *_: Any) -> None:
        """A sign of life."""
        self._beat("validation step")

    def on_validation_batch_end(self, *_: Any) -> None:
        """A sign of life."""
        self._beat("validation")

    def on_validation_start(self, *_: Any) -> None:
        """What follows may load and compile."""
        self._beat("beginning of a validation", patient=True)

    def on_validation_end(self, *_: Any) -> None:
        """A sign of life."""
        self._beat("loading of a batch")

    def on_save_checkpoint(self, *_: Any) -> None:
        """What follows writes."""
        self._beat("saving a checkpoint", patient=True)

    def on_train_end(self, *_: Any) -> None:
        """What follows is the end."""
        self._beat("end of training", patient=True)

    def on_exception(self, *_: Any) -> None:
        """No more watching: what follows may be a prompt."""
        self._over.set()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """No more watching."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _watch(self) -> None:
        every = min(1.0, self.timeout_s / 10)
        looked = time.monotonic()
        over = self._over
        while not over.wait(every):
            now = time.monotonic()
            what, since, allowed = self._state
            if now - looked > 5 * every + 1.0:  # this thread did not run either
                self._state = what, now, allowed
            elif now - since > allowed:
                self._end(what, now - since)
            looked = now

    def _end(self, what: str, seconds: float) -> None:
        """Report, and end the process."""
        leave(EXIT_CODE, lambda: self._report(what, seconds))

    def _report(self, what: str, seconds: float) -> None:
        lines = [
            f"rank {self._rank} on {socket.gethostname()} (process {os.getpid()}) has not moved for {seconds:.0f} s: "
            f"{what}, step {self._step}",
            *(f"  waits in {one}" for one in self._waiting()),
        ]
        say("\n".join(lines))
        say_stacks()
        if self.dirpath is not None:
            self.dirpath.mkdir(parents=True, exist_ok=True)
            with (self.dirpath / f"rank-{self._rank}.txt").open("w") as file:
                file.write("\n".join(lines) + "\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)

    def _waiting(self) -> list[str]:
        try:
            return [str(one) for one in waiting()] or ["no collective"]
        except Exception as error:  # the report is worth more than its parts
            return [f"collectives that could not be read: {error}"]
