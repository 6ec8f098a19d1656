"""The other layout of a matrix in FP8: transposed, and its rows' scales replaced by one.

Problem: Hopper's FP8 tensor cores read both operands along the dimension that is summed over. The output of a linear layer sums
over features, the gradient of its weight over tokens, so the same values are needed in both layouts. And a scale of each
row, which leaves the sum over features as a factor, stands inside the sum over tokens.

Idea: rows have scales that are powers of two (`quantize_rows`). Multiplying a row by a power of two shifts the exponents of its
values and rounds nothing, unless they fall out of e4m3's range at the lower end, where they are 2^-17 of the largest of all
rows. So the bytes are transposed (one read, one write), and shifted on the way, instead of rounding the tensor a second time.

    out[d, n] = values[n, d] * factor[n]

N rows, D features.
"""

import torch
from torch import Tensor

from lightning_fms.triton_backend import tl, triton, use_triton

TILE_ROWS, TILE_FEATURES, WARPS = 128, 128, 8

_LIBRARY = torch.library.Library("lightning_fms", "FRAGMENT")
_LIBRARY.define("transpose_rows(Tensor values, Tensor? factor) -> Tensor", tags=torch.Tag.pt2_compliant_tag)


def transpose_rows(values: Tensor, factor: Tensor | None = None) -> Tensor:
    """[D, N] from `values` e4m3 [N, D]; row n multiplied by `factor[n]`, fp32 powers of two, where given."""
    return torch.ops.lightning_fms.transpose_rows.default(values, factor)


def transpose_rows_reference(values: Tensor, factor: Tensor | None) -> Tensor:
    """The same in plain PyTorch."""
    if factor is None:
        return values.view(torch.uint8).t().contiguous().view(values.dtype)
    return (values.float() * factor[:, None]).t().contiguous().to(values.dtype)


# ---- the Triton kernel --------------------------------------------------------------------------------------------


@triton.jit
def _transpose_kernel(  # type: ignore[no-untyped-def]
    value_ptr,
    factor_ptr,
    out_ptr,
    rows,
    features,
    SHIFT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_FEATURES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1).to(tl.int64) * TILE_FEATURES + tl.arange(0, TILE_FEATURES)
    inside = (row < rows)[:, None] & (column < features)[None, :]
    x = tl.load(value_ptr + row[:, None] * features + column[None, :], mask=inside, other=0.0)
    if SHIFT:
        factor = tl.load(factor_ptr + row, mask=row < rows, other=0.0)
        x = (x.to(tl.float32) * factor[:, None]).to(tl.float8e4nv)
    tl.store(out_ptr + column[:, None] * rows + row[None, :], tl.trans(x), mask=tl.trans(inside))


def transpose_rows_into(values: Tensor, factor: Tensor | None, out: Tensor) -> None:
    """`transpose_rows` of a contiguous tensor into one that exists."""
    rows, features = values.shape
    if not values.numel():
        return
    if not use_triton("auto", values.device, torch.float32):
        out.copy_(transpose_rows_reference(values, factor))
        return
    plain = factor is None
    _transpose_kernel[(triton.cdiv(rows, TILE_ROWS), triton.cdiv(features, TILE_FEATURES))](
        values.view(torch.uint8) if plain else values,
        factor,
        out.view(torch.uint8) if plain else out,
        rows,
        features,
        SHIFT=not plain,
        TILE_ROWS=TILE_ROWS,
        TILE_FEATURES=TILE_FEATURES,
        num_warps=WARPS,
    )


def _transpose(values: Tensor, factor: Tensor | None) -> Tensor:
    out = _empty(values, factor)
    transpose_rows_into(values.contiguous(), factor, out)
    return out


@torch.library.register_fake("lightning_fms::transpose_rows", lib=_LIBRARY)
def _empty(values: Tensor, factor: Tensor | None) -> Tensor:
    return values.new_empty(values.shape[1], values.shape[0])


_LIBRARY.impl("transpose_rows", _transpose, "CompositeExplicitAutograd")
