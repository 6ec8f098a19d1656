"""The norm of gradients that lie on several meshes, or on none: for clipping, and for showing it.

PyTorch stacks the norms of all gradients, which it can only where all lie on one mesh. Beside tensor ranks some parameters are
split over two dimensions of the mesh and some over one. So the norms are taken mesh by mesh, as DTensors, which count a repeated
part once, and only the few results are combined.
Gradients in half precision have a norm in fp32 without being cast: they are read once.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """2-norm of all gradients together, a scalar on their device; a collective where they are sharded."""
    norms = [_norm(kind) for kind in by_kind(gradients)]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def by_kind(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients in groups that can stand in one call: of one mesh, or plain, and of one precision."""
    kinds: dict[object, list[Tensor]] = {}
    for gradient in gradients:
        mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
        kinds.setdefault((mesh, _half(gradient)), []).append(gradient)
    yield from kinds.values()


def _norm(kind: list[Tensor]) -> Tensor:
    if isinstance(kind[0], DTensor) or not _half(kind[0]):
        return torch.nn.utils.get_total_norm(kind)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(kind, 2, dtype=torch.float32)))


def _half(gradient: Tensor) -> bool:
    return gradient.dtype in (torch.bfloat16, torch.float16)
