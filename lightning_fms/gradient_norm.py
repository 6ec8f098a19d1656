"""The norm of gradients that lie on several meshes, or on none: for clipping, and for showing it.

PyTorch stacks the norms of all gradients, which it can only where all lie on one mesh. Beside tensor ranks some parameters are
split over two dimensions of the mesh and some over one. So the norms are taken mesh by mesh, as DTensors, which count a repeated
part once, and only the few results are combined.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """2-norm of all gradients together, a scalar on their device; a collective where they are sharded."""
    norms = [torch.nn.utils.get_total_norm(kind) for kind in by_mesh(gradients)]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def by_mesh(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients in groups that can stand in one call: those of each mesh, and plain tensors."""
    kinds: dict[object, list[Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    yield from kinds.values()
