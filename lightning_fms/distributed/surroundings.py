"""What other code runs around an optimizer step, and what the strategy may leave out where there is none.

A step in one pass (`one_pass_optimizer`) keeps gradients in bf16, does not write clipped gradients, and leaves bf16 copies
that need no refresh. All of that could be noticed by a hook that looks at gradients before the optimizer uses them, or
edits weights through `.data`, which moves no version counter. So each epoch's first step looks which hooks the module and the
callbacks define, and how the precision plugin clips: with only Lightning's and this package's there, nobody can notice. Else
gradients are fp32 and clipped in place, and copies are refreshed at every step, as with any other optimizer. A callback with
`only_watches = True` says that it edits no weights and needs no gradients as they usually are, and counts as one of ours.

What is not guarded: `.grad` after the step, as a hook like `on_train_batch_end` finds it, is bf16 and unclipped.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks

from lightning_fms.distributed import one_pass_optimizer
from lightning_fms.distributed.master import MasterWeights

# Hooks that run while gradients lie between backward and the optimizer's arithmetic, and between that and the next forward.
_SEE_GRADIENTS = (
    "backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "on_before_backward",
    "on_after_backward", "on_before_zero_grad", "on_before_optimizer_step",
    "clip_gradients", "clip_grad_by_norm", "main_params",
)  # fmt: skip
_BETWEEN_STEPS = ("optimizer_step", "lr_scheduler_step", "on_train_batch_start", "on_train_batch_end")


def use_one_pass(
    optimizers: Sequence[Any], wanted: bool | str, device: torch.device, masters: MasterWeights | None
) -> list[str]:
    """Convert the optimizers that can be; returns a line for each that was asked for.

    Args:
        optimizers: of the run.
        wanted: True, False, or 'auto', on CUDA only.
        device: of this rank.
        masters: with copies to write.
    """
    if not wanted or (wanted == "auto" and device.type != "cuda"):
        return []
    lines = []
    for optimizer in optimizers:
        name, why = type(optimizer).__name__, one_pass_optimizer.hindrance(optimizer, anywhere=wanted is True)
        if not why:
            copies, fresh = (masters.copies, masters.fresh) if masters is not None else ({}, None)
            one_pass_optimizer.convert(optimizer, copies, fresh, anywhere=wanted is True)
        lines.append(f"optimizer: {name} by PyTorch, {why}" if why else f"optimizer: {name} in one pass")
    return lines


class Surroundings:
    """What is around the steps of one fit."""

    def __init__(self) -> None:
        self._epoch = -1
        self._edits_possible = True

    def before_step(
        self, trainer: Trainer, module: LightningModule, optimizers: Sequence[Any], masters: MasterWeights | None
    ) -> bool:
        """Look around in each epoch's first step; returns whether weights may have been edited since the last step."""
        first = self._epoch != trainer.current_epoch
        if first:
            self._epoch = trainer.current_epoch
            self._edits_possible = may_edit_weights(trainer, module)
            _choose_gradients(optimizers, masters, private=not shows_gradients(trainer, module))
        return first or self._edits_possible


def _choose_gradients(optimizers: Sequence[Any], masters: MasterWeights | None, private: bool) -> None:
    """Bf16 gradients, and clipping in the step, where the optimizers can and nobody sees it."""
    ours = [optimizer for optimizer in map(one_pass_optimizer.one_pass, optimizers) if optimizer is not None]
    for optimizer in ours:
        optimizer.folds = private
    if masters is not None:
        groups = [group for optimizer in ours for group in optimizer.param_groups if private]
        masters.narrow_gradients({p for group in groups for p in group["params"]})


def keeps_copies_fresh(optimizer: Optimizer) -> bool:
    """Whether a step leaves nothing to refresh: it wrote the copies, and nobody else's hook edits weights behind it."""
    hooks = (*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values())
    return one_pass_optimizer.one_pass(optimizer) is not None and _all_ours(hooks)


def shows_gradients(trainer: Trainer, module: LightningModule) -> bool:
    """Whether someone else's code may look at gradients before the optimizer uses them, and expect them fp32 and clipped."""
    by_value = bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm == "value"
    plugin = type(trainer.precision_plugin)
    return not module.automatic_optimization or by_value or _foreign_hooks(trainer, (module, plugin), _SEE_GRADIENTS)


def may_edit_weights(trainer: Trainer, module: LightningModule) -> bool:
    """Whether someone else's code runs between an optimizer step and the next forward, and may edit weights through `.data`."""
    return not module.automatic_optimization or _foreign_hooks(trainer, (module,), _BETWEEN_STEPS)


def _foreign_hooks(trainer: Trainer, others: Sequence[Any], names: Sequence[str]) -> bool:
    """Whether a hook of a callback or of the others is defined outside of Lightning and this package; not where it only watches."""
    callbacks = (callback for callback in vars(trainer)["callbacks"] if not getattr(callback, "only_watches", False))
    hooks = (getattr(owner, name, None) for owner in (*others, *callbacks) for name in names)
    return not _all_ours(hook for hook in hooks if hook is not None)


def _all_ours(hooks: Iterable[Any]) -> bool:
    """Whether all are defined in Lightning or in this package."""
    return {str(getattr(hook, "__module__", "")).partition(".")[0] for hook in hooks} <= {"lightning", "lightning_fms"}
