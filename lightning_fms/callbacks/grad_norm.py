"""The norm of the gradient, before clipping, on the steps that are logged.

It is the first thing to look at when a loss misbehaves, and it costs one pass over all gradients, so it is not taken at
every step.
"""

import lightning as L
from torch.optim import Optimizer

from lightning_fms.callbacks.cadence import logging_due
from lightning_fms.gradient_norm import total_norm


class GradNorm(L.Callback):
    """Log `grad_norm`, the 2-norm over all parameters before clipping."""

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Take the norm if the step that is about to be made is logged; no synchronisation."""
        if logging_due(trainer, steps_ahead=1):
            gradients = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
            pl_module.log("grad_norm", total_norm(gradients), on_step=True, on_epoch=False)
