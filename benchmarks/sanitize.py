"""Every Triton kernel once, at sizes that fit no block: for compute-sanitizer, which finds wild accesses and races.

compute-sanitizer --tool memcheck --error-exitcode 1 python benchmarks/sanitize.py
compute-sanitizer --tool racecheck --error-exitcode 1 python benchmarks/sanitize.py
"""

import os
import sys

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # else an access beyond a tensor hits its neighbour

import torch

from lightning_fms.distributed.one_pass import Settings, Tables, Tensors, adam_step
from lightning_fms.kernels import gated_product, layer_norm, linear_cross_entropy, rms_norm, rotary
from lightning_fms.kernels.matmul import matmul_into
from lightning_fms.precision.quantize_rows import quantize_rows
from lightning_fms.precision.swiglu_rows import swiglu_rows, swiglu_rows_backward
from lightning_fms.precision.transpose_rows import transpose_rows

DEVICE = "cuda"


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def losses() -> None:
    """Odd vocabulary, ignored targets and targets out of range, all three reductions."""
    target = torch.randint(0, 1001, (37,), device=DEVICE)
    target[3:9] = -100
    target[11], target[12] = 5000, -7
    for reduction in ("mean", "sum", "none"):
        hidden, weight = randn(37, 65).requires_grad_(), randn(1001, 65).requires_grad_()
        linear_cross_entropy(hidden, weight, target, reduction=reduction, chunk_bytes=1).sum().backward()


def norms() -> None:
    """Odd widths, a view whose rows are apart, no rows."""
    for rows, width in ((37, 1000), (1, 33), (5, 4100), (0, 64)):
        x, weight = randn(rows, 2 * width)[:, :width].requires_grad_(), randn(width).requires_grad_()
        rms_norm(x, weight, 1e-6).sum().backward()


def fused() -> None:
    """Odd widths, views whose rows are apart, partial rotary embedding of both layouts."""
    for width in (33, 1000, 4100):
        gate, up = randn(37, 2 * width).requires_grad_().chunk(2, dim=1)
        gated_product(gate, up, "gelu").sum().backward()
        x, weight, bias = randn(37, 2 * width)[:, :width].requires_grad_(), randn(width), randn(width)
        layer_norm(x, weight.requires_grad_(), bias.requires_grad_()).sum().backward()
    table = torch.rand(1, 37, 5, device=DEVICE)
    for interleaved in (False, True):
        rotary(randn(2, 37, 3, 13).requires_grad_(), table, table, interleaved=interleaved).sum().backward()


def gemms() -> None:
    """Sizes that fit no tile, each layout of operands, an output that is added to and one whose rows are not aligned."""
    for m, n, k in ((300, 200, 100), (1, 33, 7)):
        for left in (randn(m, k), randn(k, m).t()):
            for right in (randn(k, n), randn(n, k).t()):
                for dtype in (torch.bfloat16, torch.float32):
                    matmul_into(left, right, randn(m, n, dtype=dtype), accumulate=True)


def fp8() -> None:
    """Odd rows and widths."""
    for rows, width in ((37, 100), (1, 33), (130, 4100)):
        values, scales = quantize_rows(randn(rows, width))
        transpose_rows(values, scales / scales.max())
        transpose_rows(values)
        gate_up = randn(rows, 2 * width)
        swiglu_rows(gate_up)
        swiglu_rows_backward(randn(rows, width), gate_up)


def optimizer() -> None:
    """Lengths that fit no block, with gradients and copies in bf16."""
    lengths = (1, 33, 5000, 40001)
    wide, narrow = ([[randn(n, dtype=d) for n in lengths] for _ in range(3)] for d in (torch.float32, torch.bfloat16))
    moments = [mean.zero_() for mean in wide[1]], [square.zero_() for square in wide[2]]
    tensors = Tensors(params=wide[0], grads=narrow[0], means=moments[0], squares=moments[1], copies=narrow[1])
    adam_step(tensors, Settings(1e-3, (0.9, 0.95), 1e-8, 0.1, True, 1), torch.full((), 0.5, device=DEVICE), Tables())


def main() -> int:
    for part in (losses, norms, fused, gemms, fp8, optimizer):
        part()
        torch.cuda.synchronize()
        print(part.__name__, "done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
