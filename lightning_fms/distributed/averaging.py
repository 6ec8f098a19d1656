"""Lightning's `WeightAveraging` keeps a whole copy of the module on each rank, made before the module is sharded.

It then copies whole tensors into shards, which fails behind the first step with a word about mixed tensors. So it is refused at
the start, where weights are sharded; on one device nothing is, and it works.
"""

from collections.abc import Iterable

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import WeightAveraging


def refuse_averages_of_shards(callbacks: Iterable[Callback]) -> None:
    """Raise ValueError where a callback averages weights as Lightning does."""
    for callback in callbacks:
        if isinstance(callback, WeightAveraging):
            raise ValueError(
                f"{type(callback).__name__} averages whole weights, and FSDPCompileStrategy shards them here: leave it out, "
                "train on one device, or average the checkpoints afterwards"
            )
