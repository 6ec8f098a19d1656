"""One summary at the start of a run: what is streamed, sharded, compiled, swapped, converted, and what not and why.

Each part knows best what it did, so each may have a `report`: a list of lines, or an object whose `lines()` gives them.
They are shown once, when everything is set up and before the first step, so that a setting without effect is seen before
it has cost a day.
"""

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from torch.distributed.fsdp import FSDPModule


def reports(trainer: L.Trainer) -> Iterator[str]:
    """The lines of data module, strategy, precision plugin and callbacks, in this order, each line once."""
    parts: list[Any] = [getattr(trainer, "datamodule", None), trainer.strategy, trainer.precision_plugin]
    seen: set[str] = set()
    for part in [*parts, *trainer.callbacks]:  # type: ignore[attr-defined]
        report = getattr(part, "report", None) or ()
        for line in report.lines() if hasattr(report, "lines") else report:
            if line not in seen:
                seen.add(line)
                yield line


def headline(trainer: L.Trainer, pl_module: L.LightningModule) -> str:
    """Size, devices, precision and length of the run."""
    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    parameters = sum(parameter.numel() for parameter in pl_module.parameters())
    size = f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.2f} M"
    steps = f"{trainer.max_steps:,} steps" if trainer.max_steps > 0 else f"{trainer.max_epochs} epochs"
    # FSDP2 puts a class of its own in front of the user's.
    user = next(kind for kind in type(pl_module).__mro__ if not issubclass(kind, FSDPModule))
    return f"{user.__name__}, {size} parameters on {trainer.world_size} x {name}, {trainer.precision}, {steps}"


class Summary(L.Callback):
    """Print the reports of all parts when a fit starts, on the first rank."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Everything is set up: strategy, kernels, precision, loaders' settings."""
        lines = [headline(trainer, pl_module), *reports(trainer)]
        if trainer.is_global_zero:
            print("\n".join(f"  {line}" for line in lines), end="\n\n", flush=True)
