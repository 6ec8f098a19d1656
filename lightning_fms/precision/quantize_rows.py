"""Round a matrix to FP8 (e4m3) with one scale a row, in one pass over memory.

Problem: a scale has to be known before the first value is rounded, so a scale for a whole tensor costs a pass over it before
the pass that rounds. A row fits into the registers of one program, which reads it once, finds its largest value and rounds it.

Scales are powers of two: multiplying by one is exact, so a value is rounded once, by the cast, and a row's scale can be
changed later by shifting exponents (`transpose_rows` does). That costs up to one of the 17 binades of e4m3 and no mantissa.

    scale = 2^ceil(log2(max |row| / 448)),  values = e4m3(row / scale)

Scales go down to 2^-61, which is that of a row of zeros; what is below 2^-71 becomes zero.

NaN stays NaN, and in a row with an infinity the infinity becomes NaN and the rest 0: a product with either shows it.

N rows, D features.
"""

import torch
from torch import Tensor

from lightning_fms.triton_backend import tl, triton, use_triton

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
SMALLEST = 2.0**-53  # of a largest value: the product of two scales stays a normal number of fp32
ELEMENTS_PER_THREAD = 16  # measured

_LIBRARY = torch.library.Library("lightning_fms", "FRAGMENT")
_LIBRARY.define("quantize_rows(Tensor x) -> (Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(values e4m3 [N, D], scales fp32 [N]) with `x` [N, D] about values * scales; `x` in bf16, fp16 or fp32."""
    return torch.ops.lightning_fms.quantize_rows.default(x)


def quantize_rows_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same in plain PyTorch."""
    wide = x.float()
    scale = power_of_two_scale(wide.abs().amax(1) if x.shape[1] else wide.new_zeros(x.shape[0]))
    return (wide / scale[:, None]).to(E4M3), scale


def power_of_two_scale(largest: Tensor) -> Tensor:
    """2^ceil(log2(largest / 448)), by the bits of the float, so that no logarithm is rounded; fp32."""
    bits = (largest.clamp(min=SMALLEST) / E4M3_MAX).view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


# ---- the Triton kernel --------------------------------------------------------------------------------------------


@triton.jit
def power_of_two(largest):  # type: ignore[no-untyped-def]
    """`power_of_two_scale` inside a kernel."""
    bits = (tl.maximum(largest, 1.1102230246251565e-16) / 448.0).to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _quantize_kernel(  # type: ignore[no-untyped-def]
    x_ptr, value_ptr, scale_ptr, features, x_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < features
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    scale = power_of_two(tl.max(tl.abs(x), 0))
    tl.store(scale_ptr + row, scale)
    tl.store(value_ptr + row * features + column, (x * (1.0 / scale)).to(tl.float8e4nv), mask=mask)


def row_block(features: int) -> tuple[int, int]:
    """(elements of a program that holds a row, its warps)."""
    block = triton.next_power_of_2(features)
    return block, min(16, max(1, block // (32 * ELEMENTS_PER_THREAD)))


def fits_a_program(features: int) -> bool:
    """Whether a row of that many values fits into the registers of a program."""
    return 0 < features <= 32768


def quantize_rows_into(x: Tensor, values: Tensor, scales: Tensor) -> None:
    """`quantize_rows` into contiguous tensors that exist."""
    rows, features = x.shape
    if not rows:
        return
    if not (fits_a_program(features) and use_triton("auto", x.device, x.dtype)):
        for out, right in zip((values, scales), quantize_rows_reference(x), strict=True):
            out.detach().copy_(right)
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    block, warps = row_block(features)
    _quantize_kernel[(rows,)](x, values, scales, features, x.stride(0), BLOCK=block, num_warps=warps)


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    values, scales = _empty(x)
    quantize_rows_into(x, values, scales)
    return values, scales


@torch.library.register_fake("lightning_fms::quantize_rows", lib=_LIBRARY)
def _empty(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=E4M3, memory_format=torch.contiguous_format), x.new_empty(
        x.shape[0], dtype=torch.float32
    )


_LIBRARY.impl("quantize_rows", _quantize, "CompositeExplicitAutograd")
