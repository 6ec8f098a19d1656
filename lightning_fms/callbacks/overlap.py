"""Whether communication hides behind compute: a profiler looks at a few steps, once.

A step that is slower on 8 GPUs than on one may have slow collectives, or collectives with nothing to compute beside them.
Throughput does not tell these apart; the kernels' intervals do, see `exposed`. A profiler slows down the steps that it sees, so
it sees few, and only on request.
"""

from dataclasses import astuple
from typing import Any

import lightning as L
import torch
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities import rank_zero_info

from lightning_fms.callbacks.cadence import StepClock
from lightning_fms.callbacks.exposed import DeviceTrace, Exposure, exposure
from lightning_fms.callbacks.throughput import synchronize


class Overlap(L.Callback):
    """Log `exposed_communication`, the share of the communication that is not hidden behind compute, and
    `exposed_share_of_step`, the share of the time that it takes; means over the ranks.

    Args:
        at_step: optimizer steps of this fit before the profiler starts; None measures nothing. 20 is well behind compilation.
        steps: optimizer steps that it sees. A validation among them is left out, and they are begun again.

    Attributes:
        found: what was measured; `None` before.

    Raises:
        ValueError: for numbers below 1; when the fit starts: beside Lightning's own PyTorchProfiler, as a process can have one.
    """

    def __init__(self, at_step: int | None = None, steps: int = 3) -> None:
        for name, value in (("at_step", at_step), ("steps", steps)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        self.at_step, self.steps = at_step, steps
        self.found: Exposure | None = None
        self._clock = StepClock()
        self._wanted = False
        self._seen = 0  # optimizer steps of this fit
        self._trace: DeviceTrace | None = None
        self._began = 0  # the value of `_seen` then

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a second profiler."""
        if self.at_step is not None and isinstance(vars(trainer)["profiler"], PyTorchProfiler):
            raise ValueError(
                f"Overlap(at_step={self.at_step}) beside Trainer(profiler=PyTorchProfiler): a process has one profiler; "
                "leave one of the two out"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say at once if there is nothing to measure."""
        self._clock.start(trainer)
        self._seen, self.found = 0, None
        self._wanted = self.at_step is not None
        if self._wanted and (why := nothing_to_measure(trainer)):
            self._wanted = False
            rank_zero_info(f"overlap: nothing is measured: {why}")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Start or stop the profiler between two optimizer steps."""
        if not self._wanted or not self._clock.ended_step(trainer):
            return
        self._seen += 1
        if self._trace is not None and self._seen == self._began + self.steps:
            self._report(trainer)
        elif self._trace is None and self.at_step is not None and self._seen >= self.at_step:
            synchronize(trainer.strategy.root_device)
            self._trace, self._began = DeviceTrace(), self._seen
            self._trace.start()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Its kernels are no training's: begin again behind the next step."""
        self._drop()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say if the run was too short."""
        self._drop()
        if self._wanted:
            rank_zero_info(
                f"overlap: nothing was measured: {self.steps} optimizer steps without a validation after step {self.at_step} "
                f"are needed, and the run had {self._seen} in all; lower at_step or steps"
            )

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leave no profiler running."""
        self._drop()

    def _drop(self) -> None:
        if self._trace is not None:
            self._trace.stop()
            self._trace = None

    def _report(self, trainer: L.Trainer) -> None:
        assert self._trace is not None
        device = trainer.strategy.root_device
        synchronize(device)
        own, self._trace, self._wanted = exposure(self._trace.stop()), None, False
        sums = torch.tensor(astuple(own), dtype=torch.float64, device=device)
        self.found = Exposure(*trainer.strategy.reduce(sums, reduce_op="mean").tolist())
        values = {"exposed_communication": self.found.share, "exposed_share_of_step": self.found.of_step}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)
        communication, exposed, total = (x / self.steps / 1e3 for x in astuple(self.found))
        rank_zero_info(
            f"overlap: of {communication:.1f} ms communication in a step {exposed:.1f} ms are not hidden behind compute "
            f"({self.found.share:.0%}), {self.found.of_step:.1%} of the profiled step's {total:.1f} ms"
        )


def nothing_to_measure(trainer: L.Trainer) -> str | None:
    """Why no kernels of collectives can be seen here; None where they can."""
    device = trainer.strategy.root_device.type
    if device != "cuda":
        return f"collectives on {device} are no kernels that a profiler sees beside others; it takes GPUs"
    if trainer.world_size == 1:
        return "one process communicates with none"
    return None
