"""Fused kernels against eager, `torch.compile` and Liger (where it is installed) on one CUDA GPU, forward + backward.

    python benchmarks/kernels.py            all tables with the tuning grids, about three minutes
    python benchmarks/kernels.py --quick    correctness and one row each, a few seconds
    python benchmarks/kernels.py --only fused    SwiGLU, GeGLU, rotary embedding and LayerNorm

Times are medians over repetitions that find their inputs in memory, not in L2, gradients set to None before each. 'as called':
the GPU waits for every launch, as it does in a program that the CPU holds up; so it contains what Python takes. 'queued': the
GPU sleeps until all launches are in its queue, as it does in a training step that the GPU holds up; so it is the time on
the device alone, every kernel of the call included. 'extra GiB' is the peak above what was allocated before the
step, gradients included: for linear-cross-entropy 0.98 GiB of it is the weight's own gradient.
"""

import argparse
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from fused_rows import table as fused_table
from torch import Tensor

import lightning_fms.kernels  # noqa: F401 (registers the operations)
from lightning_fms.kernels.verify import verify_linear_cross_entropy, verify_rms_norm

ROWS = sys.modules["lightning_fms.kernels.cross_entropy_rows"]
LCE = sys.modules["lightning_fms.kernels.linear_cross_entropy"]
MATMUL = sys.modules["lightning_fms.kernels.matmul"]
NORM = sys.modules["lightning_fms.kernels.rms_norm"]
DEVICE = torch.device("cuda")
TOKENS, DIM, VOCAB = 8192, 4096, 128256
NORM_ROWS, NORM_DIM = 16384, 4096
NORM_GOAL_MS = 0.200
SLEEP_CYCLES = 8_000_000  # 4 ms at 2 GHz: longer than the CPU takes to launch a norm's forward and backward
LIGER = importlib.util.find_spec("liger_kernel") is not None


@contextmanager
def setting(module: Any, **values: Any) -> Iterator[None]:
    old = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in old.items():
            setattr(module, name, value)


def median_ms(step: Callable[[], Any], repeats: int, queued: bool = False) -> float:
    flush = torch.empty(2**28, dtype=torch.int8, device=DEVICE)
    times = []
    for _ in range(repeats):
        flush.zero_()  # the step finds its inputs in memory, not in L2
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if queued:
            torch.cuda._sleep(SLEEP_CYCLES)
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def measure(function: Callable[..., Tensor], leaves: Sequence[Tensor], upstream: Tensor | None, repeats: int) -> tuple:
    """(ms, extra GiB) of forward + backward."""

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        function(*leaves).backward(upstream)

    for _ in range(2):
        step()
    ms = median_ms(step, repeats)
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    extra = (torch.cuda.max_memory_allocated() - before) / 2**30
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.empty_cache()
    return ms, extra


def row(name: str, function: Callable[..., Tensor], leaves: Sequence[Tensor], upstream: Any, repeats: int) -> None:
    try:
        ms, extra = measure(function, leaves, upstream, repeats)
        print(f"{name:58s} {ms:9.3f} ms {extra:7.2f} GiB extra", flush=True)
    except (RuntimeError, ImportError) as error:
        print(f"{name:58s} failed: {str(error).splitlines()[0][:120]}", flush=True)
        torch.cuda.empty_cache()


# ---- linear cross-entropy -----------------------------------------------------------------------------------------


def eager_lce(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def lce_inputs(tokens: int = TOKENS, vocab: int = VOCAB) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(tokens, DIM, device=DEVICE, generator=generator).bfloat16()
    weight = torch.empty(vocab, DIM, device=DEVICE, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
    target = torch.randint(0, vocab, (tokens,), device=DEVICE, generator=generator)
    return [hidden.requires_grad_(), weight.requires_grad_()], target


def linear_cross_entropy_table(quick: bool) -> None:
    print(f"\nlinear + cross-entropy, {TOKENS} x {DIM} -> {VOCAB}, bf16, forward + backward (target: 42 ms, 1.6 GiB)")
    leaves, target = lce_inputs()

    def ours(mib: int, accumulate: str = "native") -> Callable[..., Tensor]:
        return lambda h, w: LCE.linear_cross_entropy(h, w, target, chunk_bytes=mib * 2**20, accumulate=accumulate)

    repeats = 3 if quick else 7
    row("ours, default", lambda h, w: LCE.linear_cross_entropy(h, w, target), leaves, None, repeats)
    row("ours, default, loss scaled by 0.5", lambda h, w: LCE.linear_cross_entropy(h, w, target) * 0.5, leaves, None, 3)
    if quick:
        return
    row("eager", lambda h, w: eager_lce(h, w, target), leaves, None, 3)
    compiled = torch.compile(eager_lce)
    row("torch.compile", lambda h, w: compiled(h, w, target), leaves, None, 5)
    if LIGER:
        from liger_kernel.transformers.fused_linear_cross_entropy import (  # noqa: PLC0415 (optional)
            LigerFusedLinearCrossEntropyLoss,
        )

        liger = LigerFusedLinearCrossEntropyLoss()
        row("Liger", lambda h, w: liger(w, h, target), leaves, None, 5)
    for mib in (256, 384, 512, 768, 1024, 2048):
        rows = LCE.chunk_rows(TOKENS, VOCAB, 2, mib * 2**20)
        row(f"ours, {mib} MiB = chunks of {rows}", ours(mib), leaves, None, 5)
    for mib in (512, 1024):
        row(f"ours, {mib} MiB, fp32 accumulation", ours(mib, "fp32"), leaves, None, 5)
    wide = [leaves[0], leaves[1].detach().float().requires_grad_()]
    with torch.autocast("cuda", torch.bfloat16):
        row("ours, autocast, fp32 weight and gradient", ours(512, "auto"), wide, None, 5)
        row("eager, autocast, fp32 weight and gradient", lambda h, w: eager_lce(h, w, target), wide, None, 3)


def rows_kernel_table() -> None:
    print("\nrow kernel alone, 2048 rows of bf16 logits: reads twice, writes once")
    for vocab in (VOCAB, 50257):
        stride = LCE._padded(vocab)
        logits = torch.randn(2048, stride, device=DEVICE, dtype=torch.bfloat16)[:, :vocab]
        target, loss = torch.randint(0, vocab, (2048,), device=DEVICE), torch.empty(2048, device=DEVICE)
        scale = torch.full((1,), 1e-3, device=DEVICE)

        def step(logits=logits, target=target, loss=loss, scale=scale) -> None:
            ROWS.cross_entropy_rows(logits, target, loss, scale, -100, 0.0, True)

        for block in (4096, 8192, 16384, 32768):
            for warps in (8, 16, 32):
                with setting(ROWS, ROW_BLOCK=block, ROW_WARPS=warps):
                    step()
                    ms = median_ms(step, 5)
                print(
                    f"V={vocab:6d} block={block:5d} warps={warps:2d} {ms:8.3f} ms {3 * 2048 * stride * 2 / ms / 1e9:6.2f} TB/s"
                )


def weight_gradient_errors() -> None:
    print("\nweight gradient: error against float64, as a multiple of eager bf16's, 8192 x 256 -> 8192")
    generator = torch.Generator(DEVICE).manual_seed(0)
    for deviation in (0.2, 1.3, 4.0):
        hidden = torch.randn(8192, 256, device=DEVICE, generator=generator).bfloat16()
        weight = (torch.randn(8192, 256, device=DEVICE, generator=generator) * deviation / 16).bfloat16()
        target = torch.randint(0, 8192, (8192,), device=DEVICE, generator=generator)

        def gradient(function: Callable[..., Tensor], dtype: Any = torch.bfloat16, h=hidden, w=weight) -> Tensor:
            leaf = w.to(dtype).requires_grad_()
            return torch.autograd.grad(function(h.to(dtype), leaf), leaf)[0].double()

        true = gradient(lambda h, w, y=target: F.cross_entropy(F.linear(h, w), y), torch.float64)
        eager = (gradient(lambda h, w, y=target: eager_lce(h, w, y)) - true).norm()
        ratios = []
        for chunks in (1, 2, 4, 8, 16):
            budget = 8192 // chunks * 8192 * 2
            for accumulate in ("native", "fp32"):
                ours = gradient(
                    lambda h, w, y=target, b=budget, a=accumulate: LCE.linear_cross_entropy(
                        h, w, y, chunk_bytes=b, accumulate=a
                    )
                )
                ratios.append(f"{chunks}x{accumulate} {float((ours - true).norm() / eager):.2f}")
        print(f"logits of std {deviation}: " + "  ".join(ratios), flush=True)


def long_input() -> None:
    print("\n32768 x 1024 -> 131072: beyond 2^31 logits")
    hidden = torch.randn(32768, 1024, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(131072, 1024, device=DEVICE, dtype=torch.bfloat16).normal_(0, 0.02).requires_grad_()
    target = torch.randint(0, 131072, (32768,), device=DEVICE)
    row("ours", lambda h, w: LCE.linear_cross_entropy(h, w, target), [hidden, weight], None, 3)
    loss = LCE.linear_cross_entropy(hidden, weight, target).item()
    with torch.no_grad():
        parts = [
            F.cross_entropy((h @ weight.t()).float(), y, reduction="sum")
            for h, y in zip(hidden.split(2048), target.split(2048), strict=True)
        ]
    print(f"loss {loss:.5f}, eager in parts {float(sum(parts)) / 32768:.5f}")


# ---- RMSNorm ------------------------------------------------------------------------------------------------------


def norm_rows(functions: dict[str, Callable[..., Tensor]], leaves: Sequence[Tensor], upstream: Tensor) -> None:
    """One row for each: forward + backward through autograd, both ways of timing, against the goal and the others."""
    found: dict[str, float] = {}
    for name, function in functions.items():

        def step(function: Callable[..., Tensor] = function) -> None:
            for leaf in leaves:
                leaf.grad = None
            function(*leaves).backward(upstream)

        try:
            for _ in range(3):
                step()
            called, found[name] = median_ms(step, 20), median_ms(step, 20, queued=True)
        except (RuntimeError, ImportError) as error:
            print(f"{name:24s} failed: {str(error).splitlines()[0][:120]}", flush=True)
            continue
        ratio = f"{found[name] / NORM_GOAL_MS:5.2f} x goal"
        print(f"{name:24s} as called {called:7.3f} ms   queued {found[name]:7.3f} ms   {ratio}", flush=True)
    if "ours" in found and len(found) > 1:
        ratios = (f"{found['ours'] / ms:.2f} of {name}'s" for name, ms in found.items() if name != "ours")
        print(f"ours takes, queued: {', '.join(ratios)}")


def norm_kernels_alone(leaves: Sequence[Tensor], upstream: Tensor) -> None:
    """Both kernels without autograd and registered operations."""
    x, w = (leaf.detach() for leaf in leaves)
    inverse = NORM._forward_triton(x, w, 1e-5, torch.bfloat16)[1]
    NORM._backward_triton(upstream, x, w, inverse)
    forward = median_ms(lambda: NORM._forward_triton(x, w, 1e-5, torch.bfloat16), 20, queued=True)
    backward = median_ms(lambda: NORM._backward_triton(upstream, x, w, inverse), 20, queued=True)
    both, ratio = forward + backward, (forward + backward) / NORM_GOAL_MS
    print(
        f"{'ours, kernels alone':24s} forward {forward:.3f} + backward {backward:.3f} = {both:.3f} ms   {ratio:.2f} x goal"
    )


def rms_norm_table(quick: bool) -> None:
    print(f"\nRMSNorm, {NORM_ROWS} x {NORM_DIM}, bf16, forward + backward (goal {NORM_GOAL_MS} ms, floor 0.157)")
    leaves = norm_leaves(NORM_ROWS, NORM_DIM)
    upstream = torch.randn(NORM_ROWS, NORM_DIM, device=DEVICE, dtype=torch.bfloat16)
    norm_kernels_alone(leaves, upstream)
    functions = norms(NORM_DIM)
    norm_rows({"ours": functions["ours"]} if quick else functions, leaves, upstream)
    if quick:
        return
    norm_grid(leaves, upstream)
    print("head-wise, 524288 x 128:")
    heads = norm_leaves(NORM_ROWS * 32, 128)
    norm_rows(norms(128), heads, torch.randn_like(heads[0]))


def norm_leaves(rows: int, features: int) -> list[Tensor]:
    shapes = (rows, features), (features,)
    return [torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]


def norms(features: int) -> dict[str, Callable[..., Tensor]]:
    """Ours first, as users call it, then what else there is."""

    def eager(x: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(x, (features,), w, 1e-5)

    found: dict[str, Callable[..., Tensor]] = {
        "ours": lambda x, w: NORM.rms_norm(x, w, 1e-5),
        "eager": eager,
        "torch.compile": torch.compile(eager, dynamic=False),
    }
    if LIGER:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # noqa: PLC0415 (optional)

        found["Liger"] = lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-5, 0.0, "llama", False)
    return found


def norm_grid(leaves: Sequence[Tensor], upstream: Tensor) -> None:
    x, w = (leaf.detach() for leaf in leaves)
    for warps in (4, 8, 16):
        with setting(NORM, FORWARD_WARPS=warps):
            NORM._forward_triton(x, w, 1e-5, torch.bfloat16)
            ms = median_ms(lambda: NORM._forward_triton(x, w, 1e-5, torch.bfloat16), 20, queued=True)
        print(f"forward  warps={warps:2d} {ms * 1e3:7.1f} us")
    inverse = NORM._forward_triton(x, w, 1e-5, torch.bfloat16)[1]
    for per_sm in (1, 2, 4, 8):
        for warps in (4, 8, 16, 32):
            with setting(NORM, BACKWARD_WARPS=warps, PROGRAMS_PER_SM=per_sm):
                NORM._backward_triton(upstream, x, w, inverse)
                ms = median_ms(lambda: NORM._backward_triton(upstream, x, w, inverse), 20, queued=True)
            print(f"backward warps={warps:2d} programs per SM={per_sm} {ms * 1e3:7.1f} us")


# ---- the head's GEMMs by Triton -------------------------------------------------------------------------------------


def matmul_table(quick: bool) -> None:
    print(f"\nGEMMs of the head, 2048 tokens x {DIM} -> {VOCAB}, bf16: cuBLAS, ours (tiles measured at the first call)")
    hidden, logits = (torch.randn(2048, n, device=DEVICE, dtype=torch.bfloat16) for n in (DIM, VOCAB))
    weight = torch.randn(VOCAB, DIM, device=DEVICE, dtype=torch.bfloat16)
    cases = {
        "logits": (hidden, weight.t(), torch.empty_like(logits), False),
        "d hidden": (logits, weight, torch.empty_like(hidden), False),
        "d weight": (logits.t(), hidden, torch.empty_like(weight), False),
        "d weight, added": (logits.t(), hidden, torch.zeros_like(weight), True),
        "d weight, added in fp32": (logits.t(), hidden, torch.zeros_like(weight, dtype=torch.float32), True),
    }
    for name, (left, right, out, add) in list(cases.items())[: 1 if quick else None]:

        def ours(left=left, right=right, out=out, add=add) -> None:
            MATMUL.matmul_into(left, right, out, add)

        def library(left=left, right=right, out=out, add=add) -> None:
            if out.dtype != left.dtype:
                torch.ops.aten.addmm.dtype_out(out, left, right, out.dtype, out=out)
            elif add:
                out.addmm_(left, right)
            else:
                torch.mm(left, right, out=out)

        ours()
        library()
        theirs, mine = median_ms(library, 7), median_ms(ours, 7)
        tiles = next(reversed(MATMUL._chosen.values()))
        flops = 2 * left.shape[0] * left.shape[1] * right.shape[1]
        print(
            f"{name:24s} cuBLAS {theirs:7.3f} ms   ours {mine:7.3f} ms = {flops / mine / 1e9:4.0f} TFLOP/s, "
            f"{theirs / mine:.2f}x of cuBLAS's speed, {tuple(tiles)}",
            flush=True,
        )


def correctness() -> None:
    verify_linear_cross_entropy(DEVICE, "triton")
    verify_rms_norm(DEVICE, "triton")
    leaves, target = lce_inputs(1000, 50257)
    target[::5] = -100

    def outputs(function: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
        loss = function(*tensors)
        return [loss.double(), *(g.double() for g in torch.autograd.grad(loss, tensors))]

    wide = [t.detach().double().requires_grad_() for t in leaves]
    true = outputs(lambda h, w: F.cross_entropy(F.linear(h, w), target), *wide)
    eager = outputs(lambda h, w: eager_lce(h, w, target), *leaves)
    for accumulate in ("native", "fp32"):
        ours = outputs(
            lambda h, w, a=accumulate: LCE.linear_cross_entropy(h, w, target, chunk_bytes=2**25, accumulate=a), *leaves
        )
        for name, o, e, t in zip(("loss", "d hidden", "d weight"), ours, eager, true, strict=True):
            print(f"{accumulate:6s} {name:8s} error {float((o - t).norm()):.3e}, eager's {float((e - t).norm()):.3e}")
    ignored = LCE.linear_cross_entropy(*leaves, torch.full_like(target, -100))
    grads = torch.autograd.grad(ignored, leaves)
    bad = target.clone()
    bad[3] = 60000
    poisoned = LCE.linear_cross_entropy(*leaves, bad)
    finite = all(g.isfinite().all() for g in torch.autograd.grad(poisoned, leaves))
    print(f"all ignored: loss {ignored.item()}, gradients zero: {all(not g.any() for g in grads)}")
    print(f"target out of range: loss {poisoned.item()}, gradients finite: {finite}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="correctness and one row each")
    fused = functools.partial(fused_table, median_ms)
    tables = {"loss": linear_cross_entropy_table, "norm": rms_norm_table, "gemm": matmul_table, "fused": fused}
    parser.add_argument("--only", choices=tables, help="one table, without correctness")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {version('triton')}, Liger {LIGER}")
    if arguments.only:
        return tables[arguments.only](arguments.quick)
    correctness()
    for table in tables.values():
        table(arguments.quick)
    if not arguments.quick:
        rows_kernel_table()
        weight_gradient_errors()
        long_input()


if __name__ == "__main__":
    main()
