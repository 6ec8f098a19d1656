"""fp32 master weights and bf16 compute copies on ONE device, with the numerics of FSDP2 and without its wrapper.

FSDP2's mixed precision keeps fp32 shards, computes with bf16 copies that it gathers, and adds gradients up in fp32. On
one device there is nothing to gather, and the wrapper costs 5 % of a step. What remains of the rule is small:

- The module's Parameters are the fp32 masters. Optimizers, clipping, `state_dict`, gradient norms, callbacks see these,
  exactly as they see FSDP2's shards.
- While a step computes (forward and backward), the module holds bf16 Parameters in their place: `active()` swaps dict
  entries, a microsecond a parameter. Backward is included since activation checkpointing runs forward again there.
- A hook on each bf16 Parameter adds its gradient to the master's `.grad` and frees it, so micro-batches accumulate
  in fp32 and no second set of gradients exists. Where the optimizer takes bf16 gradients (`narrow`), the first micro-batch's
  becomes the master's `.grad` as it is, and only a second one makes it fp32: the same numbers, as bf16 is exact in fp32.
- The copies are refreshed before they are used if a master changed: by its version counter, or when told so by
  `invalidate`. An optimizer that writes copies itself says so by `fresh`.

An edit through `.data` moves no version counter (Lightning's weight averaging swaps so). So the strategy invalidates around
every evaluation, at the first step of a fit and of each epoch, and at each step's first micro-batch wherever code that is neither
Lightning's nor this package's runs between two steps: a hook of the module or of a callback there, or a hook on the
optimizer's step; see `surroundings`. Where there is none, nothing is left that could edit. An edit through `.data`
between two micro-batches of one step, or two batches of one evaluation, is not seen.

The alternative, an autograd-tracked cast once per step, gives the same gradients; but the module then computes with
non-leaf tensors that are no Parameters (fused kernels and `torch.compile` look for those), and all micro-batches hang on
one graph. Tied parameters stay tied: one master has one copy, wherever it appears. Hooks that a user puts on a master's
gradient do not fire.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class MasterWeights:
    """Holds the compute copies of one module's fp32 parameters.

    Args:
        module: on its device, real memory. Parameters of other dtypes are left as they are.
        dtype: of the copies.

    Attributes:
        narrow: masters whose `.grad` may be in `dtype` after one micro-batch; the strategy chooses, see `narrow_gradients`.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        self.narrow: set[Tensor] = set()
        self._hooks: list[Any] = []
        copies: dict[nn.Parameter, nn.Parameter] = {}
        self._slots: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        for owner in module.modules():
            for name, master in owner._parameters.items():
                if master is not None and master.dtype == torch.float32:
                    if master not in copies:
                        copies[master] = self._compute_copy(master, dtype)
                    self._slots.append((owner, name, master, copies[master]))
        self._masters, self._copies = list(copies), list(copies.values())
        self._versions = [-1] * len(self._masters)
        self._index: dict[Tensor, int] = {master: i for i, master in enumerate(self._masters)}
        self._depth = 0

    def __len__(self) -> int:
        return len(self._masters)

    @property
    def copies(self) -> dict[Tensor, Tensor]:
        """The copy of each master."""
        return dict(zip(self._masters, self._copies, strict=True))

    @contextmanager
    def active(self) -> Iterator[None]:
        """The module computes with the copies inside; may be nested."""
        if self._depth == 0:
            for master, copy in zip(self._masters, self._copies, strict=True):
                copy.requires_grad_(master.requires_grad)
            self.refresh()
            self._show(copies=True)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._show(copies=False)

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """The module shows its masters inside, also in the middle of a step (to save or load them)."""
        if self._depth:
            self._show(copies=False)
        try:
            yield
        finally:
            if self._depth:
                self.refresh()
                self._show(copies=True)

    def invalidate(self) -> None:
        """The masters changed; refresh now if a step is computing with the copies, else before the next one."""
        self._versions = [-1] * len(self._masters)
        if self._depth:
            self.refresh()

    def fresh(self, masters: Collection[Tensor]) -> None:
        """These have just been changed together with their copies, whole."""
        for master in masters:
            if (i := self._index.get(master)) is not None:
                self._versions[i] = master._version

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the masters that changed since the last time."""
        versions = [master._version for master in self._masters]
        changed = [i for i, version in enumerate(versions) if version != self._versions[i]]
        if changed:
            torch._foreach_copy_([self._copies[i] for i in changed], [self._masters[i] for i in changed])
            self._versions = versions

    def narrow_gradients(self, masters: Collection[Tensor]) -> None:
        """Leave the gradients of these in the copies' dtype until a second micro-batch; of all others they are fp32."""
        chosen = set(masters)
        self.narrow = {m for m in self._masters if m in chosen}
        for master in self.narrow:
            _allow_any_gradient(master)

    def release(self) -> None:
        """Give masters back as they were, without our hooks. Gradients in another dtype are dropped: they have been used."""
        for master in self._masters:
            if master.grad is not None and master.grad.dtype != master.dtype:
                master.grad = None
            if master.grad_dtype is None:
                master.grad_dtype = master.dtype
        self.narrow = set()
        while self._hooks:  # they hold masters and copies in a way that Python's collector does not see
            self._hooks.pop().remove()

    def _show(self, copies: bool) -> None:
        for owner, name, master, copy in self._slots:
            parameter = copy if copies else master
            if type(owner).__setattr__ is nn.Module.__setattr__:
                owner._parameters[name] = parameter
            else:  # e.g. nn.LSTM, which keeps a second list of its weights in step
                setattr(owner, name, parameter)

    def _compute_copy(self, master: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        copy = nn.Parameter(torch.empty_like(master, dtype=dtype), requires_grad=True)

        def accumulate(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None and master.requires_grad:  # else toggled off for another optimizer's turn
                master.grad = self._sum(master, master.grad, gradient)

        self._hooks.append(copy.register_post_accumulate_grad_hook(accumulate))
        return copy

    def _sum(self, master: nn.Parameter, total: Tensor | None, gradient: Tensor) -> Tensor:
        """`total` with `gradient` added in fp32; both may be bf16."""
        if total is None:
            return gradient if master in self.narrow else _widened(master, gradient)
        total = total if total.dtype == master.dtype else _widened(master, total)
        return total.add_(gradient)


def _widened(master: Tensor, gradient: Tensor) -> Tensor:
    if gradient.dtype == master.dtype:
        return gradient
    wide = torch.empty_like(master)
    torch._foreach_copy_([wide], [gradient])  # on a GPU twice as fast as `.to` (torch 2.11)
    return wide


def _allow_any_gradient(master: Tensor) -> None:
    master.grad_dtype = None
