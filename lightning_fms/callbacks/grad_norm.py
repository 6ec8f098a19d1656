"""The norm of the gradient, before clipping, on the steps that are logged.

It is the first thing to look at when a loss misbehaves, and it costs one pass over all gradients, so it is not taken at
every step. Sharded gradients are DTensors: their norm is that of the whole tensor, reduced over the shards once at the
end.
"""

from collections.abc import Iterable

import lightning as L
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_fms.callbacks.cadence import logging_due


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """2-norm of all gradients together, a scalar on their device; a collective where they are sharded."""
    # Plain tensors, and DTensors of different meshes, do not mix in one call.
    kinds: dict[object, list[Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    norms = [torch.nn.utils.get_total_norm(kind) for kind in kinds.values()]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


class GradNorm(L.Callback):
    """Log `grad_norm`, the 2-norm over all parameters before clipping."""

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Take the norm if the step that is about to be made is logged; no synchronisation."""
        if logging_due(trainer, steps_ahead=1):
            gradients = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
            pl_module.log("grad_norm", total_norm(gradients), on_step=True, on_epoch=False)
