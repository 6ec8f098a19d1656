"""Rotary position embedding (RoPE, arXiv:2104.09864): pairs of features turned by an angle that grows with the position.

Problem: eager code makes a turned copy, two products and a sum of queries and keys, each in fp32, to do six operations a pair.
Idea: one pass that reads a pair and its angle's cosine and sine, and writes the pair. The gradient is the turn backwards, so
the backward is the same kernel with the sines exchanged and negated, and keeps the tables only.

Pairs are (i, i + P) of the first 2 P features ('half-split': GPT-NeoX, Llama in transformers) or (2 i, 2 i + 1) ('interleaved':
the paper, Llama as published); features from 2 P on pass unchanged ('partial': GPT-NeoX, Phi). 'full' tables have a column for
each feature that is turned, as in transformers, whose two columns of a pair need not be equal. The tables get no gradient.

B batch, T tokens, H heads, E features a head, P pairs.
"""

from typing import Any

import torch
from torch import Tensor

from lightning_fms.triton_backend import tl, triton, use_triton

HEADS, WARPS = 8, 4  # heads a program turns: they share the tables


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, full: bool = False, backend: str = "auto"
) -> Tensor:
    """Turn the pairs of each head, in fp32, rounded once; never writes into `x`.

    Args:
        x: [B, T, H, E], any strides; a [B, H, T, E] tensor is passed as `x.transpose(1, 2)`, and the result has its layout.
        cos: [B or 1, T, P], 2 P <= E: one cosine for each pair; with `full` [B or 1, T, 2 P].
        sin: the same shape.
        interleaved: which two features are a pair, see above.
        full: a column for each feature; its order is that of the features.
        backend: 'triton', 'reference' (PyTorch) or 'auto' (Triton where it can run).

    Raises:
        ValueError: shapes that do not fit, or tables that want a gradient.
    """
    fits = x.ndim == 4 and cos.ndim == 3 and cos.shape == sin.shape and cos.shape[1] == x.shape[1]
    fits = fits and not (full and cos.shape[2] % 2)
    if not fits or cos.shape[0] not in (1, x.shape[0]) or (1 if full else 2) * cos.shape[2] > x.shape[3]:
        raise ValueError(
            f"tables {tuple(cos.shape)}, {tuple(sin.shape)} [B, T, P] do not fit x {tuple(x.shape)} [B, T, H, E]"
        )
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise ValueError("rotary tables that want a gradient: rotate them in PyTorch, or detach them")
    return torch.ops.lightning_fms.rotary(x, cos, sin, interleaved, full, False, backend)


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, full: bool, backwards: bool) -> Tensor:
    """The same in plain PyTorch."""
    wide = torch.promote_types(x.dtype, torch.float32)
    c, s = cos.to(wide)[:, :, None], sin.to(wide)[:, :, None]
    (c, c2), (s, s2) = (_columns(t, interleaved) if full else (t, t) for t in (c, s))
    s, s2 = (-s2, -s) if backwards else (s, s2)
    pairs = c.shape[3]
    turned, rest = x[..., : 2 * pairs].to(wide), x[..., 2 * pairs :]
    a, b = _columns(turned, interleaved)
    first, second = a * c - b * s, b * c2 + a * s2
    turned = torch.stack((first, second), dim=-1).flatten(-2) if interleaved else torch.cat((first, second), dim=-1)
    return torch.empty_like(x).copy_(torch.cat((turned.to(x.dtype), rest), dim=-1))


def _columns(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second of each pair."""
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return first, second


@triton.jit
def _rotary_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    y_ptr,
    cos_ptr,
    sin_ptr,
    tokens,
    heads,
    features,
    pairs,
    x_b,
    x_t,
    x_h,
    x_e,
    y_b,
    y_t,
    y_h,
    y_e,
    table_b,
    table_t,
    BACKWARDS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FULL: tl.constexpr,
    PARTIAL: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    place = tl.program_id(0)
    batch, token = (place // tokens).to(tl.int64), (place % tokens).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None].to(tl.int64)
    pair = tl.arange(0, PAIRS)
    if INTERLEAVED:
        first, second = 2 * pair[None, :], 2 * pair[None, :] + 1
    else:
        first, second = pair[None, :], pair[None, :] + pairs
    table, known = batch * table_b + token * table_t, (pair < pairs)[None, :]
    if FULL:
        cos = tl.load(cos_ptr + table + first, mask=known, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + table + first, mask=known, other=0.0).to(tl.float32)
        cos2 = tl.load(cos_ptr + table + second, mask=known, other=0.0).to(tl.float32)
        sin2 = tl.load(sin_ptr + table + second, mask=known, other=0.0).to(tl.float32)
    else:
        cos = tl.load(cos_ptr + table + pair[None, :], mask=known, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + table + pair[None, :], mask=known, other=0.0).to(tl.float32)
        cos2, sin2 = cos, sin
    if BACKWARDS:
        sin, sin2 = -sin2, -sin
    x_ptr += batch * x_b + token * x_t
    y_ptr += batch * y_b + token * y_t
    mask = (head < heads) & known
    a = tl.load(x_ptr + head * x_h + first * x_e, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + head * x_h + second * x_e, mask=mask, other=0.0).to(tl.float32)
    dtype = y_ptr.dtype.element_ty
    tl.store(y_ptr + head * y_h + first * y_e, (a * cos - b * sin).to(dtype), mask=mask)
    tl.store(y_ptr + head * y_h + second * y_e, (b * cos2 + a * sin2).to(dtype), mask=mask)
    if PARTIAL:
        rest = 2 * pairs + tl.arange(0, REST)[None, :]
        mask = (head < heads) & (rest < features)
        tl.store(y_ptr + head * y_h + rest * y_e, tl.load(x_ptr + head * x_h + rest * x_e, mask=mask), mask=mask)


@torch.library.custom_op("lightning_fms::rotary", mutates_args=())
def _rotary_op(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, full: bool, backwards: bool, backend: str
) -> Tensor:
    if not use_triton(backend, x.device, x.dtype):
        return rotary_reference(x, cos, sin, interleaved, full, backwards)
    y = torch.empty_like(x)
    (batch, tokens, heads, features), pairs = x.shape, cos.shape[2] // (2 if full else 1)
    if not x.numel():
        return y
    cos, sin = cos.contiguous(), sin.contiguous()
    block = min(HEADS, triton.next_power_of_2(heads))
    _rotary_kernel[(batch * tokens, triton.cdiv(heads, block))](
        x,
        y,
        cos,
        sin,
        tokens,
        heads,
        features,
        pairs,
        *x.stride(),
        *y.stride(),
        0 if cos.shape[0] == 1 else cos.stride(0),
        cos.stride(1),
        BACKWARDS=backwards,
        INTERLEAVED=interleaved,
        FULL=full,
        PARTIAL=2 * pairs < features,
        HEADS=block,
        PAIRS=triton.next_power_of_2(max(pairs, 1)),
        REST=triton.next_power_of_2(max(features - 2 * pairs, 1)),
        num_warps=WARPS,
    )
    return y


@_rotary_op.register_fake
def _rotary_fake(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, full: bool, backwards: bool, backend: str
) -> Tensor:
    return torch.empty_like(x)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.interleaved, ctx.full, ctx.backwards, ctx.backend = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    rotate = torch.ops.lightning_fms.rotary
    turned = rotate(grad, cos, sin, ctx.interleaved, ctx.full, not ctx.backwards, ctx.backend)
    return turned, None, None, None, None, None, None


_rotary_op.register_autograd(_backward, setup_context=_setup_context)

__all__ = ["rotary", "rotary_reference"]
