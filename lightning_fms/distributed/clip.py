"""Clip gradients by the norm of all of them, on any mesh.

PyTorch's `clip_grad_norm_` stacks the norms of all gradients, which it can only where all lie on one mesh. Beside tensor ranks
some parameters are split over two dimensions of the mesh and some over one. So the norms are taken mesh by mesh, as DTensors,
which count a repeated part once, and only the few results are combined.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """2-norm of all gradients together, a scalar on their device; a collective where they are sharded."""
    norms = [torch.nn.utils.get_total_norm(kind) for kind in _by_mesh(gradients)]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients in place so that their norm is at most `max_norm`, without asking the device; returns the norm before."""
    parameters = [p for p in parameters if p.grad is not None]
    norm = total_norm(p.grad for p in parameters if p.grad is not None)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for kind in _by_mesh(p.grad for p in parameters if p.grad is not None):
        torch._foreach_mul_([g.to_local() if isinstance(g, DTensor) else g for g in kind], factor)
    return norm


def _by_mesh(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    kinds: dict[object, list[Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    yield from kinds.values()
