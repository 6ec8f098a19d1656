"""FSDP2's own records of the parameters that it shards: the one place that knows where PyTorch keeps them.

A record has the shard (`sharded_param`) and, from the first gather on, the gathered copy (`_unsharded_param`). Neither is public.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def fsdp_groups(module: FSDPModule) -> list[Any]:
    """What a module that `fully_shard` was applied to gathers and frees together; empty if it has no parameters of its own."""
    state: Any = module._get_fsdp_state()
    several = hasattr(state, "_fsdp_param_groups")  # not in torch 2.11
    groups = state._fsdp_param_groups if several else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def fsdp_parameters(root: nn.Module) -> Iterator[Any]:
    """The records of all parameters in and below `root`."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            for group in fsdp_groups(module):
                yield from group.fsdp_params
