"""What follows a backward pass: PyTorch's way in four passes against one, at the sizes of Llama-8B's layers.

    python benchmarks/optimizer.py                      1.1 billion parameters, a minute
    python benchmarks/optimizer.py --all                all of 16 layers and both ends, 4.5 billion: 90 GiB
    python benchmarks/optimizer.py --sweep              the kernel's block sizes
    python benchmarks/optimizer.py --device cpu --numel 1000

'torch' is norm + clip, fused AdamW and a refresh of bf16 copies, on fp32 gradients that were cast from bf16 (the cast is a
row of its own). 'one pass' is the norm of bf16 gradients, then one kernel. Times are medians of 20, by CUDA events.
The floor of the kernel is 28 bytes a parameter (weight and moments read and written, gradient read, copy written), and 2 more
for the norm, at the speed of a plain copy of 1 GiB on the same device. The check runs first, on fresh tensors.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_fms.distributed import one_pass
from lightning_fms.distributed.one_pass import Settings, Tables, Tensors, adam_step

DIM, HIDDEN, KEYS, VOCABULARY = 4096, 14336, 1024, 128256
LAYER = (DIM * DIM, DIM * KEYS, DIM * KEYS, DIM * DIM, DIM * HIDDEN, DIM * HIDDEN, HIDDEN * DIM, DIM, DIM)
LR, BETAS, EPS, DECAY, MAX_NORM = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
FLOOR_BYTES, NORM_BYTES = 28, 2


def lengths(whole: bool, numel: int | None) -> list[int]:
    """Of the weights: 16 layers and both ends; or as many as fit in 1.1 billion, in pieces of a shard's size."""
    if numel is not None:
        return [numel, numel + 3, 8 * numel, 1, 64]
    ends = [VOCABULARY * DIM, VOCABULARY * DIM, DIM]
    everything = [*LAYER * 16, *ends]
    return everything if whole else [max(n // 4, DIM) if n > DIM else n for n in everything]


def make(sizes: list[int], device: torch.device) -> Tensors:
    generator = torch.Generator(device).manual_seed(0)
    made = Tensors()
    for size in sizes:
        made.params.append(torch.empty(size, device=device).normal_(0, 0.02, generator=generator))
        made.grads.append(torch.empty(size, device=device, dtype=torch.bfloat16).normal_(0, 0.01, generator=generator))
        made.means.append(torch.zeros(size, device=device))
        made.squares.append(torch.zeros(size, device=device))
        made.copies.append(torch.empty(size, device=device, dtype=torch.bfloat16))
    return made


def median_ms(step: Callable[[], Any], device: torch.device, repeats: int = 20, warm_up: int = 3) -> float:
    for _ in range(warm_up):
        step()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            step()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begun = time.perf_counter()
            step()
            times.append((time.perf_counter() - begun) * 1e3)
    return sorted(times)[len(times) // 2]


def norm_of(gradients: list[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)))


def one_pass_step(made: Tensors, tables: Tables, count: int, clip: bool = True) -> None:
    factor = (MAX_NORM / (norm_of(made.grads) + 1e-6)).clamp(max=1.0) if clip else None
    adam_step(made, Settings(LR, BETAS, EPS, DECAY, True, count), factor, tables)


def torch_optimizer(made: Tensors) -> torch.optim.AdamW:
    """PyTorch's, over the very same weights and moments."""
    optimizer = torch.optim.AdamW(made.params, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)
    for param, mean, square in zip(made.params, made.means, made.squares, strict=True):
        step = torch.zeros((), device=param.device)
        optimizer.state[param] = {"step": step, "exp_avg": mean, "exp_avg_sq": square}
    return optimizer


def check(sizes: list[int], device: torch.device) -> None:
    """Three steps of both from the same start; how far they are apart, in units of fp32's last place."""
    ours, theirs = make(sizes, device), make(sizes, device)
    optimizer, tables = torch_optimizer(theirs), Tables()
    for count in range(1, 4):
        for kind in (ours, theirs):
            generator = torch.Generator(device).manual_seed(count)
            for gradient in kind.grads:
                gradient.normal_(0, 0.01, generator=generator)
        one_pass_step(ours, tables, count)
        for param, gradient in zip(theirs.params, theirs.grads, strict=True):
            param.grad = gradient.float()
        torch.nn.utils.clip_grad_norm_(theirs.params, MAX_NORM)
        optimizer.step()
    apart = {}
    for name, scale in (("params", 3 * LR), ("means", 0.01), ("squares", 0.0)):  # of moves, of gradients, of themselves
        pairs = zip(getattr(ours, name), getattr(theirs, name), strict=True)
        units = [((a - b).abs() / (b.abs().clamp(min=scale + 1e-30) * 2**-23)).max() for a, b in pairs]
        apart[name] = f"{float(torch.stack(units).max()):.1f}"
    copies = all(torch.equal(c, p.bfloat16()) for c, p in zip(ours.copies, ours.params, strict=True))
    print(f"check, {len(sizes)} tensors: apart from torch by {apart} units in the last place; copies right: {copies}")
    assert copies
    # The factor of the clip may differ in its last places, and enters the squares twice, in each of three steps.
    assert all(float(value) <= 10 for value in apart.values())


def report(name: str, ms: float, bytes_each: float, numel: int, copy_gb_s: float) -> None:
    speed = bytes_each * numel / ms / 1e6
    print(f"{name:44s} {ms:9.3f} ms {speed:8.0f} GB/s  {100 * speed / copy_gb_s:5.1f} % of a copy's", flush=True)


def copy_speed(device: torch.device, size: int) -> float:
    source = torch.empty(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * size / median_ms(lambda: target.copy_(source), device) / 1e6


def torch_rows(made: Tensors, numel: int, speed: float, device: torch.device) -> float:
    optimizer = torch_optimizer(made)
    for param in made.params:
        param.grad = torch.empty_like(param)
    wide: Any = [param.grad for param in made.params]

    def norm_and_clip() -> None:
        torch.nn.utils.clip_grad_norm_(made.params, MAX_NORM)

    steps: dict[str, tuple[Callable[[], Any], int]] = {
        "torch: cast of gradients": (lambda: torch._foreach_copy_(wide, made.grads), 6),
        "torch: norm + clip": (norm_and_clip, 12),
        "torch: fused AdamW": (optimizer.step, 28),
        "torch: refresh of bf16 copies": (lambda: torch._foreach_copy_(made.copies, made.params), 6),
    }
    total = 0.0
    for name, (step, each) in steps.items():
        ms = median_ms(step, device)
        report(name, ms, each, numel, speed)
        total += ms
    report("torch: sum", total, sum(each for _, each in steps.values()), numel, speed)
    for param in made.params:
        param.grad = None
    return total


def one_pass_rows(made: Tensors, numel: int, speed: float, device: torch.device) -> float:
    tables = Tables()
    norm = median_ms(lambda: norm_of(made.grads), device)
    report("one pass: norm of bf16 gradients", norm, NORM_BYTES, numel, speed)
    ms = median_ms(lambda: one_pass_step(made, tables, 10, clip=False), device)
    report("one pass: kernel alone", ms, FLOOR_BYTES, numel, speed)
    total = median_ms(lambda: one_pass_step(made, tables, 10), device)
    report("one pass: both", total, FLOOR_BYTES + NORM_BYTES, numel, speed)
    return total


def sweep(made: Tensors, numel: int, speed: float, device: torch.device) -> None:
    tables = Tables()
    for warps, tile, chunk, width in itertools.product(
        (4, 8, 16), (1024, 2048, 4096, 8192), (8192, 32768, 131072), (8, 16)
    ):
        if not 4 <= tile // (32 * warps) <= 32 or chunk < tile:
            continue
        one_pass.WARPS, one_pass.TILE, one_pass.CHUNK, one_pass.BF16_BYTES = warps, tile, chunk, width
        ms = median_ms(lambda: one_pass_step(made, tables, 10, clip=False), device, repeats=7, warm_up=2)
        report(f"warps {warps:2d} tile {tile:5d} chunk {chunk:6d} bf16 {width:2d} bytes", ms, FLOOR_BYTES, numel, speed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--numel", type=int, help="a few small tensors of about this length instead")
    parser.add_argument("--all", action="store_true", help="16 layers and both ends, unsharded")
    parser.add_argument("--sweep", action="store_true", help="time block sizes only")
    arguments = parser.parse_args()
    device, sizes = torch.device(arguments.device), lengths(arguments.all, arguments.numel)
    check(lengths(False, arguments.numel or 100_003), device)
    made, numel = make(sizes, device), sum(sizes)
    speed = copy_speed(device, 2**30 if device.type == "cuda" else 2**20)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(
        f"{name}, torch {torch.__version__}: {numel / 1e9:.3f} billion in {len(sizes)} tensors; copy {speed:.0f} GB/s"
    )
    if arguments.sweep:
        return sweep(made, numel, speed, device)
    before = torch_rows(made, numel, speed, device)
    print(f"one pass takes {one_pass_rows(made, numel, speed, device) / before:.2f} of it")
    return None


if __name__ == "__main__":
    main()
