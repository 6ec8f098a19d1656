"""Logits that are not computed until somebody looks at them, so that an unchanged loss line runs fused.

Problem: users write `logits = head(hidden)` and later `F.cross_entropy(logits.view(-1, V), y.view(-1))`. A fused loss needs
hidden and weight at that second line, which only has the logits.

Idea: the head returns a tensor subclass with the logits' shape, dtype and device that holds (hidden, weight, bias). Views
that keep the vocabulary whole act on `hidden` and stay deferred; `F.cross_entropy` runs the fused operation; any other
function gets real logits, computed once and shared by all views, and goes on as if nothing had happened. The object is the
output of an autograd function, so gradients that reach it on any other way (a custom `autograd.Function`) are right too.

Trade-off: hidden and weight must still be what they were when the head ran. If they were changed or freed (an optimizer
step, FSDP's reshard) before anyone looked, that is an error, never wrong numbers.

N rows, D model, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_fms.kernels.head_call import Source
from lightning_fms.kernels.linear_cross_entropy import linear_cross_entropy
from lightning_fms.kernels.tensor_functions import METADATA, may_write, watches_gradient

Replay = Callable[[Tensor], Tensor]


class _Project(torch.autograd.Function):
    """Autograd node of a deferred tensor, for gradients that arrive at the object itself."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, make: Callable[[], Tensor]) -> Tensor:
        result = make()
        ctx.save_for_backward(hidden, weight)
        ctx.class_dim, ctx.bias_dtype = result._class_dim, None if bias is None else bias.dtype  # type: ignore[attr-defined]
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        grad = grad.movedim(ctx.class_dim, -1)
        rows = grad.reshape(-1, weight.shape[0])
        grad_h = grad_w = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_h = (rows.to(weight.dtype) @ weight).view(hidden.shape).to(hidden.dtype)
        if ctx.needs_input_grad[1]:
            grad_w = (rows.to(hidden.dtype).t() @ hidden.reshape(-1, hidden.shape[-1])).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_b = rows.sum(0).to(ctx.bias_dtype)
        return grad_h, grad_w, grad_b, None


class DeferredLogits(Tensor):
    """What `head(hidden)` returns: a [..., V] tensor of real logits to everyone, computed only when looked at.

    `materialisations` (class attribute) counts how often real logits were computed; tests assert that it stays put.
    """

    materialisations = 0

    _source: Source
    _hidden: Tensor  # rows of this view, [*row dims, D]
    _class_dim: int  # where the vocabulary is
    _meta: Tensor  # shape and strides the real logits would have
    _root: "DeferredLogits | None"  # what the head returned, where this is a view of it
    _replay: tuple[Replay, ...]  # from the root's real logits to this view
    _detached: bool
    _real: Tensor | None

    @staticmethod
    def wrap(hidden: Tensor, weight: Tensor, bias: Tensor | None = None, **loss_options: Any) -> "DeferredLogits":
        """Deferred `F.linear(hidden, weight, bias)`; `loss_options` go to `linear_cross_entropy`."""
        source = Source(hidden, weight, bias, loss_options)
        shape = (*hidden.shape[:-1], weight.shape[0])
        meta = torch.empty(shape, dtype=source.dtype, device="meta")
        return _make(source, hidden, len(shape) - 1, meta, None, ())

    def materialise(self) -> Tensor:
        """The real logits of this view (computed at the first call)."""
        if self._real is None:
            root = self._root
            if root is None or (root._real is None and root._rows() != self._rows()):
                self._real = self._computed()
            else:
                with self._source.modes(self._detached):
                    self._real = _replayed(root.materialise(), self._replay)
        return self._real

    def _computed(self) -> Tensor:
        DeferredLogits.materialisations += 1
        real = self._source.project(self._hidden, self._detached)
        with self._source.modes(self._detached):
            return real.movedim(-1, self._class_dim).to(self.dtype)

    def _rows(self) -> int:
        return self._hidden.shape[:-1].numel()

    def _is_true(self) -> bool:
        """Whether the deferred form still is what the logits are (nobody wrote into the real ones or hooked them)."""
        return not self._source.changed

    @classmethod
    @torch._dynamo.disable  # a compiled loss function breaks its graph here and runs fused, instead of tracing this
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        handler = _HANDLERS.get(func)
        if handler is not None and args and isinstance(args[0], DeferredLogits) and args[0]._is_true():
            result = handler(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if may_write(func, kwargs) or watches_gradient(func):
            tree_map(_give_up, (args, kwargs))
        args, kwargs = tree_map(_to_real, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Reached where __torch_function__ is off: inside another subclass, or from C++ behind autograd.
        args, kwargs = tree_map(lambda x: x.materialise().detach() if isinstance(x, cls) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


def _make(
    source: Source,
    hidden: Tensor,
    class_dim: int,
    meta: Tensor,
    root: DeferredLogits | None,
    replay: tuple[Replay, ...],
    detached: bool = False,
) -> DeferredLogits:
    def make() -> Tensor:
        result = Tensor._make_wrapper_subclass(
            DeferredLogits, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=source.weight.device
        )
        result._source, result._hidden, result._class_dim, result._meta = source, hidden, class_dim, meta
        result._detached = detached
        result._root, result._replay, result._real = root, replay, None
        return result

    with source.modes(detached):
        result = _Project.apply(hidden, source.weight, source.bias, make)
    source.views.add(result)
    return result


def _replayed(real: Tensor, steps: tuple[Replay, ...]) -> Tensor:
    for step in steps:
        real = step(real)
    return real


def _to_real(value: Any) -> Any:
    return value.materialise() if isinstance(value, DeferredLogits) else value


def _give_up(value: Any) -> Any:
    """Before a write or a hook: fix every view as it is now, and let the real logits be the truth from here on."""
    if isinstance(value, DeferredLogits) and value._is_true():
        (value if value._root is None else value._root).materialise()
        for view in value._source.views:
            view.materialise()
        value._source.changed = True
    return value


# ---- what stays deferred ------------------------------------------------------------------------------------------


def _derived(x: DeferredLogits, hidden: Tensor, class_dim: int, meta: Tensor, step: Replay) -> DeferredLogits:
    root = x if x._root is None else x._root
    detached = x._detached or not torch.is_grad_enabled()  # a view made under `no_grad` leads no gradient back
    return _make(x._source, hidden, class_dim, meta, root, (*x._replay, step), detached)


def _reshaped(func: Any, x: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    """view, reshape, flatten, unflatten, squeeze, unsqueeze: regroup the rows, the vocabulary stays last."""
    if x._class_dim != x.ndim - 1 or any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values())):
        return NotImplemented
    meta = func(x._meta, *args, **kwargs)
    rows = x._hidden.shape[:-1].numel()
    if not meta.ndim or meta.shape[-1] != x.shape[-1] or meta.shape[:-1].numel() != rows:
        return NotImplemented
    with x._source.modes():
        hidden = x._hidden.reshape(*meta.shape[:-1], x._hidden.shape[-1])
    return _derived(x, hidden, meta.ndim - 1, meta, lambda real: func(real, *args, **kwargs))


def _contiguous(func: Any, x: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    if x._meta.is_contiguous() and not args and not kwargs:
        return x
    meta = func(x._meta, *args, **kwargs)
    return _derived(x, x._hidden, x._class_dim, meta, lambda real: func(real, *args, **kwargs))


def _float(func: Any, x: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    """`.float()`, `.to(torch.float32)` and `.to` of what it already is. Narrower or wider dtypes round: real logits."""
    if func is Tensor.to:
        wanted = [*args, *kwargs.values()]
        if len(wanted) != 1 or set(kwargs) - {"dtype", "device"}:
            return NotImplemented
        (dtype,) = wanted
        if isinstance(dtype, torch.device | str):
            device = torch.device(dtype)
            same = device.type == x.device.type and device.index in (None, x.device.index)
            return x if same else NotImplemented
        if not isinstance(dtype, torch.dtype) or dtype not in (torch.float32, x.dtype):
            return NotImplemented
    elif args or kwargs:
        return NotImplemented
    else:
        dtype = torch.float32
    if dtype == x.dtype:
        return x
    if x.dtype == torch.float64:
        return NotImplemented
    return _derived(x, x._hidden, x._class_dim, x._meta.to(dtype), lambda real: real.to(dtype))


def _indexed(func: Any, x: DeferredLogits, index: Any) -> Any:
    """Slices and integers over the rows (`[..., :-1, :]`, `[:, -1]`) with the whole vocabulary."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(p is Ellipsis or p is None or isinstance(p, slice) or type(p) is int for p in parts):
        return NotImplemented
    if Ellipsis not in parts:
        parts.append(Ellipsis)
    at, named = parts.index(Ellipsis), sum(p is not None and p is not Ellipsis for p in parts)
    parts[at : at + 1] = [slice(None)] * (x.ndim - named)
    places = [i for i, part in enumerate(parts) if part is not None]  # of x's dimensions among the parts
    if parts.count(Ellipsis) or len(places) != x.ndim or parts[places[x._class_dim]] != slice(None):
        return NotImplemented
    meta = func(x._meta, index)
    place = places[x._class_dim]
    with x._source.modes():
        hidden = x._hidden[(*parts[:place], *parts[place + 1 :])]
    class_dim = sum(type(part) is not int for part in parts[:place])
    return _derived(x, hidden, class_dim, meta, lambda real: func(real, index))


def _permuted(func: Any, x: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    """transpose, permute, movedim, mT: the vocabulary's place is tracked, the rows keep `hidden`'s layout."""
    meta = func(x._meta, *args, **kwargs)
    # Where each dimension went, read off a tensor whose sizes are the dimensions' numbers.
    order = [
        int(size) - 1 for size in func(torch.empty(tuple(range(1, x.ndim + 1)), device="meta"), *args, **kwargs).shape
    ]
    old_rows = [dim for dim in range(x.ndim) if dim != x._class_dim]
    with x._source.modes():
        hidden = x._hidden.permute(*(old_rows.index(dim) for dim in order if dim != x._class_dim), x.ndim - 1)
    return _derived(x, hidden, order.index(x._class_dim), meta, lambda real: func(real, *args, **kwargs))


def _detached(func: Any, x: DeferredLogits) -> DeferredLogits:
    root = x if x._root is None else x._root
    steps = (*x._replay, lambda real: real.detach())
    return _make(x._source, x._hidden.detach(), x._class_dim, x._meta, root, steps, detached=True)


def _cross_entropy(
    func: Any,
    x: DeferredLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    fits = isinstance(target, Tensor) and target.dtype == torch.int64 and target.device == x.device
    plain = weight is None and size_average is None and reduce is None and x.dtype != torch.float16
    if not (fits and plain) or x._class_dim != min(1, x.ndim - 1) or target.shape != x._hidden.shape[:-1]:
        return NotImplemented
    source = x._source
    source.check()
    grad = torch.is_grad_enabled() and source.grad and not x._detached
    with torch.autocast(x.device.type, enabled=False), torch.set_grad_enabled(grad):
        loss = linear_cross_entropy(
            x._hidden.to(source.dtype),
            source.weight,
            target,
            source.bias,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            **source.loss_options,
        )
    autocast = torch.is_autocast_enabled(x.device.type)  # cross_entropy is on autocast's fp32 list
    return loss if autocast else loss.to(x.dtype)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    Tensor.contiguous: _contiguous,
    Tensor.float: _float,
    Tensor.to: _float,
    Tensor.detach: _detached,
    torch.detach: _detached,
    Tensor.__getitem__: _indexed,
    Tensor.mT.__get__: _permuted,  # type: ignore[attr-defined]
}
for _name in ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"):
    _HANDLERS.update(dict.fromkeys((getattr(Tensor, _name), getattr(torch, _name, None)), _reshaped))
for _name in ("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims"):
    _HANDLERS.update(dict.fromkeys((getattr(Tensor, _name), getattr(torch, _name)), _permuted))
_HANDLERS.pop(None, None)

__all__ = ["DeferredLogits"]
