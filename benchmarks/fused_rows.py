"""Rows of `kernels.py` for the elementwise kernels: SwiGLU, GeGLU, rotary embedding and LayerNorm, at the shape of Llama 8B.

Each is measured forward + backward, eager, compiled on its own, ours, and Liger's where it has one. What decides is the step of a
whole model, where the compiler may fuse more; `floor` is what the bytes take that have to move at 4.3 TB/s.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fms.kernels import gated_product, layer_norm, rotary

TOKENS, DIM, FFN, HEADS, HEAD_DIM = 8192, 4096, 14336, 32, 128
BYTES_PER_MS = 4.3e9
LIGER = importlib.util.find_spec("liger_kernel") is not None
Functions = dict[str, Callable[..., Tensor]]


def random(*shape: int, device: str) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16).requires_grad_()


def half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As models write it."""
    cos, sin = (torch.cat((t, t), dim=-1)[:, :, None] for t in (cos, sin))
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As Llama was published."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.complex(cos, sin)[:, :, None]).flatten(-2).to(x.dtype)


def cases(tokens: int = TOKENS, device: str = "cuda") -> dict[str, tuple[Functions, list[Tensor], float]]:
    """Name -> (functions of the leaves, leaves, bytes that have to move)."""
    wide = tokens * FFN * 2
    gate_up = [random(tokens, FFN, device=device) for _ in range(2)]
    heads, angles = (
        random(1, tokens, HEADS, HEAD_DIM, device=device),
        torch.rand(1, tokens, HEAD_DIM // 2, device=device),
    )
    cos, sin = angles.cos(), angles.sin()
    rows = [random(tokens, DIM, device=device), random(DIM, device=device), random(DIM, device=device)]
    gelu = {
        "eager": lambda g, u: F.gelu(g, approximate="tanh") * u,
        "ours": lambda g, u: gated_product(g, u, "gelu_tanh"),
    }
    return {
        f"SwiGLU, {tokens} x {FFN}": (
            {"eager": lambda g, u: F.silu(g) * u, "ours": gated_product, **liger("swiglu")}, gate_up, 8 * wide,
        ),
        f"GeGLU (tanh), {tokens} x {FFN}": ({**gelu, **liger("geglu")}, gate_up, 8 * wide),
        f"rotary, half-split, {tokens} x {HEADS} x {HEAD_DIM}": (
            {"eager": lambda x: half_split(x, cos, sin), "ours": lambda x: rotary(x, cos, sin)}, [heads], 4 * heads.nbytes,
        ),
        f"rotary, interleaved, {tokens} x {HEADS} x {HEAD_DIM}": (
            {
                "eager": lambda x: interleaved(x, cos, sin),
                "ours": lambda x: rotary(x, cos, sin, interleaved=True),
            },
            [heads], 4 * heads.nbytes,
        ),
        f"LayerNorm, {tokens} x {DIM}": (
            {"eager": lambda x, w, b: F.layer_norm(x, (DIM,), w, b), "ours": layer_norm, **liger("layer_norm")},
            rows, 5 * rows[0].nbytes,
        ),
    }  # fmt: skip


def liger(name: str) -> Functions:
    """Its function, if it is installed. Its rotary embedding writes into its inputs and is left out."""
    if not LIGER:
        return {}
    from liger_kernel.ops.geglu import LigerGELUMulFunction  # noqa: PLC0415 (optional)
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction  # noqa: PLC0415
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction  # noqa: PLC0415

    functions: dict[str, Callable[..., Tensor]] = {
        "swiglu": lambda g, u: LigerSiLUMulFunction.apply(g.clone(), u.clone()),  # its backward writes into them
        "geglu": lambda g, u: LigerGELUMulFunction.apply(g.clone(), u.clone()),
        "layer_norm": lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, 1e-5),
    }
    return {"Liger": functions[name]}


def table(median_ms: Callable[..., float], quick: bool) -> None:
    """Print every case; with `quick` ours only."""
    for name, (functions, leaves, moved) in cases().items():
        print(f"\n{name}, bf16, forward + backward (floor {moved / BYTES_PER_MS:.3f} ms)")
        found: dict[str, float] = {}
        functions = {**functions, "torch.compile": torch.compile(functions["eager"], dynamic=False)}
        for which, function in functions.items():
            if quick and which != "ours":
                continue
            try:
                found[which], called = _milliseconds(function, leaves, median_ms)
            except (RuntimeError, ImportError, TypeError) as error:
                print(f"{which:24s} failed: {str(error).splitlines()[0][:120]}", flush=True)
                continue
            print(f"{which:24s} as called {called:7.3f} ms   queued {found[which]:7.3f} ms", flush=True)
        others = {which: ms for which, ms in found.items() if which != "ours"}
        if "ours" in found and others:
            ratios = (f"{found['ours'] / ms:.2f} of {which}'s" for which, ms in others.items())
            print(f"ours takes, queued: {', '.join(ratios)}")


def _milliseconds(function: Callable[..., Tensor], leaves: list[Tensor], median_ms: Any) -> tuple[float, float]:
    upstream = torch.randn_like(function(*leaves))

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        function(*leaves).backward(upstream)

    for _ in range(3):
        step()
    return median_ms(step, 10, queued=True), median_ms(step, 10)
