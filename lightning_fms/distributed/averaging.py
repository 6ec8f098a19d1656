"""Lightning's `WeightAveraging` on shards: the callback decides and swaps, and what it averages is an `AverageOfShards`.

The callback copies the whole module in its `setup`, which comes before the strategy's: the module is whole then, or on the meta
device. So its `setup` waits (for one call, on this object alone), and when the module is sharded it is given an average of
shards. All else is Lightning's own: when to update, the swap around a validation, the average in a checkpoint's `state_dict`.
"""

from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_fms.distributed import shard
from lightning_fms.distributed.average import AverageOfShards


def postpone(trainer: Trainer) -> None:
    """Let a callback that averages weights wait for the sharded module; to be called before Lightning sets it up.

    A subclass with a `setup` of its own is not kept waiting: it makes a whole copy, which is exchanged.

    Raises:
        ValueError: there are two: a checkpoint holds one average.
    """
    averaging = _averaging(trainer) if trainer.state.fn == TrainerFn.FITTING else []
    if len(averaging) > 1:
        names = " and ".join(type(callback).__name__ for callback in averaging)
        raise ValueError(f"callbacks: {names} both average weights, and a checkpoint holds one average: leave one out")
    for callback in averaging:
        if type(callback).setup is WeightAveraging.setup:
            vars(callback)["setup"] = partial(_wait, callback)


def _wait(callback: WeightAveraging, *_: Any, **__: Any) -> None:
    vars(callback).pop("setup", None)


def begin(trainer: Trainer, module: nn.Module, device: torch.device) -> AverageOfShards | None:
    """Give the callback that averages weights, if there is one, an average of the module as it is now; None outside of `fit`.

    Raises:
        ValueError: it asks for the average of shards to be on another device.
    """
    for callback in _averaging(trainer):
        callback._average_model = None  # of a fit before
        if trainer.state.fn != TrainerFn.FITTING:
            continue
        if callback._device is not None and shard.is_sharded(module) and _kind(callback._device) != device.type:
            raise ValueError(
                f"{type(callback).__name__}(device={str(callback._device)!r}): the weights are sharded on {device.type}, and the "
                "average lies beside them, shard by shard; leave device out"
            )
        where = callback._device if callback._device is not None else device
        average = AverageOfShards(module, torch.device(where), use_buffers=callback._use_buffers, **callback._kwargs)
        callback._average_model = average
        return average
    return None


def _averaging(trainer: Trainer) -> list[WeightAveraging]:
    return [callback for callback in vars(trainer)["callbacks"] if isinstance(callback, WeightAveraging)]


def _kind(device: Any) -> str:
    return "cuda" if isinstance(device, int) else str(device.type)
