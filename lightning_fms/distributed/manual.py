"""Manual optimization with FSDP2: the root's part of a step that runs backward and optimizers inside itself.

FSDP2 registers its backward on the outputs of the root's forward. Under manual optimization the step is that forward, and
backward, optimizer steps and further forwards happen before it returns. So the root has to be told of each backward, and
gathered again after each, with the `requires_grad` flags that its parameters had before `toggle_optimizer` changed the
shards. Other groups are blocks whose forward has returned; they take care of themselves.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class RootInStep:
    """The root while a step computes with it; false where the root is not sharded, and then it does nothing.

    Args:
        module: the root.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._root: Any = module if isinstance(module, FSDPModule) else None
        self._trainable: dict[str, bool] = {}
        self._shards: dict[torch.Tensor, bool] = {}

    def __bool__(self) -> bool:
        return self._root is not None

    def remember(self) -> None:
        """Keep the flags at the start of a step, before an optimizer is toggled.

        FSDP looks at them once, at its first forward, and torch 2.11 learns from parameters that are trainable then in which
        dtype gradients are held. A group that was toggled off would get none.
        """
        if self._root is not None:
            state = self._root._get_fsdp_state()
            if state._is_root is None:
                state._lazy_init()
            self._trainable = {name: p.requires_grad for name, p in self._root.named_parameters()}
            self._shards = {p: p.requires_grad for p in self._root.parameters() if isinstance(p, DTensor)}

    def before_backward(self, loss: torch.Tensor) -> None:
        """Nothing else would reduce the root's own parameters."""
        if self._root is not None:
            self._root._get_fsdp_state()._register_pre_backward_hook(loss)

    @contextmanager
    def toggled_off_kept(self, optimizers: Iterable[Any]) -> Iterator[None]:
        """Gradients of parameters that `toggle_optimizer` switched off stay as they are.

        It switches the shards; the root, gathered before, computes with parameters that did not hear of it.
        """
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        kept = {p: p.grad for group in groups for p in group["params"] if not p.requires_grad}
        for parameter in kept:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in kept.items():
                parameter.grad = gradient

    def unshard(self) -> None:
        """Gather the root again, for the rest of the step."""
        if self._root is None:
            return
        toggled = {shard: shard.requires_grad for shard in self._shards}
        for shard, trainable in self._shards.items():  # torch 2.11 looks again, see `remember`
            shard.requires_grad_(trainable)
        self._root.unshard()
        for shard, trainable in toggled.items():
            shard.requires_grad_(trainable)
        for name, parameter in self._root.named_parameters():  # gathered with the flags of a toggled optimizer
            if not isinstance(parameter, DTensor):
                parameter.requires_grad_(self._trainable.get(name, parameter.requires_grad))
