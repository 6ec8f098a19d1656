"""Triton where it is installed, and a stand-in that lets the kernels be defined (not run) where it is not.

Triton ships for Linux only. A kernel file holds its PyTorch reference beside its Triton kernel, and the reference must
import on every machine, so the decorators need something to stand on.
"""

import os
from typing import Any

import torch

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:  # macOS, Windows

    class _NoTriton:
        constexpr = int

        @staticmethod
        def jit(fn: Any) -> Any:
            return fn

    triton = tl = _NoTriton()
    HAS_TRITON = False

# Triton decides when a kernel is decorated whether it is interpreted, so the answer is fixed when this module loads.
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0") == "1"

# 'triton_only' is 'triton' for a kernel that calls no library anyway; others then do their GEMMs by Triton too.
BACKENDS = ("auto", "triton", "triton_only", "reference")


def use_triton(backend: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the Triton kernel runs: on CUDA, or anywhere in Triton's interpreter; float64 is left to the reference.

    Raises:
        ValueError: `backend` is unknown, or 'triton' where no Triton kernel can run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"{backend=} is not one of {', '.join(BACKENDS)}")
    possible = HAS_TRITON and (device.type == "cuda" or INTERPRETED) and dtype != torch.float64
    if backend in ("triton", "triton_only") and not possible:
        raise ValueError(
            f"{backend=} cannot run {dtype} on {device}: Triton needs a CUDA device (or TRITON_INTERPRET=1, set "
            "before the first import) and at most 32-bit floats; use backend='auto' or 'reference'"
        )
    return possible and backend != "reference"


__all__ = ["BACKENDS", "HAS_TRITON", "INTERPRETED", "tl", "triton", "use_triton"]
