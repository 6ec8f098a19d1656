"""fp32 master weights and bf16 compute copies on ONE device, with the numerics of FSDP2 and without its wrapper.

FSDP2's mixed precision keeps fp32 shards, computes with bf16 copies that it gathers, and adds gradients up in fp32. On
one device there is nothing to gather, and the wrapper costs 5 % of a step. What remains of the rule is small:

- The module's Parameters are the fp32 masters. Optimizers, clipping, `state_dict`, gradient norms, callbacks see these,
  exactly as they see FSDP2's shards.
- While a step computes (forward and backward), the module holds bf16 Parameters in their place: `active()` swaps dict
  entries, a microsecond a parameter. Backward is included since activation checkpointing runs forward again there.
- A hook on each bf16 Parameter adds its gradient to the master's fp32 `.grad` and frees it, so micro-batches accumulate
  in fp32 and no second set of gradients exists.
- The copies are refreshed before they are used if a master changed: by its version counter, or when told so by
  `invalidate`. An edit through `.data` moves no version counter (Lightning's weight averaging swaps so): the strategy
  invalidates at the start of each optimizer step's first micro-batch and around every evaluation. Such an edit between
  two micro-batches of one step, or two batches of one evaluation, is not seen.

The alternative, an autograd-tracked cast once per step, gives the same gradients; but the module then computes with
non-leaf tensors that are no Parameters (fused kernels and `torch.compile` look for those), and all micro-batches hang on
one graph. Tied parameters stay tied: one master has one copy, wherever it appears. Hooks that a user puts on a master's
gradient do not fire.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class MasterWeights:
    """Holds the compute copies of one module's fp32 parameters.

    Args:
        module: on its device, real memory. Parameters of other dtypes are left as they are.
        dtype: of the copies.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        copies: dict[nn.Parameter, nn.Parameter] = {}
        self._slots: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        for owner in module.modules():
            for name, master in owner._parameters.items():
                if master is not None and master.dtype == torch.float32:
                    if master not in copies:
                        copies[master] = _compute_copy(master, dtype)
                    self._slots.append((owner, name, master, copies[master]))
        self._masters, self._copies = list(copies), list(copies.values())
        self._versions = [-1] * len(self._masters)
        self._depth = 0

    def __len__(self) -> int:
        return len(self._masters)

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

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the masters that changed since the last time."""
        versions = [master._version for master in self._masters]
        changed = [i for i, version in enumerate(versions) if version != self._versions[i]]
        if changed:
            torch._foreach_copy_([self._copies[i] for i in changed], [self._masters[i] for i in changed])
            self._versions = versions

    def _show(self, copies: bool) -> None:
        for owner, name, master, copy in self._slots:
            parameter = copy if copies else master
            if type(owner).__setattr__ is nn.Module.__setattr__:
                owner._parameters[name] = parameter
            else:  # e.g. nn.LSTM, which keeps a second list of its weights in step
                setattr(owner, name, parameter)


def _compute_copy(master: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    copy = nn.Parameter(torch.empty_like(master, dtype=dtype), requires_grad=True)

    def accumulate(parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None or not master.requires_grad:  # e.g. toggled off for another optimizer's turn
            return
        if master.grad is None:
            master.grad = torch.empty_like(master)
            torch._foreach_copy_([master.grad], [gradient])  # on a GPU twice as fast as `.to` (torch 2.11)
        else:
            master.grad.add_(gradient)

    copy.register_post_accumulate_grad_hook(accumulate)
    return copy
