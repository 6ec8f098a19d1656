"""RMSNorm with fp32 statistics: one kernel forward, one backward.

Problem: eager RMSNorm reads and writes the activations several times, and compilers fuse its backward, which needs a
reduction along the row and one across all rows, into kernels that run far below memory speed (16,384 x 4,096 bf16 on an
H200: 313 us eager, 416 us compiled, 157 us is what the bytes take).

Idea: the forward normalises a row that fits one program's registers and keeps only 1/rms (4 bytes a row). In the backward
a fixed number of programs walk over the rows; each writes the rows' input gradient and keeps its own fp32 sum of the weight
gradient, and one small reduction adds those sums, so nothing is atomic and the result does not depend on timing.

    y = x * r * w,  r = (mean(x^2) + eps)^-1/2;  dx = r * (w dy - x r * mean(w dy * x r)),  dw = sum(dy * x r)

Trade-off: an opaque operation, so the compiler cannot fuse a cast or an addition into it; whether it pays is measured.

N rows, D features.
"""

from typing import Any

import torch
from torch import Tensor

from lightning_fms.triton_backend import tl, triton, use_triton

MAX_FEATURES = 32768  # a row lives in one program's registers
TILE = 8192  # elements a program holds: narrow rows (head-wise norms) share a program
FORWARD_WARPS, BACKWARD_WARPS = 8, 8
PROGRAMS_PER_SM = 2  # of the backward; measured on an H200, with the tile


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """`x / sqrt(mean(x**2, -1) + eps) * weight` over the last dimension, computed in fp32 and rounded once.

    Args:
        x: [..., D], any strides, any number of rows (also none).
        weight: [D], or None for no scale. Its gradient is summed in fp32.
        eps: added to the mean square.
        out_dtype: dtype of the result; None: the type promotion of `x` and `weight`.
        backend: 'triton', 'reference' (PyTorch) or 'auto' (Triton where it can run and D <= 32768).

    Raises:
        ValueError: shapes that do not fit, an unknown backend.
    """
    if x.ndim == 0 or (weight is not None and weight.shape != x.shape[-1:]):
        raise ValueError(f"weight {None if weight is None else tuple(weight.shape)} does not fit x {tuple(x.shape)}")
    if out_dtype is None:
        out_dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    y = torch.ops.lightning_fms.rms_norm.default(x.reshape(-1, x.shape[-1]), weight, float(eps), out_dtype, backend)[0]
    return y.reshape(x.shape)


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(y [N, D], 1/rms [N]) in plain PyTorch; statistics in fp32 (fp64 for fp64)."""
    wide = x.to(_stats_dtype(x))
    inverse = torch.rsqrt(wide.square().mean(-1) + eps)
    y = wide * inverse[:, None]
    return (y if weight is None else y * weight.to(wide.dtype)).to(out_dtype), inverse


def rms_norm_backward_reference(
    grad: Tensor, x: Tensor, weight: Tensor | None, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """(dx [N, D], dw [D], or empty without a weight) in plain PyTorch."""
    wide = x.to(inverse.dtype) * inverse[:, None]
    grad = grad.to(inverse.dtype)
    scaled = grad if weight is None else grad * weight.to(inverse.dtype)
    grad_x = inverse[:, None] * (scaled - wide * (scaled * wide).mean(-1, keepdim=True))
    grad_w = x.new_empty(0) if weight is None else (grad * wide).sum(0).to(weight.dtype)
    return grad_x.to(x.dtype), grad_w


def _stats_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# ---- the Triton kernels -------------------------------------------------------------------------------------------


@triton.jit
def _forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    y_ptr,
    inverse_ptr,
    rows,
    features,
    x_stride,
    EPS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < features)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, 1) / features + EPS)
    tl.store(inverse_ptr + row, inverse, mask=row < rows)
    y = x * inverse[:, None]
    if HAS_WEIGHT:
        y *= tl.load(weight_ptr + column, mask=column < features, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + row[:, None] * features + column[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,
    x_ptr,
    weight_ptr,
    inverse_ptr,
    grad_x_ptr,
    partial_ptr,
    rows,
    features,
    x_stride,
    programs,
    HAS_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column, mask=column < features, other=0.0).to(tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
    for tile in range(program, tl.cdiv(rows, ROWS), programs):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & (column < features)[None, :]
        x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row[:, None] * features + column[None, :], mask=mask, other=0.0).to(tl.float32)
        inverse = tl.load(inverse_ptr + row, mask=row < rows, other=0.0)[:, None]
        x *= inverse
        if HAS_WEIGHT:
            total += tl.sum(grad * x, 0)
            grad *= weight[None, :]
        along = tl.sum(grad * x, 1) / features
        grad_x = inverse * (grad - x * along[:, None])
        at = grad_x_ptr + row[:, None] * features + column[None, :]
        tl.store(at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
    if HAS_WEIGHT:
        tl.store(partial_ptr + program.to(tl.int64) * features + column, total, mask=column < features)


def _tile(features: int) -> tuple[int, int]:
    block = triton.next_power_of_2(features)
    return max(TILE // block, 1), block


def _forward_triton(x: Tensor, weight: Tensor | None, eps: float, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, features = x.shape
    y = torch.empty(rows, features, dtype=out_dtype, device=x.device)
    inverse = torch.empty(rows, dtype=torch.float32, device=x.device)
    tile, block = _tile(features)
    _forward_kernel[(triton.cdiv(rows, tile),)](
        x,
        weight,
        y,
        inverse,
        rows,
        features,
        x.stride(0),
        EPS=eps,
        HAS_WEIGHT=weight is not None,
        ROWS=tile,
        BLOCK=block,
        num_warps=FORWARD_WARPS,
    )
    return y, inverse


def _backward_triton(grad: Tensor, x: Tensor, weight: Tensor | None, inverse: Tensor) -> tuple[Tensor, Tensor]:
    rows, features = x.shape
    tile, block = _tile(features)
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2
    programs = min(sms * PROGRAMS_PER_SM, triton.cdiv(rows, tile))
    grad_x = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    partial = torch.empty(programs if weight is not None else 0, features, dtype=torch.float32, device=x.device)
    _backward_kernel[(programs,)](
        grad,
        x,
        weight,
        inverse,
        grad_x,
        partial,
        rows,
        features,
        x.stride(0),
        programs,
        HAS_WEIGHT=weight is not None,
        ROWS=tile,
        BLOCK=block,
        num_warps=BACKWARD_WARPS,
    )
    return grad_x, x.new_empty(0) if weight is None else partial.sum(0).to(weight.dtype)


# ---- registration -------------------------------------------------------------------------------------------------


def _runs_triton(x: Tensor, weight: Tensor | None, backend: str) -> bool:
    fits = 0 < x.shape[1] <= MAX_FEATURES and x.shape[0] > 0
    wide = weight is not None and weight.dtype == torch.float64
    return use_triton(backend, x.device, x.dtype) and fits and not wide


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


# Registered by hand: `torch.library.custom_op` goes through more layers of Python in each call (docs/kernels.md).
_LIBRARY = torch.library.Library("lightning_fms", "FRAGMENT")
_LIBRARY.define(
    "rms_norm(Tensor x, Tensor? weight, float eps, ScalarType out_dtype, str backend) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.define(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor? weight, Tensor inverse, str backend) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


def _forward_op(
    x: Tensor, weight: Tensor | None, eps: float, out_dtype: torch.dtype, backend: str
) -> tuple[Tensor, Tensor]:
    if _runs_triton(x, weight, backend):
        return _forward_triton(_unit_stride(x), None if weight is None else weight.contiguous(), eps, out_dtype)
    return rms_norm_reference(x, weight, eps, out_dtype)


@torch.library.register_fake("lightning_fms::rms_norm", lib=_LIBRARY)
def _forward_fake(
    x: Tensor, weight: Tensor | None, eps: float, out_dtype: torch.dtype, backend: str
) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(x.shape, dtype=out_dtype, device=x.device),
        torch.empty(x.shape[:1], dtype=_stats_dtype(x), device=x.device),
    )


def _backward_op(
    grad: Tensor, x: Tensor, weight: Tensor | None, inverse: Tensor, backend: str
) -> tuple[Tensor, Tensor]:
    if _runs_triton(x, weight, backend):
        weight = None if weight is None else weight.contiguous()
        return _backward_triton(grad.contiguous(), _unit_stride(x), weight, inverse)
    grad_x, grad_w = rms_norm_backward_reference(grad, x, weight, inverse)
    return grad_x.contiguous(), grad_w


@torch.library.register_fake("lightning_fms::rms_norm_backward", lib=_LIBRARY)
def _backward_fake(
    grad: Tensor, x: Tensor, weight: Tensor | None, inverse: Tensor, backend: str
) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        x.new_empty(0) if weight is None else torch.empty(weight.shape, dtype=weight.dtype, device=x.device),
    )


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        y, inverse = _below_autograd(*inputs)
        x, weight, _, _, ctx.backend = inputs
        ctx.mark_non_differentiable(inverse)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, inverse)
        return y, inverse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 5
        x, weight, inverse = ctx.saved_tensors
        grad_x, grad_w = torch.ops.lightning_fms.rms_norm_backward.default(grad, x, weight, inverse, ctx.backend)
        return grad_x, None if weight is None else grad_w, None, None, None


def _below_autograd(*inputs: Any) -> tuple[Tensor, Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.lightning_fms.rms_norm.default(*inputs)


def _with_autograd(*inputs: Any) -> tuple[Tensor, Tensor]:
    x, weight = inputs[:2]
    needed = torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad))
    return _RMSNorm.apply(*inputs) if needed else _below_autograd(*inputs)


_LIBRARY.impl("rms_norm", _forward_op, "CompositeExplicitAutograd")
_LIBRARY.impl("rms_norm", _with_autograd, "Autograd")
_LIBRARY.impl("rms_norm_backward", _backward_op, "CompositeExplicitAutograd")
