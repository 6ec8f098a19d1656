"""What a step's time on the device goes into, by the names of its kernels.

A list of 200 kernel names explains nothing; ten families do. Names tell what a kernel is: libraries put operation and
dtype in them, `torch.compile` the operations it fused. A fused kernel counts for the first family below that it names, so
a norm with an addition in it is a norm. Idle time, where no kernel runs, is launches and waiting for the CPU.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# The first pattern that is found in a name decides.
FAMILIES = (
    ("memcpy, memset", r"^(Memcpy|Memset)"),
    ("attention", r"sdpa|flash|fmha|attention|cudnn"),
    (
        "gemm fp8",
        r"nvjet_(sm\d+_)?[a-z]{5}_|(gemm|cutlass|cublas).*(e4m3|e5m2|float8|fp8)",
    ),  # cuBLAS: nvjet_qqtst; bf16 is nvjet_tst
    ("gemm bf16", r"nvjet|gemm|cutlass|cublas|splitKreduce|wgmma|aten::mm|aten::addmm|aten::bmm"),
    ("optimizer", r"[Aa]dam"),
    ("gradient norm, clipping", r"LpNorm|lpnorm|multi_tensor_apply.*(BinaryOp|ScalarTensor)|linalg_vector_norm"),
    ("loss", r"cross_entropy|nll_loss|log_softmax|SoftMax|^_rows_kernel|^_scale_kernel|element_mul_kernel"),
    ("fp8 scales and casts", r"^triton.*_(abs|amax|clamp|float8)|^_(quantize|transpose|swiglu|swiglu_backward)_kernel"),
    ("RMSNorm", r"rms_norm|rsqrt|^_forward_kernel|^_backward_kernel"),
    ("embedding", r"embedding|indexing_backward|index_put|radix|Radix|krn_partial|compute_grad_weight"),
    ("copies, casts", r"copy|Copy|aten::to$|aten::_to_copy"),
    ("elementwise, compiled", r"^triton_"),
    ("elementwise, eager", r"at::native|elementwise|reduce_kernel|^aten::"),
)


@dataclass(frozen=True)
class Kernel:
    """One launch: times in microseconds."""

    name: str
    start: float
    end: float


def family_of(name: str) -> str:
    """The family of a kernel; 'other' if nothing in its name is known."""
    return next((family for family, pattern in FAMILIES if re.search(pattern, name)), "other")


def by_family(kernels: Iterable[Kernel]) -> list[tuple[str, float, int]]:
    """(family, milliseconds, launches), the longest first."""
    return _summed((family_of(kernel.name), kernel) for kernel in kernels)


def by_name(kernels: Iterable[Kernel]) -> list[tuple[str, float, int]]:
    """(name, milliseconds, launches), the longest first."""
    return _summed((kernel.name, kernel) for kernel in kernels)


def _summed(named: Iterable[tuple[str, Kernel]]) -> list[tuple[str, float, int]]:
    sums: dict[str, tuple[float, int]] = {}
    for name, kernel in named:
        ms, count = sums.get(name, (0.0, 0))
        sums[name] = ms + (kernel.end - kernel.start) / 1e3, count + 1
    return sorted(((name, ms, count) for name, (ms, count) in sums.items()), key=lambda entry: -entry[1])


def busy_ms(kernels: Sequence[Kernel]) -> float:
    """Milliseconds in which at least one kernel runs; overlapping ones (several streams) count once."""
    busy, until = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        busy += max(0.0, kernel.end - max(kernel.start, until))
        until = max(until, kernel.end)
    return busy / 1e3


@dataclass(frozen=True)
class Gap:
    """A time in which the device had nothing to do, in milliseconds from the first launch, and what came before and after."""

    at: float
    ms: float
    before: str
    after: str


def longest_gaps(kernels: Sequence[Kernel], most: int = 6) -> list[Gap]:
    """The longest times in which no kernel ran, in order of time."""
    gaps: list[Gap] = []
    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    last = ordered[0] if ordered else None
    for kernel in ordered[1:]:
        assert last is not None
        if kernel.start > last.end:
            at, ms = (last.end - ordered[0].start) / 1e3, (kernel.start - last.end) / 1e3
            gaps.append(Gap(at, ms, last.name, kernel.name))
        last = max(last, kernel, key=lambda one: one.end)
    return sorted(sorted(gaps, key=lambda gap: -gap.ms)[:most], key=lambda gap: gap.at)
