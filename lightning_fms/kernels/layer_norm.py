"""LayerNorm with fp32 statistics: one kernel forward, one backward, in the scheme of `rms_norm`.

The forward keeps a row's mean and 1/deviation (8 bytes). In the backward a fixed number of programs walk over the rows, each with
fp32 sums of its own for weight and bias, which one small reduction adds: nothing is atomic.

    n = (x - mean) r;  y = n w + b;  dx = r (w dy - mean(w dy) - n mean(w dy n));  dw = sum(dy n);  db = sum(dy)

N rows, D features.
"""

from typing import Any

import torch
from torch import Tensor

from lightning_fms.triton_backend import tl, triton, use_triton

MAX_FEATURES = 32768  # a row lives in one program's registers
WARPS = 8
PROGRAMS_PER_SM = 2


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *, backend: str = "auto"
) -> Tensor:
    """`F.layer_norm` over the last dimension, computed in fp32 and rounded once to `x`'s dtype.

    Args:
        x: [..., D], any strides, any number of rows.
        weight: [D] or None. Its gradient and the bias's are summed in fp32.
        bias: [D] or None; not without a weight.
        eps: added to the variance.
        backend: 'triton', 'reference' (PyTorch) or 'auto' (Triton where it can run and D <= 32768).

    Raises:
        ValueError: shapes that do not fit.
    """
    shapes = [None if p is None else tuple(p.shape) for p in (weight, bias)]
    if not x.ndim or any(s not in (None, tuple(x.shape[-1:])) for s in shapes) or (weight is None and bias is not None):
        raise ValueError(f"weight {shapes[0]} and bias {shapes[1]} do not fit x {tuple(x.shape)}")
    flat = x.reshape(-1, x.shape[-1]) if x.numel() else x.reshape(0, x.shape[-1])
    return torch.ops.lightning_fms.layer_norm(flat, weight, bias, float(eps), backend)[0].reshape(x.shape)


def layer_norm_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(y [N, D], mean [N], 1/deviation [N]) in plain PyTorch."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = wide.mean(-1)
    centred = wide - mean[:, None]
    inverse = torch.rsqrt(centred.square().mean(-1) + eps)
    y = centred * inverse[:, None]
    y = y if weight is None else y * weight.to(y.dtype)
    return (y if bias is None else y + bias.to(y.dtype)).to(x.dtype), mean, inverse


def layer_norm_backward_reference(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx [N, D], dw [D], db [D]) in plain PyTorch, the last two in the statistics' dtype."""
    normal = (x.to(mean.dtype) - mean[:, None]) * inverse[:, None]
    grad = grad.to(mean.dtype)
    scaled = grad if weight is None else grad * weight.to(mean.dtype)
    along = (scaled * normal).mean(-1, keepdim=True)
    grad_x = inverse[:, None] * (scaled - scaled.mean(-1, keepdim=True) - normal * along)
    return grad_x.to(x.dtype).contiguous(), (grad * normal).sum(0), grad.sum(0)


# ---- the Triton kernels -------------------------------------------------------------------------------------------


@triton.jit
def _layer_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    inverse_ptr,
    features,
    x_stride,
    EPS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < features
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / features
    centred = tl.where(mask, x - mean, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / features + EPS)
    tl.store(mean_ptr + row, mean)
    tl.store(inverse_ptr + row, inverse)
    y = centred * inverse
    if HAS_WEIGHT:
        y *= tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * features + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _layer_norm_backward_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    inverse_ptr,
    grad_x_ptr,
    partial_ptr,
    rows,
    features,
    x_stride,
    programs,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < features
    total_w = tl.zeros((BLOCK,), tl.float32)
    total_b = tl.zeros((BLOCK,), tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    for step in range(program, rows, programs):
        row = tl.cast(step, tl.int64)
        grad = tl.load(grad_ptr + row * features + column, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.load(inverse_ptr + row)
        normal = tl.where(mask, (x - tl.load(mean_ptr + row)) * inverse, 0.0)
        if HAS_WEIGHT:
            total_w += grad * normal
            total_b += grad
            grad *= weight
        along = tl.sum(grad * normal, 0) / features
        grad_x = inverse * (grad - tl.sum(grad, 0) / features - normal * along)
        tl.store(grad_x_ptr + row * features + column, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
    if HAS_WEIGHT:
        at = partial_ptr + program.to(tl.int64) * 2 * features + column
        tl.store(at, total_w, mask=mask)
        tl.store(at + features, total_b, mask=mask)


def _forward_triton(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    rows, features = x.shape
    y = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    mean, inverse = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    _layer_norm_kernel[(rows,)](
        x,
        weight,
        bias,
        y,
        mean,
        inverse,
        features,
        x.stride(0),
        EPS=eps,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        BLOCK=triton.next_power_of_2(features),
        num_warps=WARPS,
    )
    return y, mean, inverse


def _backward_triton(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows, features = x.shape
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2
    programs = min(sms * PROGRAMS_PER_SM, rows)
    grad_x = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    partial = torch.empty(programs if weight is not None else 0, 2, features, dtype=torch.float32, device=x.device)
    _layer_norm_backward_kernel[(programs,)](
        grad,
        x,
        weight,
        mean,
        inverse,
        grad_x,
        partial,
        rows,
        features,
        x.stride(0),
        programs,
        HAS_WEIGHT=weight is not None,
        BLOCK=triton.next_power_of_2(features),
        num_warps=WARPS,
    )
    grad_w, grad_b = partial.sum(0)  # copied below: outputs of an operation may not share memory
    return grad_x, grad_w.clone(), grad_b.clone()


# ---- registration -------------------------------------------------------------------------------------------------


def _runs_triton(x: Tensor, weight: Tensor | None, backend: str) -> bool:
    wide = weight is not None and weight.dtype == torch.float64
    return use_triton(backend, x.device, x.dtype) and 0 < x.shape[1] <= MAX_FEATURES and len(x) > 0 and not wide


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.custom_op("lightning_fms::layer_norm", mutates_args=())
def _forward_op(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    if not _runs_triton(x, weight, backend):
        y, mean, inverse = layer_norm_reference(x, weight, bias, eps)
        return y.contiguous(), mean, inverse
    w, b = (None if p is None else p.contiguous() for p in (weight, bias))
    return _forward_triton(_unit_stride(x), w, b, eps)


@_forward_op.register_fake
def _forward_fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    statistics = torch.promote_types(x.dtype, torch.float32)
    row = x.new_empty(x.shape[:1], dtype=statistics)
    return x.new_empty(x.shape), row, torch.empty_like(row)


@torch.library.custom_op("lightning_fms::layer_norm_backward", mutates_args=())
def _backward_op(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, inverse: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    if not _runs_triton(x, weight, backend):
        return layer_norm_backward_reference(grad, x, weight, mean, inverse)
    w = None if weight is None else weight.contiguous()
    return _backward_triton(grad.contiguous(), _unit_stride(x), w, mean, inverse)


@_backward_op.register_fake
def _backward_fake(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, inverse: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    column = x.new_empty(x.shape[1:], dtype=mean.dtype)
    return x.new_empty(x.shape), column, torch.empty_like(column)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _, ctx.backend = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, *output[1:])


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 5
    x, weight, mean, inverse = ctx.saved_tensors
    backward = torch.ops.lightning_fms.layer_norm_backward
    grad_x, grad_w, grad_b = backward(grad, x, weight, mean, inverse, ctx.backend)
    grad_w = None if weight is None else grad_w.to(weight.dtype)
    return grad_x, grad_w, None if ctx.bias_dtype is None else grad_b.to(ctx.bias_dtype), None, None


_forward_op.register_autograd(_backward, setup_context=_setup_context)

__all__ = ["layer_norm", "layer_norm_backward_reference", "layer_norm_reference"]
