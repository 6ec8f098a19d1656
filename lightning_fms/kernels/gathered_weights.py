"""Tells autograd that FSDP2's gathered weights changed when an optimizer changed their shards.

Problem: FSDP2 gathers into the same Parameter each time and keeps its version counter, because backward needs old counters
to hold. So the counter also hides an optimizer step, and deferred logits from before the step would be computed with the
weights after it.

Idea: after a step, move the counter of each gathered weight whose shard this optimizer owns. Weights of other optimizers
keep theirs, so a graph through them can still run backward.
"""

import torch
from torch import nn

from lightning_fms.fsdp_parameters import fsdp_parameters


def mark_changed(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Move the version counters of the gathered copies of `optimizer`'s parameters in `module`."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    records = (p for p in fsdp_parameters(module) if hasattr(p, "_unsharded_param"))  # made by the first gather
    gathered = [p._unsharded_param for p in records if id(p.sharded_param) in stepped]
    if gathered:
        torch.autograd.graph.increment_version(gathered)


__all__ = ["mark_changed"]
