"""Stopping on a signal: all ranks at one step, with that step committed, and an exit code that says so.

A scheduler that takes a machine back sends SIGTERM, or SIGUSR1 some time before its limit: to all ranks, or to one, and
never to all at once. Lightning's handlers run collectives and whole saves inside the signal, in the middle of a step, and
hang where ranks are not at the same place (Lightning-AI/pytorch-lightning#21406, #19916, #20542). Here a signal sets a flag.
The flags travel with `agreement`, one step ahead and without waiting; at the end of the step at which all ranks read that one
of them is to stop, they save and leave. A validation is left after the batch at which they read it, and not taken up again,
if the step before it is committed; if not, they save behind it, for during a validation the weights may be others: averaged
ones, which Lightning's `WeightAveraging` swaps in. Where nothing is being written yet, while a run starts and restores, a
process leaves at once. What cannot be left in time, because a rank hangs, is ended by a clock.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from typing import Any, NoReturn

import lightning as L
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_fms.callbacks.agreement import agreement_of, end_agreement, forget_agreement
from lightning_fms.callbacks.cadence import StepClock
from lightning_fms.callbacks.stop_signals import StopSignals

EXIT_CODES = {"SIGTERM": 143, "SIGUSR1": 138}  # as a shell reports processes that died of them: 128 + number
_STOP = "stop"


class Resilience(L.Callback):
    """Save and exit on SIGTERM and SIGUSR1.

    The first callback that has `save_now` (`StepCheckpoint`) saves. Under Slurm, SIGUSR1 also puts the job back into the queue,
    once the save is complete.

    Args:
        exit_codes: exit code by name of a signal. 143 for SIGTERM and 138 for SIGUSR1, so that whoever restarts a run can tell
            them from a mistake (1, 2) and from the end of a run (0).
        deadline_s: seconds from a signal until the process ends in any case: long enough for a validation and a save, and less
            than the scheduler leaves between this signal and SIGKILL.
        requeue: put a Slurm job back into the queue on SIGUSR1.

    Raises:
        ValueError: for an unknown signal, an exit code that is none or means success, a deadline that is not above 0; in `fit`,
            where no callback can save. Outside the main thread, where Python handles no signals, there is a warning.
    """

    def __init__(
        self, exit_codes: Mapping[str, int] | None = None, deadline_s: float = 120.0, requeue: bool = True
    ) -> None:
        codes = EXIT_CODES if exit_codes is None else exit_codes
        for name, code in codes.items():
            if not hasattr(signal, name) or not name.startswith("SIG"):
                raise ValueError(f"exit_codes: {name} is no signal; give names such as SIGTERM")
            if not 0 < code < 256:
                raise ValueError(f"exit_codes: {name}: {code} must be from 1 to 255, for 0 means success")
        if deadline_s <= 0:
            raise ValueError(f"{deadline_s=}: must be above 0")
        self.requeue = requeue
        self._codes = {int(getattr(signal, name)): code for name, code in codes.items()}
        self._deadline_s = deadline_s
        self._signals: StopSignals | None = None
        self._clock = StepClock()
        self._validation_batch = 0
        self._agrees_in_validation = self._stops_behind_validation = False

    # -- before and after training

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Take the signals over, from Lightning too; from here on a signal means something."""
        if stage != "fit":
            return
        if _saver(trainer) is None:
            raise ValueError(
                "Resilience has nobody who saves: add StepCheckpoint to the callbacks, or leave Resilience out"
            )
        if threading.current_thread() is not threading.main_thread():
            rank_zero_warn(
                "Trainer.fit runs outside the main thread, where no signal can be handled: one ends the run unsaved"
            )
            return
        # Last, so that the others have seen the step that it stops at; a new list, for Lightning is going through the old one.
        others = [callback for callback in vars(trainer)["callbacks"] if callback is not self]
        vars(trainer)["callbacks"] = [*others, self]
        _take_over(trainer)
        self._signals = StopSignals(self._codes, self._deadline_s, lambda: _forward(trainer, signal.SIGTERM))
        self._signals.install()
        self._signals.act_hastily(True)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """From here on there is something to save."""
        self._clock.start(trainer)
        agreement_of(trainer)
        if self._signals is not None:
            self._signals.act_hastily(False)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """All steps are done: a signal that comes now finds nothing to stop."""
        end_agreement(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Other ranks may be anywhere: no more agreement. The clock of a signal goes on until the process has ended."""
        forget_agreement(trainer)
        if self._signals is not None and self._signals.received is None:
            self._signals.remove()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Give the signals back."""
        if self._signals is not None:
            self._signals.remove()
            self._signals = None

    # -- where a run can stop

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop behind this step if all agree."""
        if (
            self._signals is not None
            and self._clock.ended_step(trainer)
            and self._decided(trainer, ("step", trainer.global_step))
        ):
            _log_step(trainer)
            self._stop(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Batches of a validation are common moments only if all ranks have equally many."""
        self._validation_batch, self._stops_behind_validation = 0, False
        if self._signals is None or trainer.sanity_checking:
            return
        numbers = agreement_of(trainer).everyone(float(sum(trainer.num_val_batches)))
        self._agrees_in_validation = len(set(numbers)) == 1

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Stop behind this batch if all agree, as if the validation had not begun; or behind the last one, to save there."""
        if self._signals is None or trainer.sanity_checking or not self._agrees_in_validation:
            return
        if self._stops_behind_validation:
            return
        self._validation_batch += 1
        if self._decided(trainer, ("validation", trainer.global_step, self._validation_batch)):
            if not _is_committed(trainer):
                self._stops_behind_validation = True
                return
            _forget_validation(trainer)
            self._stop(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop here if that was decided: the weights are those of training again."""
        if self._stops_behind_validation:
            self._stop(trainer)

    def _decided(self, trainer: L.Trainer, moment: tuple) -> bool:
        assert self._signals is not None
        agreement = agreement_of(trainer)
        agreement.put(_STOP, float(self._signals.received or 0))
        agreement.exchange(moment)
        return agreement.get(_STOP) > 0

    def _stop(self, trainer: L.Trainer) -> NoReturn:
        """Save and leave; the same on all ranks.

        Raises:
            SystemExit: with the exit code of the signal.
        """
        number = int(agreement_of(trainer).get(_STOP))
        name, step = signal.Signals(number).name, trainer.global_step
        saver = _saver(trainer)
        assert saver is not None
        saver.save_now(trainer)
        rank_zero_info(f"{name}: stopped behind step {step}, which is saved")
        if number == signal.SIGUSR1 and self.requeue and trainer.is_global_zero:
            _requeue()
        raise SystemExit(self._codes[number])


def _saver(trainer: L.Trainer) -> Any:
    callbacks = vars(trainer)["callbacks"]
    return next((callback for callback in callbacks if hasattr(callback, "save_now")), None)


def _is_committed(trainer: L.Trainer) -> bool:
    """Whether the step that the run is at needs no save; a saver that cannot tell saves."""
    ask = getattr(_saver(trainer), "is_committed", None)
    return ask is not None and bool(ask(trainer))


def _take_over(trainer: L.Trainer) -> None:
    """Keep Lightning from handling signals, and from a broadcast that waits for the device before every micro-batch."""
    vars(trainer._signal_connector)["register_signal_handlers"] = lambda: None
    vars(trainer.fit_loop.epoch_loop)["_broadcast_sigterm_tensor"] = lambda: None


def _forward(trainer: L.Trainer, number: int) -> None:
    """Pass a signal on to the processes that this one launched."""
    launcher = trainer.strategy.launcher
    if launcher is not None:
        launcher.kill(number)


def _log_step(trainer: L.Trainer) -> None:
    """Write what the last step logged, which Lightning does after the callbacks."""
    trainer._logger_connector.on_batch_end()
    trainer._logger_connector.update_train_step_metrics()


def _forget_validation(trainer: L.Trainer) -> None:
    """Put the loops back to where `on_train_batch_end` was, so that a resume does not look for the rest of a validation."""
    loop = trainer.fit_loop.epoch_loop
    for progress in (loop.batch_progress.current, loop.batch_progress.total):
        progress.completed -= 1
    loop.val_loop.batch_progress.reset()


def _requeue() -> None:
    """Put the Slurm job of this process back into the queue; Slurm then ends it."""
    array, job = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_JOB_ID")
    if job is None:
        return
    if array is not None:
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        rank_zero_warn(f"the job {job} could not be put back into the queue: {error}")
        return
    if done.returncode != 0:
        rank_zero_warn(f"the job {job} could not be put back into the queue: {done.stderr.strip()}")
