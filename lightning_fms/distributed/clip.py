"""Clip gradients by the norm of all of them, on any mesh; see `gradient_norm`."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_fms.gradient_norm import by_mesh, total_norm


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients in place so that their norm is at most `max_norm`, without asking the device; returns the norm before."""
    parameters = [p for p in parameters if p.grad is not None]
    norm = total_norm(p.grad for p in parameters if p.grad is not None)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for kind in by_mesh(p.grad for p in parameters if p.grad is not None):
        torch._foreach_mul_([g.to_local() if isinstance(g, DTensor) else g for g in kind], factor)
    return norm
