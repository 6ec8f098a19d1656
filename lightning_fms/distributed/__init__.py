"""FSDP2 and `torch.compile` for any plain module, with checkpoints that load on any number of ranks.

`mesh blocks activation compile materialize shard master place manual rng report state commit checkpoint average restore` are
plain torch; `policy`, `launcher`, `saving` and `strategy` know Lightning. `strategy` is the class on top of them all and loads on
first use, so that the core can be imported without Lightning.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_fms.distributed.checkpoint import latest_committed
from lightning_fms.distributed.commit import CheckpointError

if TYPE_CHECKING:
    from lightning_fms.distributed.strategy import FSDPCompileStrategy

__all__ = ["CheckpointError", "FSDPCompileStrategy", "latest_committed"]


def __getattr__(name: str) -> Any:
    if name != "FSDPCompileStrategy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return import_module(f"{__name__}.strategy").FSDPCompileStrategy
