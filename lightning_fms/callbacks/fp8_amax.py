"""How large the weights of FP8 layers become.

FP8's e4m3 reaches to 448, with 3 bits of mantissa. A tensor is scaled by 448 / amax before the cast, amax being its largest
absolute value (by rows: a row's largest), so one outlier costs all others precision: below amax / 2^19 they are rounded to 0. A
family of layers whose amax grows by orders of magnitude, while its neighbours' stay, is what to look at when a loss in FP8 leaves
that in bf16: take another recipe (`rowwise`, `fused` keep an outlier to its row), or leave the family out (`skip`).

Weights only. The layers lie within compiled blocks, where a hook that looks at activations would be traced into every step, at the
cost of a pass over each of them.
"""

import re
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_fms.callbacks.cadence import StepClock, logging_due

TAG = "fp8/weight_amax/"


class FP8Amax(L.Callback):
    """Log `fp8/weight_amax/<layers>`, the largest absolute weight of each family of FP8 layers; nothing without such layers.

    A family are the layers whose names differ in numbers only: `net.layers.0.ffn.up_proj` is one of `net.layers.ffn.up_proj`.
    On logging steps each rank reads the weights that it holds once, and all take the maximum in one all-reduce where weights are
    sharded; nothing waits for the device. Other steps are left alone.
    """

    def __init__(self) -> None:
        self._clock = StepClock()
        self._families: dict[str, list[nn.Module]] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the layers, which are converted by now."""
        self._clock.start(trainer)
        self._families = {}
        for name, layer in pl_module.named_modules():
            if getattr(type(layer), "is_float8", False):
                self._families.setdefault(family_of(name), []).append(layer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """On logging steps, on every rank."""
        if not (self._clock.ended_step(trainer) and logging_due(trainer) and self._families):
            return
        largest = torch.stack([_amax(layers, trainer.strategy.root_device) for layers in self._families.values()])
        if any(isinstance(layer.weight, DTensor) for layers in self._families.values() for layer in layers):
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        values = {f"{TAG}{family}": value for family, value in zip(self._families, largest.unbind(), strict=True)}
        pl_module.log_dict(values, on_step=True, on_epoch=False)


def family_of(name: str) -> str:
    """The name of a layer without the parts that are numbers."""
    return re.sub(r"(?<![^.])\d+\.", "", name)


def _amax(layers: list[nn.Module], device: torch.device) -> Tensor:
    """Largest absolute weight that this rank holds, fp32 on `device`; 0 where it holds none."""
    held = [local for layer in layers if (local := _local(layer.weight)).numel()]
    if not held:
        return torch.zeros((), device=device)
    return torch.stack(torch._foreach_norm(held, torch.inf)).max().to(device, torch.float32)


def _local(weight: Any) -> Tensor:
    """This rank's part, out of the wrapping that FP8 all-gather needs."""
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    plain: Tensor = getattr(local, "_tensor", local)
    return plain.detach()
