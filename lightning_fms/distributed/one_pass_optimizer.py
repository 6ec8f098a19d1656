"""`torch.optim.Adam` and `AdamW` whose step is one pass over memory, see `one_pass`; otherwise the very same objects.

`convert` gives an optimizer another class in place, and `restore` the plain one back. State, groups, hooks, schedulers and
checkpoints are those of the plain optimizer, before, meanwhile and after. The class overrides one method: PyTorch's step
asks `_init_group` for the tensors of a group that have a gradient, with state made where it is missing. Ours takes those
that the kernel can do, does them, and hands over the rest: so what is sparse, complex, of another dtype or layout or on
another device is stepped, or refused, by PyTorch itself. A learning-rate scheduler holds the method `step` that it found
when it was made, which is why that is left alone.

A clipping factor that was folded in (`fold`) belongs to the next step and is forgotten with it, or with the gradients.

With `fused=True` PyTorch counts steps on the device. The host's bias corrections need the numbers, so they are read once and
then counted along; a counter that someone else wrote or replaced, as loading a checkpoint does, is read again.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW, Optimizer

from lightning_fms.distributed.one_pass import Settings, Tables, Tensors, adam_step

_OTHER_KINDS = ("amsgrad", "maximize", "capturable", "differentiable", "foreach")


class _OnePass(Optimizer):
    """What both classes share; `convert` sets the attributes."""

    plain_class: type[Adam]
    folds = False  # whether nobody looks at gradients between clipping and step, so that `fold` may be used
    _anywhere: bool
    _copies: Mapping[Tensor, Tensor]
    _fresh: Callable[[Collection[Tensor]], None]
    _tables: Tables
    _counts: dict[Tensor, tuple[Tensor, int, int]]  # by parameter: its counter, the version that we left, the number
    _factor: Tensor | None

    def fold(self, factor: Tensor) -> None:
        """Multiply the gradients of the next step by a scalar on the device."""
        self._factor = factor if self._factor is None else self._factor * factor

    @property
    def folded(self) -> Tensor | None:
        """What the next step will multiply gradients by."""
        return self._factor

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and what they were to be multiplied by."""
        self._factor = None
        super().zero_grad(set_to_none)

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex = super()._init_group(group, *lists)  # type: ignore[misc]
        if "_tables" not in self.__dict__:  # a copy or a pickle of a converted optimizer
            return has_complex
        params, grads, means, squares = lists[:4]
        taken = [_plain(group) and self._takes(*row) for row in zip(params, grads, means, squares, strict=True)]
        self._step([row for row, ours in zip(zip(*_most(lists), strict=True), taken, strict=True) if ours], group)
        for values in _most(lists):
            values[:] = [value for value, ours in zip(values, taken, strict=True) if not ours]
        for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
            if grad.dtype != param.dtype:  # torch takes one dtype only
                grads[i] = grad = grad.to(param.dtype)
            if self._factor is not None:
                grads[i] = grad * self._factor.to(grad.device)
        if group is self.param_groups[-1]:
            self._factor = None
        return has_complex

    def _takes(self, param: Tensor, grad: Tensor, mean: Tensor, square: Tensor) -> bool:
        """Whether the kernel can do a parameter: fp32, dense, everything on one device in one layout."""
        if isinstance(param, DTensor) and not (isinstance(grad, DTensor) and grad.placements == param.placements):
            return False
        param, grad, mean, square = _local(param), _local(grad), _local(mean), _local(square)
        return (
            type(param) in (Tensor, nn.Parameter)
            and param.dtype == mean.dtype == square.dtype == torch.float32
            and param.stride() == mean.stride() == square.stride()
            and grad.dtype in (torch.float32, torch.bfloat16)
            and (param.is_cuda or self._anywhere)
            and param.device == grad.device == mean.device == square.device
            and _dense(param)
        )

    def _step(self, rows: list[tuple[Tensor, ...]], group: dict[str, Any]) -> None:
        """Step parameters with (parameter, gradient, mean, square, counter) in as few launches as there are kinds."""
        if not rows:
            return
        counts = self._count([row[0] for row in rows], [row[-1] for row in rows])
        kinds: dict[tuple[int, torch.device, torch.dtype, bool], Tensors] = {}
        for (param, grad, mean, square, _), count in zip(rows, counts, strict=True):
            local, copy = _local(param), self._copies.get(param)
            gradient = _local(grad)
            if gradient.stride() != local.stride():
                gradient = torch.empty_like(local, dtype=gradient.dtype).copy_(gradient)
            kind = kinds.setdefault((count, local.device, gradient.dtype, copy is not None), Tensors())
            kind.add(local, gradient, _local(mean), _local(square), copy)
        for (count, device, _, _), tensors in kinds.items():
            factor = None if self._factor is None else self._factor.to(device, torch.float32)
            adam_step(tensors, _settings(group, count, device), factor, self._tables)
            if tensors.copies:
                torch.autograd.graph.increment_version(tensors.copies)
        stepped = [row[0] for row in rows]
        torch.autograd.graph.increment_version(stepped)  # for autograd, and for whoever keeps copies of their own
        self._fresh(stepped)

    def _count(self, params: list[Tensor], steps: list[Tensor]) -> list[int]:
        """Move the counters on; the numbers that they then have."""
        known = [self._counts.get(param) for param in params]
        numbers: dict[int, int] = {}
        unknown = []
        for i, (step, entry) in enumerate(zip(steps, known, strict=True)):
            if entry is not None and entry[0] is step and entry[1] == step._version:
                numbers[i] = entry[2] + 1
            else:
                unknown.append(i)
        if unknown:  # one wait for all, at the first step
            read = torch.stack([steps[i].float() for i in unknown]).tolist()
            numbers.update((i, int(value) + 1) for i, value in zip(unknown, read, strict=True))
        torch._foreach_add_(steps, 1)
        for i, (param, step) in enumerate(zip(params, steps, strict=True)):
            self._counts[param] = step, step._version, numbers[i]
        return [numbers[i] for i in range(len(params))]


class OnePassAdam(_OnePass, Adam):
    """`torch.optim.Adam` in one pass."""

    plain_class = Adam


class OnePassAdamW(_OnePass, AdamW):
    """`torch.optim.AdamW` in one pass."""

    plain_class = AdamW


_CLASSES: dict[type[Optimizer], type[_OnePass]] = {Adam: OnePassAdam, AdamW: OnePassAdamW}


def hindrance(optimizer: Any, anywhere: bool) -> str:
    """Why an optimizer cannot be converted, '' if it can.

    Args:
        optimizer: anything.
        anywhere: also parameters that are on no GPU, by the reference.
    """
    if type(optimizer) not in (Adam, AdamW):
        return f"{type(optimizer).__name__} is neither torch.optim.AdamW nor torch.optim.Adam"
    options = sorted({name for group in optimizer.param_groups for name in _OTHER_KINDS if group.get(name)})
    if options:
        return f"{', '.join(f'{name}=True' for name in options)}"
    if not all(_plain(group) for group in optimizer.param_groups):
        return "betas are tensors"
    params = [_local(p) for group in optimizer.param_groups for p in group["params"]]
    if not all(p.dtype == torch.float32 for p in params):
        return "not all parameters are fp32"
    if not anywhere and not all(p.device.type == "cuda" for p in params):
        return "not all parameters are on a GPU"
    return ""


def convert(
    optimizer: Optimizer,
    copies: Mapping[Tensor, Tensor] | None = None,
    fresh: Callable[[Collection[Tensor]], None] | None = None,
    anywhere: bool = False,
) -> None:
    """Let an optimizer without a `hindrance` step in one pass from now on.

    Args:
        optimizer: converted in place.
        copies: bf16 copies of parameters, which the step writes, too.
        fresh: is told which parameters were stepped, behind each step; their copies are up to date then.
        anywhere: also where parameters are on no GPU, by the reference.
    """
    optimizer.__class__ = _CLASSES[type(optimizer)]
    assert isinstance(optimizer, _OnePass)
    optimizer._anywhere, optimizer._copies, optimizer._fresh = anywhere, copies or {}, fresh or (lambda _: None)
    optimizer._tables, optimizer._counts, optimizer._factor = Tables(), {}, None
    optimizer._patch_step_function()


def restore(optimizer: Any) -> None:
    """Give a converted optimizer its plain class back."""
    if isinstance(optimizer, _OnePass):
        for name in ("_anywhere", "_copies", "_fresh", "_tables", "_counts", "_factor", "folds"):
            optimizer.__dict__.pop(name, None)
        optimizer.__class__ = type(optimizer).plain_class  # type: ignore[assignment]


def one_pass(optimizer: Any) -> _OnePass | None:
    """The optimizer itself if it is converted."""
    return optimizer if isinstance(optimizer, _OnePass) else None


def _plain(group: Mapping[str, Any]) -> bool:
    """Looked at in each step, because a loaded checkpoint brings the options of its own run."""
    numbers = all(isinstance(beta, float) for beta in group["betas"])
    return numbers and not any(group.get(name) for name in _OTHER_KINDS)


def _settings(group: Mapping[str, Any], count: int, device: torch.device) -> Settings:
    lr = group["lr"]
    if isinstance(lr, Tensor) and (lr.device != device or device.type == "cpu"):
        lr = float(lr)
    decoupled = bool(group["decoupled_weight_decay"])
    return Settings(lr, group["betas"], group["eps"], float(group["weight_decay"]), decoupled, count)


def _most(lists: tuple[list[Tensor], ...]) -> tuple[list[Tensor], ...]:
    """All lists but the fifth, that of AMSGrad, which is empty here."""
    return *lists[:4], lists[5]


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _dense(tensor: Tensor) -> bool:
    others = torch.channels_last, torch.channels_last_3d
    return tensor.is_contiguous() or any(tensor.is_contiguous(memory_format=kind) for kind in others)
