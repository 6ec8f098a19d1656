"""The parts of an FP8 layer on one GPU, each against what its bytes or its operations take at least.

    python benchmarks/fp8.py                 # 8,192 tokens, layers of Llama-8B's sizes
    python benchmarks/fp8.py --tune          # also tiles and warps of the memory-bound kernels

Median of the runs after a warm-up, between CUDA events, the L2 cache flushed before each by a write. Rates of GEMMs are in
TFLOP/s, of the others in TB/s of the bytes that have to move. `wrong` is the share of values that differ from the reference in
PyTorch, which must be 0, because rounding to FP8 has one right answer; with SwiGLU a value in a million may fall to the other side,
where the sigmoids differ in their last place.
"""

import argparse
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_fms.precision import quantize_rows as quantize
from lightning_fms.precision import swiglu_rows as swiglu
from lightning_fms.precision import transpose_rows as transpose

TOKENS = 8192
LAYERS = {"q": (4096, 4096), "k": (1024, 4096), "qkv": (6144, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def milliseconds(run: Callable[..., object], *inputs: object, repeats: int = 20) -> float:
    """Median time of a call on the device."""
    cache = torch.empty(64 * 2**20, dtype=torch.int32, device="cuda")
    times = []
    for _ in range(repeats + 3):
        cache.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run(*inputs)
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in times[3:])[repeats // 2]


def fp8(rows: int, columns: int, dtype: torch.dtype = E4M3) -> Tensor:
    return torch.randn(rows, columns, device="cuda").to(dtype)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, device="cuda")


def gemms() -> None:
    """The three GEMMs of each layer."""
    print(f"{'GEMM, TFLOP/s':34} {'bf16':>8} {'tensor':>8} {'+ fast':>8} {'row':>8} {'row+fast':>8}")
    for name, (out, features) in LAYERS.items():
        for what, (m, n, k) in {
            "output": (TOKENS, out, features),
            "input's gradient": (TOKENS, features, out),
            "weight's gradient": (out, features, TOKENS),
        }.items():
            a, b = fp8(m, k), fp8(n, k)
            wide_a, wide_b = a.bfloat16(), b.bfloat16()
            times = [milliseconds(torch.mm, wide_a, wide_b.t())]
            for scale_a, scale_b in ((ones(1), ones(1)), (ones(m, 1), ones(1, n))):
                for fast in (False, True):
                    times.append(milliseconds(_scaled, a, b, scale_a, scale_b, fast))
            print(f"{name + ': ' + what:34} " + " ".join(f"{2 * m * n * k / t / 1e9:8.0f}" for t in times))


def _scaled(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, fast: bool) -> Tensor:
    return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast)


def passes() -> None:
    """The memory-bound kernels."""
    print(f"{'pass':34} {'ms':>8} {'TB/s':>8} {'wrong':>8}")
    for features in (4096, 14336, 28672):
        x = torch.randn(TOKENS, features, device="cuda", dtype=torch.bfloat16)
        values, scales = quantize.quantize_rows(x)
        right, right_scales = quantize.quantize_rows_reference(x)
        wrong = _differing(values, right) + _differing(scales, right_scales)
        _report(f"quantize_rows {features}", 3 * x.numel(), wrong, quantize.quantize_rows, x)
        factor = scales / scales.max()
        for shift in (None, factor):
            wrong = _differing(
                transpose.transpose_rows(values, shift), transpose.transpose_rows_reference(values, shift)
            )
            name = f"transpose_rows {features}{'' if shift is None else ', shifted'}"
            _report(name, 2 * x.numel(), wrong, transpose.transpose_rows, values, shift)
    weight = torch.randn(14336, 4096, device="cuda")
    wrong = _differing(quantize.quantize_rows(weight)[0], quantize.quantize_rows_reference(weight)[0])
    _report("quantize_rows of fp32 weights", 5 * weight.numel(), wrong, quantize.quantize_rows, weight)
    features = LAYERS["down"][1]
    gate_up = torch.randn(TOKENS, 2 * features, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(TOKENS, features, device="cuda", dtype=torch.bfloat16)
    wrong = _differing(swiglu.swiglu_rows(gate_up)[0], swiglu.swiglu_rows_reference(gate_up)[0])
    _report("swiglu_rows", 5 * grad.numel(), wrong, swiglu.swiglu_rows, gate_up)
    wrong = _differing(
        swiglu.swiglu_rows_backward(grad, gate_up)[0], swiglu.swiglu_rows_backward_reference(grad, gate_up)[0]
    )
    _report("swiglu_rows_backward", 8 * grad.numel(), wrong, swiglu.swiglu_rows_backward, grad, gate_up)
    x = torch.randn(TOKENS * features, device="cuda", dtype=torch.bfloat16)
    _report(
        "copy, to compare",
        4 * x.numel(),
        0.0,
        x.clone,
    )


def _differing(values: Tensor, right: Tensor) -> float:
    return (values.float() != right.float()).float().mean().item()


def _report(name: str, moved: int, wrong: float, run: Callable[..., object], *inputs: object) -> None:
    ms = milliseconds(run, *inputs)
    print(f"{name:34} {ms:8.3f} {moved / ms / 1e9:8.2f} {wrong:8.1e}")


def tune() -> None:
    """Other tiles and warps than the ones that are set."""
    values = fp8(TOKENS, 14336)
    factor = ones(TOKENS)
    for rows, features, warps in [
        (64, 64, 4),
        (64, 128, 4),
        (128, 64, 4),
        (128, 128, 4),
        (128, 128, 8),
        (256, 64, 4),
        (256, 64, 8),
        (64, 256, 8),
        (256, 128, 8),
        (32, 256, 4),
        (256, 32, 4),
    ]:
        transpose.TILE_ROWS, transpose.TILE_FEATURES, transpose.WARPS = rows, features, warps
        for shift in (None, factor):
            name = f"transpose {rows} x {features}, {warps} warps{'' if shift is None else ', shifted'}"
            _report(name, 2 * values.numel(), 0.0, transpose.transpose_rows, values, shift)
    x = {d: torch.randn(TOKENS, d, device="cuda", dtype=torch.bfloat16) for d in (4096, 14336)}
    for per_thread in (8, 16, 32, 64):
        quantize.ELEMENTS_PER_THREAD = per_thread
        for features, rows in x.items():
            name = f"quantize {features}, {per_thread} a thread"
            _report(name, 3 * rows.numel(), 0.0, quantize.quantize_rows, rows)
    gate_up, grad = torch.cat((x[14336], x[14336]), 1), x[14336]
    for warps in (8, 16, 32):
        swiglu.WARPS = warps
        _report(f"swiglu, {warps} warps", 5 * grad.numel(), 0.0, swiglu.swiglu_rows, gate_up)
        name = f"swiglu backward, {warps} warps"
        _report(name, 8 * grad.numel(), 0.0, swiglu.swiglu_rows_backward, grad, gate_up)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="try other tiles and warps")
    arguments = parser.parse_args(words)
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    passes()
    gemms()
    if arguments.tune:
        tune()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
