"""The running average of a module's weights, shard beside shard.

An average needs no whole weights: it is taken element by element, so each rank averages what it holds. `AveragedModel` copies the
module it is given, which a sharded module refuses, and on a module not yet sharded makes one whole copy a rank. So the copy here
is of the tensors alone, in a tree of plain modules with the same names, ties and order: a shard of the weights has a shard of the
average beside it, whoever walks over both finds pairs, and a checkpoint holds the average as it holds the weights.

The rule (`avg_fn`, `multi_avg_fn`) sees local shards; one that is not element by element, a norm for example, would see parts.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from lightning_fms.distributed.state import clean_name


class AverageOfShards(AveragedModel):
    """An `AveragedModel` of a module that may be sharded; it is no model that computes.

    Args:
        model: shows its shards, or its fp32 masters.
        device: of the average, where nothing is sharded; shards of it stay where those of the weights are.
        rule: of `AveragedModel`: `avg_fn`, `multi_avg_fn`, `use_buffers`.
    """

    def __init__(self, model: nn.Module, device: torch.device | None = None, **rule: Any) -> None:
        super().__init__(nn.Module(), device=device, **rule)
        self.module = copy_of_tensors(model, device)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Average the weights that the module shows now, as `AveragedModel` does."""
        shards, self.module = self.module, _local_views(self.module)
        try:
            super().update_parameters(_local_views(model))
        finally:
            self.module = shards

    @torch.no_grad()
    def begin_again(self, model: nn.Module) -> None:
        """Take the module's values, as at the start."""
        pairs = (
            (self.module.parameters(), model.parameters()),
            (self.module.buffers(), model.buffers()),
        )
        for mine, theirs in pairs:
            for average, tensor in zip(mine, theirs, strict=True):
                average.detach().copy_(tensor.detach())


def copy_of_tensors(model: nn.Module, device: torch.device | None = None) -> nn.Module:
    """A tree of plain modules that holds copies of a module's parameters and buffers, under clean names."""
    root, copies = nn.Module(), dict[Tensor, Tensor]()
    moves = device is not None and not any(isinstance(parameter, DTensor) for parameter in model.parameters())

    def copied(tensor: Tensor, parameter: bool) -> Any:
        if tensor not in copies:
            clone = tensor.detach().to(device if moves else tensor.device, copy=True)
            copies[tensor] = nn.Parameter(clone, requires_grad=False) if parameter else clone
        return copies[tensor]

    for name, module in model.named_modules(remove_duplicate=False):
        node = _node(root, clean_name(f"{name}."))
        for key, parameter in module._parameters.items():
            if parameter is not None:
                node.register_parameter(key, copied(parameter, parameter=True))
        for key, buffer in module._buffers.items():
            if buffer is not None:
                kept = key not in module._non_persistent_buffers_set
                node.register_buffer(key, copied(buffer, parameter=False), persistent=kept)
    return root


def _node(root: nn.Module, path: str) -> nn.Module:
    node = root
    for part in filter(None, path.split(".")):
        if part not in node._modules:
            node.add_module(part, nn.Module())
        node = node.get_submodule(part)
    return node


def _local_views(module: nn.Module) -> nn.Module:
    """The local shards of a module, in order; they share its memory."""
    views = nn.Module()
    for i, parameter in enumerate(module.parameters()):
        views.register_parameter(f"parameter_{i}", nn.Parameter(_local(parameter), requires_grad=False))
    for i, buffer in enumerate(module.buffers()):
        views.register_buffer(f"buffer_{i}", _local(buffer))
    return views


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
