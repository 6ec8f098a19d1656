"""Clip gradients by the norm of all of them, on any mesh; see `gradient_norm`."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_fms.gradient_norm import by_kind, total_norm


def clip_grad_norm(
    parameters: Iterable[nn.Parameter], max_norm: float, fold: Callable[[Tensor], None] | None = None
) -> Tensor:
    """Scale gradients so that their norm is at most `max_norm`, without asking the device; returns the norm before.

    Args:
        parameters: those without a gradient are left out.
        max_norm: of all gradients together.
        fold: takes the factor, to multiply by it when the gradients are used; None multiplies them in place.
    """
    parameters = [p for p in parameters if p.grad is not None]
    norm = total_norm(p.grad for p in parameters if p.grad is not None)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if fold is not None:
        if parameters:
            fold(factor)
        return norm
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.dtype == torch.bfloat16 and parameter.dtype == torch.float32:
            parameter.grad = parameter.grad.float()  # the product has more bits
    for kind in by_kind(p.grad for p in parameters if p.grad is not None):
        torch._foreach_mul_([g.to_local() if isinstance(g, DTensor) else g for g in kind], factor)
    return norm
