"""Which kernels of a profile are a vendor library's or FlashAttention's: the proof that a run had none.

Names are all that a profile has. cuBLAS names its own (`nvjet`, `gemm`, `splitKreduce`, `gemv`), CUTLASS, cuDNN and FlashAttention
carry theirs, also where PyTorch compiled them into itself (`fmha`, `pytorch_flash`). What Triton made of somebody's code is called
as its author called it (`triton_tem_fused_mm`, `_matmul_kernel`), so the names of Triton's templates and ours are known first.
"""

import re
from collections.abc import Iterable
from typing import Any

LIBRARIES = {
    "cuBLAS": r"nvjet|cublas|gemm|gemv|gemvx|splitk|dot_kernel|xmma",
    "cuDNN": r"cudnn|_sdpa_sm\d+|implicit_convolve|winograd|nchw|nhwc",
    "CUTLASS": r"cutlass|fmha|wgmma_kernel",
    "FlashAttention": r"flash",
    "cuSPARSE, cuSOLVER, cuFFT": r"cusparse|cusolver|cufft",
}
_TRITON = re.compile(r"^(triton_|_(matmul|rows|scale|forward|backward)_kernel)|^(Memcpy|Memset)")


def library_of(kernel: str) -> str | None:
    """The library that a kernel of this name comes from, or None."""
    if _TRITON.search(kernel):
        return None
    return next((name for name, pattern in LIBRARIES.items() if re.search(pattern, kernel, re.IGNORECASE)), None)


def cuda_libraries_used(profiler_events: Iterable[Any]) -> list[str]:
    """'library: kernel' for each kernel of a library among the events (`torch.profiler.profile.events()`, or names), sorted.

    Only what ran on the device counts: an operator `aten::mm` may have been anything.
    """
    names = set()
    for event in profiler_events:
        if isinstance(event, str):
            names.add(event)
        elif getattr(event.device_type, "name", "") == "CUDA" and not getattr(event, "is_user_annotation", False):
            names.add(event.name)
    return sorted(f"{library}: {name}" for name in names if (library := library_of(name)) is not None)


__all__ = ["cuda_libraries_used", "library_of"]
