"""Which precision rule the strategy applies, read from Lightning's precision plugin.

| plugin                                  | parameters held | computed in | gradients added up in |
|-----------------------------------------|-----------------|-------------|-----------------------|
| `32-true` (Lightning's default)         | as built        | as built    | as built              |
| `bf16-mixed`                            | as built (fp32) | bf16        | fp32                  |
| `bf16-true`                             | bf16            | bf16        | fp32, stored bf16     |

`bf16-mixed` means no autocast here: parameters are cast once per step instead of at every matmul, and what the optimizer
sees stays fp32. A module has to be clean about dtypes, as under `bf16-true`; floating point batch entries are cast.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from lightning_fms.distributed.clip import clip_grad_norm
from lightning_fms.distributed.master import MasterWeights
from lightning_fms.distributed.one_pass_optimizer import one_pass


class BF16Mixed(Precision):
    """bf16 compute on fp32 master weights without autocast; the strategy does the casting.

    Replaces Lightning's `MixedPrecision("bf16-mixed")`, which is autocast and refuses gradient clipping with fused
    optimizers although bf16 has no loss scale (Lightning-AI/pytorch-lightning#21435).
    """

    precision = "bf16-mixed"


def accept(plugin: Precision) -> Precision:
    """The plugin to use; refuses what the strategy cannot do (ValueError)."""
    precision = str(plugin.precision)
    if precision.startswith("16"):
        raise ValueError(
            f"precision={precision!r} needs loss scaling, which FSDPCompileStrategy does not do: "
            f"use 'bf16-mixed' (same speed, no scaling) or '32-true'"
        )
    if precision not in ("32-true", "bf16-mixed", "bf16-true"):
        raise ValueError(f"precision={precision!r}: FSDPCompileStrategy takes '32-true', 'bf16-mixed' or 'bf16-true'")
    plugin = BF16Mixed() if type(plugin) is MixedPrecision else plugin
    if type(plugin).clip_grad_by_norm is Precision.clip_grad_by_norm:  # else it is the user's own way
        plugin.clip_grad_by_norm = partial(_clip_by_norm, plugin)  # type: ignore[method-assign]
    return plugin


def _clip_by_norm(plugin: Precision, optimizer: Optimizer, clip_val: int | float) -> None:
    """In the place of `clip_grad_norm_`, which takes one mesh only; part of the step where nobody looks before that."""
    ours = one_pass(optimizer)
    fold = ours.fold if ours is not None and ours.folds else None
    clip_grad_norm(plugin.main_params(optimizer), float(clip_val), fold)


def computes_in_bf16(plugin: Precision) -> bool:
    """Whether the rule of fp32 masters and bf16 copies applies."""
    return str(plugin.precision) == "bf16-mixed"


@contextmanager
def computing(masters: MasterWeights, plugin: Precision) -> Iterator[None]:
    """The module computes with the copies of its weights inside: in bf16, and in FP8 where the plugin holds such."""
    with masters.active(), getattr(plugin, "weights_held", nullcontext)():
        yield


def weights_changed(plugin: Precision) -> None:
    """Weights that no wrapper holds changed without moving a version counter."""
    getattr(plugin, "weights_changed", lambda: None)()


def cast_batch(plugin: Precision, batch: Any) -> Any:
    """A batch with its fp32 tensors in bf16 where parameters are computed in it; else as it is."""
    if not computes_in_bf16(plugin):
        return batch
    return apply_to_collection(batch, torch.Tensor, lambda t: t.bfloat16() if t.dtype == torch.float32 else t)


def fsdp_policy(plugin: Precision) -> MixedPrecisionPolicy:
    """The same rule in FSDP2's terms."""
    if computes_in_bf16(plugin):
        return MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    if isinstance(plugin, HalfPrecision):
        return MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    return MixedPrecisionPolicy(cast_forward_inputs=False)


def free_gradients(module: LightningModule) -> None:
    """Drop the last step's gradients before the first forward of a step instead of behind it.

    Lightning calls `optimizer_zero_grad` between forward and backward, so the last gradients lie beside all activations of the
    forward, where memory peaks. It will drop them anyway, unless the user's hook decides otherwise: then they stay.
    """
    if module.automatic_optimization and not is_overridden("optimizer_zero_grad", module):
        optimizers = module.optimizers(use_pl_optimizer=False)
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            optimizer.zero_grad(set_to_none=True)
