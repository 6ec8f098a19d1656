"""Tokens per second, TFLOP/s and MFU, measured over whole optimizer steps.

A GPU works asynchronously: a clock read without synchronising measures how fast Python queues kernels, and
synchronising at every step slows down what it measures. So tokens are counted on the way without looking at them, and
device and clock meet only on the steps that are logged. Validation is not counted, the first step (compilation,
allocator) neither.
"""

import time
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_fms.callbacks.cadence import StepClock, logging_due
from lightning_fms.callbacks.flops import TrainFlops, count_train_flops
from lightning_fms.callbacks.peaks import peak_of


def input_ids_of(batch: Any) -> Tensor | None:
    """The token ids in a batch: `batch["input_ids"]`, or the first integer matrix of a tuple, or the batch itself."""
    parts = batch if isinstance(batch, list | tuple) else [batch]
    if isinstance(batch, dict):
        parts = [batch.get("input_ids")]
    found = (part for part in parts if isinstance(part, Tensor) and not part.is_floating_point() and part.ndim >= 2)
    return next(found, None)


def tokens_in(batch: Any) -> tuple[Tensor | int, int]:
    """Tokens that count in a micro-batch, and tokens per row; rows that `row_valid` marks as filler do not count."""
    ids = input_ids_of(batch)
    if ids is None:
        return 0, 0
    valid = batch.get("row_valid") if isinstance(batch, dict) else None
    return (ids.numel() if valid is None else valid.sum() * ids.shape[1]), ids.shape[1]


def synchronize(device: torch.device) -> None:
    """Wait for the work queued on an accelerator; nothing to wait for on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Throughput(L.Callback):
    """Log `tokens_per_second` (all devices together), `step_seconds`, and where known `tflops_per_device` and `mfu`.

    Args:
        flops_per_token: of forward and backward. `None` = counted on the module as the user wrote it (see `flops.py`).

    Attributes:
        report: one line for the summary at the start of a run.
    """

    def __init__(self, flops_per_token: float | None = None) -> None:
        self.flops_per_token = flops_per_token
        self.report: list[str] = []
        self._counted: TrainFlops | None = None
        self._clock = StepClock()
        self._tokens: Tensor | int = 0
        self._row = 0
        self._steps = 0
        self._since: float | None = None
        self._paused: float | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Count FLOPs while the module is still as the user wrote it: no shards, no kernels, no FP8."""
        if stage == "fit" and self._counted is None:
            if self.flops_per_token is not None:
                self._counted = TrainFlops(self.flops_per_token, 0.0, counts_attention=True)
            else:
                self._counted = count_train_flops(pl_module)
        if stage == "fit":
            self.report = [self._describe(peak_of(trainer.strategy.root_device))]

    def _describe(self, peak: float | None) -> str:
        assert self._counted is not None
        counted = f"{self._counted.per_token / 1e6:,.2f} MFLOP per token"
        counted += "" if self._counted.counts_attention else ", attention not counted (no forward of token ids alone)"
        return f"measured: {counted}; " + (f"MFU against {peak:,.0f} TFLOP/s bf16" if peak else "no MFU, peak unknown")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forget what a former fit measured."""
        self._clock.start(trainer)
        self._since = self._paused = None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count; on logging steps look at the clock."""
        tokens, row = tokens_in(batch)
        self._tokens, self._row = self._tokens + tokens, max(self._row, row)
        if not self._clock.ended_step(trainer):
            return
        self._steps += 1
        if self._since is None:
            self._restart(trainer)
        elif logging_due(trainer):
            self._log(trainer, pl_module)
            self._restart(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock."""
        if self._since is not None:
            synchronize(trainer.strategy.root_device)
            self._paused = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock again."""
        if self._since is not None and self._paused is not None:
            synchronize(trainer.strategy.root_device)
            self._since += time.perf_counter() - self._paused
            self._paused = None

    def _restart(self, trainer: L.Trainer) -> None:
        synchronize(trainer.strategy.root_device)
        self._since, self._tokens, self._steps = time.perf_counter(), 0, 0

    def _log(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        device = trainer.strategy.root_device
        synchronize(device)
        assert self._since is not None
        assert self._counted is not None
        seconds = time.perf_counter() - self._since
        # Ranks of one tensor-parallel group see the same tokens: the mean over ranks, times data ranks, is the sum.
        mean = trainer.strategy.reduce(
            torch.as_tensor(self._tokens, dtype=torch.float64, device=device), reduce_op="mean"
        )
        tokens = float(mean) * (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        values = {"step_seconds": seconds / self._steps}
        if tokens:
            rate = tokens / seconds
            tflops = rate * self._counted.at(self._row) / trainer.world_size / 1e12
            values |= {"tokens_per_second": rate, "tflops_per_device": tflops}
            peak = peak_of(device)
            if peak is not None:
                values["mfu"] = tflops / peak
        pl_module.log_dict(values, on_step=True, on_epoch=False, rank_zero_only=False)
