"""Time, loss, memory and kernels of optimizer steps: the same ruler for our run and for the peer's.

A step lasts from the end of the last one to its own, the device synchronised. After the measured steps, one more may be
explained: its kernels, how long the device was busy, what memory holds between steps, and the peak of each part of it.
"""

import dataclasses
import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch
from kernel_families import Kernel, busy_ms, by_family, by_name, longest_gaps
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from lightning_fms.callbacks.peaks import peak_of

GIB = 2**30


class StepMeter:
    """Call `start`, then in each step `phase` after forward and backward, and `step_done`.

    Args:
        device: where it runs.
        warmup: first steps that do not count.
        steps: all steps but the one to explain.
        explain: whether that one follows.
    """

    def __init__(self, device: torch.device, warmup: int, steps: int, explain: bool) -> None:
        self.device, self.warmup, self.steps, self.explain = device, warmup, steps, explain
        self.on_gpu = device.type == "cuda"
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.peak_gib: float | None = None
        self.reserved_gib: float | None = None
        self.explained: dict[str, Any] = {}
        self._phases: dict[str, float] = {}
        self._profiler: profile | None = None
        self._last = 0.0

    def start(self) -> None:
        """The first step begins."""
        self._last = time.perf_counter()

    def phase(self, name: str) -> None:
        """A part of the step ended: notes its peak, in the step that is explained."""
        if self._profiler is not None and self.on_gpu:
            self._phases[name] = torch.cuda.max_memory_allocated() / GIB
            torch.cuda.reset_peak_memory_stats()

    def step_done(self, loss: Tensor, parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer) -> None:
        """A step ended. Parameters and optimizer are looked at in the step that is explained."""
        if self.on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._last
        if self._profiler is not None:
            self._profiler.stop()
            self.phase("optimizer")
            self._explain(self._profiler, seconds * 1e3, list(parameters), optimizer)
            return
        self.seconds.append(seconds)
        self.losses.append(float(loss))
        done = len(self.seconds)
        if self.on_gpu and done == self.warmup:
            torch.cuda.reset_peak_memory_stats()
        if self.on_gpu and done == self.steps:
            self.peak_gib = torch.cuda.max_memory_allocated() / GIB
            self.reserved_gib = torch.cuda.max_memory_reserved() / GIB
        if self.explain and done == self.steps:
            self._begin_explained_step()
        self._last = time.perf_counter()

    def _begin_explained_step(self) -> None:
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self._profiler = profile(activities=[ProfilerActivity.CUDA if self.on_gpu else ProfilerActivity.CPU])
        self._profiler.start()

    def _explain(self, profiler: profile, ms: float, parameters: list[Tensor], optimizer: Any) -> None:
        kernels = list(_kernels(profiler, self.on_gpu))
        self.explained = {
            "profiled_step_ms": ms,
            "busy_ms": busy_ms(kernels),
            "families": by_family(kernels),
            "kernels": by_name(kernels),
            "gaps": [dataclasses.asdict(gap) for gap in longest_gaps(kernels)],
            "memory_gib": _held(parameters, optimizer, self.on_gpu),
            "peaks_gib": self._phases,
        }

    def row(self, tokens_per_step: int, flops_per_token: float) -> dict[str, Any]:
        """The numbers of a row of the table."""
        measured = self.seconds[self.warmup :]
        tokens, peak = tokens_per_step / statistics.median(measured), peak_of(self.device)
        return {
            "tokens_per_second": tokens,
            "mfu": None if peak is None else tokens * flops_per_token / (peak * 1e12),
            "peak_gib": self.peak_gib,
            "reserved_gib": self.reserved_gib,
            "loss": statistics.mean(self.losses[-10:]),
            "step_ms": statistics.median(measured) * 1e3,
            "fastest_ms": min(measured) * 1e3,
            "slowest_ms": max(measured) * 1e3,
            "first_step_s": self.seconds[0],
            "steps": len(measured),
            "losses": self.losses,
            "explained": self.explained,
        }


def _kernels(profiler: profile, on_gpu: bool) -> Iterable[Kernel]:
    """Launches on the GPU; on a CPU, operators with their own time, which only shows that this works."""
    for event in profiler.events():
        start, end = event.time_range.start, event.time_range.end
        if not on_gpu:
            yield Kernel(event.name, start, start + event.self_cpu_time_total)
        elif event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            yield Kernel(event.name, start, end)


def _held(parameters: list[Tensor], optimizer: torch.optim.Optimizer, on_gpu: bool) -> dict[str, float]:
    """GiB at the end of a step. `rest`: compute copies, batches, and what the libraries keep."""
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    held = {
        "weights": _gib(parameters),
        "gradients": _gib(p.grad for p in parameters if p.grad is not None),
        "optimizer": _gib(states),
    }
    if on_gpu:
        held["rest"] = torch.cuda.memory_allocated() / GIB - sum(held.values())
    return held


def _gib(tensors: Iterable[Tensor]) -> float:
    return sum(t.numel() * t.element_size() for t in tensors) / GIB


def explanation(name: str, row: dict[str, Any], most: int = 25) -> list[str]:
    """The explained step of a row, as lines."""
    found = row["explained"]
    busy, profiled, step = found["busy_ms"], found["profiled_step_ms"], row["step_ms"]
    held = found["memory_gib"]
    lines = [
        f"{name}: device busy {busy:.1f} ms of the profiled step's {profiled:.1f} ms; "
        f"the median step takes {step:.1f} ms, idle {1 - busy / step:.1%}",
        f"  memory between steps {sum(held.values()):.1f} GiB: {_amounts(held)}; peak of {_amounts(found['peaks_gib'])}",
    ]
    total = sum(ms for _, ms, _ in found["families"])
    lines += [f"  {ms:9.2f} ms {ms / total:6.1%} {n:6}x  {family}" for family, ms, n in found["families"]]
    lines += [
        f"  nothing ran for {gap['ms']:.2f} ms at {gap['at']:.1f} ms, between {gap['before'][:50]} and {gap['after'][:50]}"
        for gap in found["gaps"]
    ]
    return [*lines, *(f"    {ms:9.2f} ms {n:6}x  {kernel[:140]}" for kernel, ms, n in found["kernels"][:most])]


def _amounts(gib: dict[str, float]) -> str:
    return ", ".join(f"{name} {amount:.1f}" for name, amount in gib.items()) or "not known"
