"""The FP8 kernels in Triton's interpreter against their references. Started by test_fused.py with TRITON_INTERPRET=1.

The interpreter's cast to FP8 loses the carry where the mantissa rounds up into the exponent (127 becomes 64, on hardware 128),
so a few values come out as half of what they should be. Scales are exact.
"""

import torch
from torch import Tensor

from lightning_fms import triton_backend
from lightning_fms.precision import quantize_rows as quantize
from lightning_fms.precision import swiglu_rows as swiglu
from lightning_fms.precision import transpose_rows as transpose


def close(got: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(got[1], right[1])
    half = right[0].float().abs() / 2 + 2.0**-9
    assert ((got[0].float() - right[0].float()).abs() <= half).all()
    assert (got[0].float() != right[0].float()).float().mean() < 0.1


def main() -> None:
    assert triton_backend.INTERPRETED
    torch.manual_seed(0)
    transpose.TILE_ROWS = transpose.TILE_FEATURES = 16
    for rows, features in ((37, 100), (1, 16), (16, 64)):
        x = (torch.randn(rows, features) * torch.logspace(-6, 6, rows)[:, None]).bfloat16()
        x[0] = 0
        values, scales = quantize.quantize_rows(x)
        close((values, scales), quantize.quantize_rows_reference(x))
        close(quantize.quantize_rows(x.t().contiguous().t()), (values, scales))  # rows that are no rows in memory
        assert torch.equal(transpose.transpose_rows(values).float(), values.float().t())
        shifted = transpose.transpose_rows(values, torch.full((rows,), 0.5))
        assert torch.equal(
            shifted.float()[values.float().t().abs() >= 1], values.float().t()[values.float().t().abs() >= 1] / 2
        )
        gate_up, grad = torch.randn(rows, 2 * features).bfloat16(), torch.randn(rows, features).bfloat16()
        close(swiglu.swiglu_rows(gate_up), swiglu.swiglu_rows_reference(gate_up))
        close(swiglu.swiglu_rows_backward(grad, gate_up), swiglu.swiglu_rows_backward_reference(grad, gate_up))


if __name__ == "__main__":
    main()
