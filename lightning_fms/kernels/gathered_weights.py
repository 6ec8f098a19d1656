"""Tells autograd that FSDP2's gathered weights changed when an optimizer changed their shards.

Problem: FSDP2 gathers into the same Parameter each time and keeps its version counter, because backward needs old counters
to hold. So the counter also hides an optimizer step, and deferred logits from before the step would be computed with the
weights after it.

Idea: after a step, move the counter of each gathered weight whose shard this optimizer owns. Weights of other optimizers
keep theirs, so a graph through them can still run backward.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


def mark_changed(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Move the version counters of the gathered copies of `optimizer`'s parameters in `module`."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    gathered = [copy for shard, copy in _shards_and_copies(module) if id(shard) in stepped]
    if gathered:
        torch.autograd.graph.increment_version(gathered)


def _shards_and_copies(module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    for child in module.modules():
        if not isinstance(child, FSDPModule):
            continue
        state: Any = child._get_fsdp_state()
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        for group in filter(None, groups):
            for param in group.fsdp_params:
                if hasattr(param, "_unsharded_param"):  # made by the first gather
                    yield param.sharded_param, param._unsharded_param


__all__ = ["mark_changed"]
