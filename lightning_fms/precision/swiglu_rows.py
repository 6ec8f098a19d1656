"""SwiGLU straight to FP8, and its gradient straight to FP8: the widest activations of a transformer never leave in bf16.

The product silu(gate) * up is wanted by one GEMM only, in FP8, and so are the gradients of gate and up. Each is computed in
fp32 where a row of it lies in registers, gets its scale there (see `quantize_rows`), and is written once, as bytes.

    s = silu(gate) * up;   d gate = ds * up * sigmoid(gate) * (1 + gate * (1 - sigmoid(gate))),   d up = ds * silu(gate)

Gate and up are the halves of one matrix, because one GEMM makes both; so are their gradients, under one scale a row.

N rows, F features of the product.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fms.precision.quantize_rows import (
    E4M3,
    fits_a_program,
    power_of_two,
    quantize_rows_reference,
)
from lightning_fms.triton_backend import tl, triton, use_triton

WARPS = 16

_LIBRARY = torch.library.Library("lightning_fms", "FRAGMENT")
_LIBRARY.define("swiglu_rows(Tensor gate_up) -> (Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag)
_LIBRARY.define(
    "swiglu_rows_backward(Tensor grad, Tensor gate_up) -> (Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag
)


def swiglu_rows(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """(values e4m3 [N, F], scales fp32 [N]) of silu(gate) * up, with gate_up [N, 2 F]."""
    return torch.ops.lightning_fms.swiglu_rows.default(gate_up)


def swiglu_rows_backward(grad: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """(values e4m3 [N, 2 F], scales fp32 [N]) of the gradient of gate_up [N, 2 F], with `grad` [N, F] of the product."""
    return torch.ops.lightning_fms.swiglu_rows_backward.default(grad, gate_up)


def swiglu_rows_reference(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """The same in plain PyTorch."""
    gate, up = gate_up.float().chunk(2, dim=1)
    return quantize_rows_reference(F.silu(gate) * up)


def swiglu_rows_backward_reference(grad: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """The same in plain PyTorch."""
    gate, up = gate_up.float().chunk(2, dim=1)
    sigmoid, grad = torch.sigmoid(gate), grad.float()
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return quantize_rows_reference(torch.cat((grad_gate, grad * gate * sigmoid), dim=1))


# ---- the Triton kernels -------------------------------------------------------------------------------------------


@triton.jit
def _swiglu_kernel(gate_up_ptr, value_ptr, scale_ptr, features, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < features
    gate_up_ptr += row * 2 * features
    gate = tl.load(gate_up_ptr + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + features + column, mask=mask, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    scale = power_of_two(tl.max(tl.abs(product), 0))
    tl.store(scale_ptr + row, scale)
    tl.store(value_ptr + row * features + column, (product * (1.0 / scale)).to(tl.float8e4nv), mask=mask)


@triton.jit
def _swiglu_backward_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, gate_up_ptr, value_ptr, scale_ptr, features, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < features
    gate_up_ptr += row * 2 * features
    value_ptr += row * 2 * features
    gate = tl.load(gate_up_ptr + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + features + column, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * features + column, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    grad_up = grad * gate * sigmoid
    grad_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    scale = power_of_two(tl.maximum(tl.max(tl.abs(grad_gate), 0), tl.max(tl.abs(grad_up), 0)))
    tl.store(scale_ptr + row, scale)
    inverse = 1.0 / scale
    tl.store(value_ptr + column, (grad_gate * inverse).to(tl.float8e4nv), mask=mask)
    tl.store(value_ptr + features + column, (grad_up * inverse).to(tl.float8e4nv), mask=mask)


def _warps(block: int) -> int:
    return min(WARPS, max(1, block // 1024))


def _swiglu(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    features = gate_up.shape[1] // 2
    if not (gate_up.numel() and fits_a_program(features) and use_triton("auto", gate_up.device, gate_up.dtype)):
        return swiglu_rows_reference(gate_up)
    gate_up = gate_up.contiguous()
    values, scales = _empty(gate_up)
    block = triton.next_power_of_2(features)
    _swiglu_kernel[(len(gate_up),)](gate_up, values, scales, features, BLOCK=block, num_warps=_warps(block))
    return values, scales


def _swiglu_backward(grad: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    features = gate_up.shape[1] // 2
    if not (gate_up.numel() and fits_a_program(features) and use_triton("auto", gate_up.device, gate_up.dtype)):
        return swiglu_rows_backward_reference(grad, gate_up)
    grad, gate_up = grad.contiguous(), gate_up.contiguous()
    values, scales = _empty_backward(grad, gate_up)
    block = triton.next_power_of_2(features)
    _swiglu_backward_kernel[(len(gate_up),)](
        grad, gate_up, values, scales, features, BLOCK=block, num_warps=_warps(block)
    )
    return values, scales


@torch.library.register_fake("lightning_fms::swiglu_rows", lib=_LIBRARY)
def _empty(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = gate_up.shape
    return gate_up.new_empty(rows, width // 2, dtype=E4M3), gate_up.new_empty(rows, dtype=torch.float32)


@torch.library.register_fake("lightning_fms::swiglu_rows_backward", lib=_LIBRARY)
def _empty_backward(grad: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    return gate_up.new_empty(gate_up.shape, dtype=E4M3), gate_up.new_empty(len(gate_up), dtype=torch.float32)


_LIBRARY.impl("swiglu_rows", _swiglu, "CompositeExplicitAutograd")
_LIBRARY.impl("swiglu_rows_backward", _swiglu_backward, "CompositeExplicitAutograd")
