"""Attention without a mask by the backend that is fastest on the device; with a mask, PyTorch's own choice.

Problem: on a Hopper GPU cuDNN's attention is 1.7 times as fast as FlashAttention, and PyTorch takes it last. Asked to take it
first (`sdpa_kernel(..., set_priority=True)` around a run), it also takes it for calls with a mask, whose gradients cuDNN has
returned as NaN on Hopper.

Idea: the order is set around each call that has no mask, and around no other. While a block is compiled that happens as it is
traced, and costs nothing later. An `sdpa_kernel` of the user's that leaves any backend out is his choice, and stands.

Which order: recorded for devices that were measured (docs/kernels.md), else measured here in a moment, on one usual shape.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_fms.kernels.sdpa import SDPA

CHOICES = ("auto", "cudnn", "flash", "off")
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
RECORDED = {(9, 0): "cudnn"}  # compute capability: the fastest of `BACKENDS`
PROBE = (1, 16, 4096, 128)  # [B, H, T, E] of the measurement
_TOLERANCE = 0.05  # of the largest gradient: several times bf16's error, far below what is wrong
_REPEATS = 5


def preferring(first: str) -> Callable[..., Tensor]:
    """`scaled_dot_product_attention` that tries the backend `first` before the others, where there is no mask."""
    order = [BACKENDS[first], *(backend for name, backend in BACKENDS.items() if name not in (first, "cudnn"))]

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """See `torch.nn.functional.scaled_dot_product_attention`."""
        if attn_mask is None and _unrestricted():
            with sdpa_kernel(order, set_priority=True):
                return SDPA(query, key, value, None, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    return attend


def _unrestricted() -> bool:
    return (
        torch._C._get_flash_sdp_enabled()
        and torch._C._get_mem_efficient_sdp_enabled()
        and torch._C._get_math_sdp_enabled()
        and torch._C._get_cudnn_sdp_enabled()
    )


def fastest_backend(device: torch.device) -> tuple[str, str]:
    """(name, how it is known) of the fastest backend whose gradients are right on this CUDA device."""
    capability = torch.cuda.get_device_capability(device)
    if capability in RECORDED:
        return RECORDED[capability], f"recorded for compute capability {capability[0]}.{capability[1]}"
    times = {name: measure(name, device) for name in ("cudnn", "flash")}
    right = {name: ms for name, ms in times.items() if ms is not None}
    if not right:
        return "math", "no fused backend is right here"
    shown = ", ".join(f"{name} {ms:.2f} ms" for name, ms in right.items())
    return min(right, key=lambda name: right[name]), f"measured: {shown}"


def measure(name: str, device: torch.device, shape: tuple[int, int, int, int] = PROBE) -> float | None:
    """Milliseconds of causal forward and backward in bf16, or None if the backend refuses or its gradients are wrong."""
    if not _right(name, device, shape[-1]):
        return None
    leaves, upstream = _inputs(device, shape)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for repeat in range(_REPEATS + 2):
        if repeat == 2:
            start.record()
        _gradients(name, leaves, upstream)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / _REPEATS


def _right(name: str, device: torch.device, head_dim: int) -> bool:
    """Whether gradients of a small causal problem are finite and near those of the plain formula in fp32."""
    leaves, upstream = _inputs(device, (2, 2, 192, head_dim))
    wide = [leaf.detach().float().requires_grad_() for leaf in leaves]
    try:
        found = _gradients(name, leaves, upstream)
    except RuntimeError:  # 'No available kernel'
        return False
    pairs = zip(found, _gradients("math", wide, upstream.float()), strict=True)
    return all(float((ours - true).abs().max()) <= _TOLERANCE * float(true.abs().max()) for ours, true in pairs)


def _inputs(device: torch.device, shape: tuple[int, int, int, int]) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16
    drawn = [torch.randn(shape, device=device, dtype=dtype, generator=generator) for _ in range(4)]
    return [tensor.requires_grad_() for tensor in drawn[:3]], drawn[3]


@torch.enable_grad()
def _gradients(name: str, leaves: list[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    query, key, value = leaves
    with sdpa_kernel(BACKENDS[name]):
        return torch.autograd.grad(SDPA(query, key, value, is_causal=True), leaves, upstream)


__all__ = ["BACKENDS", "CHOICES", "fastest_backend", "measure", "preferring"]
