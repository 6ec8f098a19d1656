"""Peak memory, the number that decides what fits.

On an accelerator: the most that the allocator had in use (`memory_gib`) and had taken from the device
(`memory_reserved_gib`) since the last log, the larger of all ranks, because the fullest rank is the one that fails. On
a CPU: the most that the process ever had resident.
"""

import resource
import sys
from typing import Any

import lightning as L
import torch

from lightning_fms.callbacks.cadence import StepClock, logging_due

GIB = 2**30


def peak_resident_bytes() -> int:
    """Most bytes that this process ever had resident; `ru_maxrss` is in KiB on Linux and in bytes on macOS."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_bytes(device: torch.device) -> dict[str, int]:
    """Peaks by the name under which they are logged."""
    if device.type == "cuda":
        return {
            "memory_gib": torch.cuda.max_memory_allocated(device),
            "memory_reserved_gib": torch.cuda.max_memory_reserved(device),
        }
    return {"memory_gib": peak_resident_bytes()}


class Memory(L.Callback):
    """Log `memory_gib` and, on an accelerator, `memory_reserved_gib`, in GiB (2^30 bytes): peaks since the last log, worst rank."""

    def __init__(self) -> None:
        self._clock = StepClock()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin at the trainer's step."""
        self._clock.start(trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Read the counters on logging steps; they live on the host, so nothing is synchronised for them."""
        if not (self._clock.ended_step(trainer) and logging_due(trainer)):
            return
        device = trainer.strategy.root_device
        for name, peak in peak_bytes(device).items():
            worst = trainer.strategy.reduce(torch.tensor(peak / GIB, device=device), reduce_op="max")
            pl_module.log(name, float(worst), on_step=True, on_epoch=False)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
