"""`act(gate) * up` of SwiGLU and GeGLU, and both its gradients, each in one pass over the activations.

Problem: eager code writes act(gate), reads it again to multiply, and does twice as much in the backward; these are the widest
activations of a transformer. Idea: compute in fp32 in registers and round once. The backward recomputes the activation from
`gate`, which is kept anyway for the GEMM's own backward.

    silu(g) = g s(g), s the sigmoid;  gelu(g) = g Phi(g), by erf or by tanh;  d gate = dy * up * act'(gate);  d up = dy * act(gate)

Trade-off: an opaque operation; the compiler does the same fusion, and may fuse casts and FP8 scales into it.

N rows, F features.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fms.triton_backend import tl, triton, use_triton

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
BLOCK, WARPS = 2048, 8


def gated_product(gate: Tensor, up: Tensor, activation: str = "silu", *, backend: str = "auto") -> Tensor:
    """act(gate) * up, elementwise, computed in fp32 and rounded once.

    Args:
        gate: [..., F]; rows may be apart, as halves of a wider matrix are.
        up: the same shape and dtype.
        activation: 'silu' (SwiGLU), 'gelu' (GeGLU, exact) or 'gelu_tanh'.
        backend: 'triton', 'reference' (PyTorch) or 'auto' (Triton where it can run).

    Raises:
        ValueError: shapes, dtypes or an activation that do not fit.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype or not gate.ndim:
        raise ValueError(
            f"gate {gate.dtype} {tuple(gate.shape)} and up {up.dtype} {tuple(up.shape)} are not of one shape and dtype"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"{activation=} is not one of {', '.join(ACTIVATIONS)}")
    rows = (-1, gate.shape[-1]) if gate.numel() else (0, gate.shape[-1])
    y = torch.ops.lightning_fms.gated_product(gate.reshape(rows), up.reshape(rows), activation, backend)
    return y.reshape(gate.shape)


def gated_product_reference(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The same in plain PyTorch."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (_activate(gate.to(wide), activation) * up.to(wide)).to(gate.dtype)


def gated_product_backward_reference(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """(d gate, d up) in plain PyTorch."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    g, dy = gate.to(wide), grad.to(wide)
    if activation == "silu":
        slope = torch.ops.aten.silu_backward(dy * up.to(wide), g)
    else:
        kind = "tanh" if activation == "gelu_tanh" else "none"
        slope = torch.ops.aten.gelu_backward(dy * up.to(wide), g, approximate=kind)
    return slope.to(gate.dtype), (dy * _activate(g, activation)).to(gate.dtype)


def _activate(g: Tensor, activation: str) -> Tensor:
    return F.silu(g) if activation == "silu" else F.gelu(g, approximate="tanh" if activation == "gelu_tanh" else "none")


# ---- the Triton kernels -------------------------------------------------------------------------------------------


@triton.jit
def _activation(g, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """(act(g), act'(g)) in fp32."""
    if ACTIVATION == "silu":
        s = tl.sigmoid(g)
        value = g * s
        slope = s * (1.0 + g * (1.0 - s))
    elif ACTIVATION == "gelu":
        below = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
        value = g * below
        slope = below + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)
    else:
        inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        t = 2.0 * tl.sigmoid(2.0 * inner) - 1.0
        value = 0.5 * g * (1.0 + t)
        slope = 0.5 * (1.0 + t) + 0.5 * g * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 0.134145 * g * g)
    return value, slope


@triton.jit
def _gated_product_kernel(  # type: ignore[no-untyped-def]
    gate_ptr, up_ptr, y_ptr, features, gate_stride, up_stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < features
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    value, _ = _activation(gate, ACTIVATION)
    tl.store(y_ptr + row * features + column, (value * up).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gated_product_backward_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,
    gate_ptr,
    up_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    features,
    gate_stride,
    up_stride,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < features
    grad = tl.load(grad_ptr + row * features + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    value, slope = _activation(gate, ACTIVATION)
    at = row * features + column
    tl.store(grad_gate_ptr + at, (grad * up * slope).to(grad_gate_ptr.dtype.element_ty), mask=mask)
    tl.store(grad_up_ptr + at, (grad * value).to(grad_up_ptr.dtype.element_ty), mask=mask)


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _grid(rows: int, features: int) -> tuple[tuple[int, int], int]:
    block = min(BLOCK, triton.next_power_of_2(features))
    return (rows, triton.cdiv(features, block)), block


# ---- registration -------------------------------------------------------------------------------------------------


@torch.library.custom_op("lightning_fms::gated_product", mutates_args=())
def _forward_op(gate: Tensor, up: Tensor, activation: str, backend: str) -> Tensor:
    if not use_triton(backend, gate.device, gate.dtype):
        return gated_product_reference(gate, up, activation).contiguous()
    y = gate.new_empty(gate.shape)
    if gate.numel():
        gate, up = _unit_stride(gate), _unit_stride(up)
        grid, block = _grid(*gate.shape)
        strides = gate.stride(0), up.stride(0)
        _gated_product_kernel[grid](
            gate, up, y, gate.shape[1], *strides, ACTIVATION=activation, BLOCK=block, num_warps=WARPS
        )
    return y


@_forward_op.register_fake
def _forward_fake(gate: Tensor, up: Tensor, activation: str, backend: str) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("lightning_fms::gated_product_backward", mutates_args=())
def _backward_op(grad: Tensor, gate: Tensor, up: Tensor, activation: str, backend: str) -> tuple[Tensor, Tensor]:
    if not use_triton(backend, gate.device, gate.dtype):
        grad_gate, grad_up = gated_product_backward_reference(grad, gate, up, activation)
        return grad_gate.contiguous(), grad_up.contiguous()
    grad_gate, grad_up = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    if gate.numel():
        grad, gate, up = grad.contiguous(), _unit_stride(gate), _unit_stride(up)
        grid, block = _grid(*gate.shape)
        _gated_product_backward_kernel[grid](
            grad,
            gate,
            up,
            grad_gate,
            grad_up,
            gate.shape[1],
            gate.stride(0),
            up.stride(0),
            ACTIVATION=activation,
            BLOCK=block,
            num_warps=WARPS,
        )
    return grad_gate, grad_up


@_backward_op.register_fake
def _backward_fake(grad: Tensor, gate: Tensor, up: Tensor, activation: str, backend: str) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, *ctx.options = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.lightning_fms.gated_product_backward(grad, *ctx.saved_tensors, *ctx.options)
    return *grads, None, None


_forward_op.register_autograd(_backward, setup_context=_setup_context)

__all__ = ["gated_product", "gated_product_backward_reference", "gated_product_reference"]
