"""Linear layers whose operands are in FP8 with one scale a row, forward and backward.

Problem: a linear layer is three GEMMs, and each sums over another dimension. Row scales are exact and free where they can be
taken out of the sum, which for the output and the gradient of the input they can, but the gradient of the weight sums over
rows. Scaling tensors as a whole avoids that and costs a pass over each for its largest value.

Idea: each tensor is rounded ONCE, by rows, with scales that are powers of two (`quantize_rows`). With x = s x8 and g = r g8,

    output             y = x W^T   = s (x8 . w8) v                          v: scales of W's rows, one an output feature
    gradient of x      g W         = r (g8 . shifted(w8, v / max v)) max v
    gradient of W      g^T x       = max(r s) (shifted(g8, r s / max(r s)) . x8)

`shifted` multiplies rows by powers of two at most 1, which moves exponents and rounds nothing that matters, and is done while
the bytes are transposed, as the tensor cores want them (`transpose_rows`). So no pass looks for a largest value, nothing is
rounded twice, and a gradient's scale is current, not one of an earlier step.

What is kept for the backward pass is x8, a byte a value instead of two. All sums are in fp32; GEMMs return bf16.

N rows (tokens), D features in, O features out, F features of a gated MLP.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fms.precision.quantize_rows import E4M3, quantize_rows, quantize_rows_into
from lightning_fms.precision.swiglu_rows import swiglu_rows, swiglu_rows_backward
from lightning_fms.precision.transpose_rows import transpose_rows, transpose_rows_into


class QuantizedWeight(NamedTuple):
    """One weight, or several on top of each other, in both layouts.

    Attributes:
        rows: e4m3 [O, D]; `row_scales`: fp32 [O].
        columns: e4m3 [D, O], the same values under one scale; `column_scales`: fp32 [D], that scale over and over.
    """

    rows: Tensor
    row_scales: Tensor
    columns: Tensor
    column_scales: Tensor


def empty_weight(weights: list[Tensor]) -> QuantizedWeight:
    """Room for `weights`, each [O_i, D]."""
    rows, features = sum(len(w) for w in weights), weights[0].shape[1]
    new = weights[0].new_empty
    return QuantizedWeight(
        new(rows, features, dtype=E4M3),
        new(rows, dtype=torch.float32),
        new(features, rows, dtype=E4M3),
        new(features, dtype=torch.float32),
    )


@torch.no_grad()
def quantize_weight(weights: list[Tensor], into: QuantizedWeight) -> None:
    """Round `weights` into tensors that exist."""
    _fill_rows(weights, into.rows, into.row_scales)
    _fill_columns(into.rows, into.row_scales, into.columns, into.column_scales)


def _fill_rows(weights: list[Tensor], rows: Tensor, scales: Tensor) -> None:
    sizes = [len(w) for w in weights]
    for weight, part, part_scales in zip(weights, rows.split(sizes), scales.split(sizes), strict=True):
        quantize_rows_into(weight, part, part_scales)


def _fill_columns(rows: Tensor, row_scales: Tensor, columns: Tensor, column_scales: Tensor) -> None:
    largest = row_scales.amax()
    transpose_rows_into(rows, row_scales / largest, columns)
    column_scales.copy_(largest.expand_as(column_scales))


# A weight that FSDP gathers is rounded where it is used. Forward and backward have an operation each: the compiler would
# merge two equal ones and keep the result in between, which is the memory that sharding is to save.
_LIBRARY = torch.library.Library("lightning_fms", "FRAGMENT")
_LIBRARY.define("quantize_weight_rows(Tensor[] weights) -> (Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag)
_LIBRARY.define("quantize_weight_columns(Tensor[] weights) -> (Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag)


@torch.library.register_fake("lightning_fms::quantize_weight_rows", lib=_LIBRARY)
def _empty_rows(weights: list[Tensor]) -> tuple[Tensor, Tensor]:
    return empty_weight(weights)[:2]


@torch.library.register_fake("lightning_fms::quantize_weight_columns", lib=_LIBRARY)
def _empty_columns(weights: list[Tensor]) -> tuple[Tensor, Tensor]:
    return empty_weight(weights)[2:]


def _quantize_weight_rows(weights: list[Tensor]) -> tuple[Tensor, Tensor]:
    rows, scales = _empty_rows(weights)
    _fill_rows(weights, rows, scales)
    return rows, scales


def _quantize_weight_columns(weights: list[Tensor]) -> tuple[Tensor, Tensor]:
    columns, scales = _empty_columns(weights)
    _fill_columns(*_quantize_weight_rows(weights), columns, scales)
    return columns, scales


_LIBRARY.impl("quantize_weight_rows", _quantize_weight_rows, "CompositeExplicitAutograd")
_LIBRARY.impl("quantize_weight_columns", _quantize_weight_columns, "CompositeExplicitAutograd")


# ---- products -----------------------------------------------------------------------------------------------------


def product(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, emulate: bool, fast: bool = False) -> Tensor:
    """bf16 [N, M] = (a_scales a) (b_scales b)^T with a [N, K], b [M, K] in e4m3 and a scale a row of each.

    Args:
        a, a_scales, b, b_scales: operands.
        emulate: multiply in fp32.
        fast: add up partial sums in the tensor cores' own precision; a rounding error that activations bear.
    """
    if emulate:
        return ((a.float() * a_scales[:, None]) @ (b.float() * b_scales[:, None]).t()).bfloat16()
    return torch._scaled_mm(a, b.t(), a_scales[:, None], b_scales[None], out_dtype=torch.bfloat16, use_fast_accum=fast)


def weight_gradient(
    grad: Tensor, grad_scales: Tensor, x: Tensor, x_scales: Tensor, emulate: bool, fast: bool = False
) -> Tensor:
    """bf16 [O, D], the sum over rows of (grad_scales grad) (x_scales x); grad [N, O], x [N, D] in e4m3."""
    scales = grad_scales * x_scales
    largest = scales.amax()
    a, b = transpose_rows(grad, scales / largest), transpose_rows(x)
    if emulate:
        return (a.float() @ b.float().t() * largest).bfloat16()
    one = torch.ones((), dtype=torch.float32, device=grad.device)
    return torch._scaled_mm(a, b.t(), largest, one, out_dtype=torch.bfloat16, use_fast_accum=fast)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, quantized: QuantizedWeight | None, emulate: bool, fast: bool
    ) -> Tensor:
        x8, scales = quantize_rows(x)
        if quantized is None:
            rows, row_scales = torch.ops.lightning_fms.quantize_weight_rows([weight])
            ctx.save_for_backward(x8, scales, weight)
        else:
            rows, row_scales = quantized.rows, quantized.row_scales
            ctx.save_for_backward(x8, scales, quantized.columns, quantized.column_scales)
        ctx.emulate, ctx.fast = emulate, fast
        return product(x8, scales, rows, row_scales, emulate, fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x8, scales, *weight = ctx.saved_tensors
        grad8, grad_scales = quantize_rows(grad)
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            columns, column_scales = (
                weight if len(weight) == 2 else torch.ops.lightning_fms.quantize_weight_columns(weight)
            )
            grad_x = product(grad8, grad_scales, columns, column_scales, ctx.emulate, ctx.fast)
        if ctx.needs_input_grad[1]:
            grad_w = weight_gradient(grad8, grad_scales, x8, scales, ctx.emulate, ctx.fast)
        return grad_x, grad_w, None, None, None


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        gate_up_quantized: QuantizedWeight | None,
        down_quantized: QuantizedWeight | None,
        emulate: bool,
        fast: bool,
    ) -> Tensor:
        x8, scales = quantize_rows(x)
        if gate_up_quantized is None or down_quantized is None:
            wide, wide_scales = torch.ops.lightning_fms.quantize_weight_rows([gate, up])
            narrow, narrow_scales = torch.ops.lightning_fms.quantize_weight_rows([down])
            kept = [gate, up, down]
        else:
            wide, wide_scales, narrow, narrow_scales = *gate_up_quantized[:2], *down_quantized[:2]
            kept = [*gate_up_quantized[2:], *down_quantized[2:]]
        gate_up = product(x8, scales, wide, wide_scales, emulate, fast=True)
        hidden8, hidden_scales = swiglu_rows(gate_up)
        ctx.save_for_backward(x8, scales, gate_up, hidden8, hidden_scales, *kept)
        ctx.emulate, ctx.fast = emulate, fast
        return product(hidden8, hidden_scales, narrow, narrow_scales, emulate, fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x8, scales, gate_up, hidden8, hidden_scales, *kept = ctx.saved_tensors
        if len(kept) == 3:
            quantize = torch.ops.lightning_fms.quantize_weight_columns
            kept = [*quantize(kept[:2]), *quantize(kept[2:])]
        wide, wide_scales, narrow, narrow_scales = kept
        grad8, grad_scales = quantize_rows(grad)
        grad_hidden = product(grad8, grad_scales, narrow, narrow_scales, ctx.emulate, ctx.fast)
        grad_down = weight_gradient(grad8, grad_scales, hidden8, hidden_scales, ctx.emulate, ctx.fast)
        grad8, grad_scales = swiglu_rows_backward(grad_hidden, gate_up)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = product(grad8, grad_scales, wide, wide_scales, ctx.emulate, ctx.fast)
        grad_gate, grad_up = weight_gradient(grad8, grad_scales, x8, scales, ctx.emulate, ctx.fast).chunk(2)
        return grad_x, grad_gate, grad_up, grad_down, None, None, None, None


def linear(
    x: Tensor,
    weight: Tensor,
    quantized: QuantizedWeight | None = None,
    emulate: bool = False,
    exact_gradients: bool = False,
) -> Tensor:
    """x W^T in FP8: bf16 [N, O] from `x` [N, D] and `weight` [O, D].

    Args:
        x: N must be a multiple of 16 if the weight's gradient is wanted.
        weight: its gradient comes out in bf16.
        quantized: `weight`, rounded before; None rounds it here.
        emulate: round to FP8 and multiply in fp32.
        exact_gradients: add up both gradients in fp32, and not in the tensor cores' own precision as the output is.
    """
    return _Linear.apply(x, weight, quantized, emulate, not exact_gradients)


def gated_mlp(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    gate_up_quantized: QuantizedWeight | None = None,
    down_quantized: QuantizedWeight | None = None,
    emulate: bool = False,
    exact_gradients: bool = False,
) -> Tensor:
    """(silu(x gate^T) * (x up^T)) down^T in FP8: bf16 [N, D] from `x` [N, D], `gate` and `up` [F, D], `down` [D, F].

    `gate_up_quantized` holds gate above up; all else as in `linear`.
    """
    return _GatedMLP.apply(x, gate, up, down, gate_up_quantized, down_quantized, emulate, not exact_gradients)
