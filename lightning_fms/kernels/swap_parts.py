"""Finds gated MLPs and LayerNorms in a module that it has never seen, and lets their `forward` use the fused kernels.

As with RMSNorms in `swap`: candidates by structure, proof by trying. A gated MLP is tried with tiny random layers in the place of
its own; a LayerNorm with random weights on rows of which one is so small that it shows the epsilon.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fms.gated_mlp import GatedMLP, find_gated_mlp
from lightning_fms.kernels.gated_product import gated_product
from lightning_fms.kernels.layer_norm import layer_norm
from lightning_fms.kernels.swap import Swaps, shortened, state_of

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
_EPS_NAMES = ("eps", "epsilon", "variance_epsilon")
_USUAL_EPS = 1e-5  # where the module keeps it to itself


# ---- gated MLPs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Gated:
    names: GatedMLP
    activation: str
    backend: str


def swap_gated_mlps(module: nn.Module, swaps: Swaps, backend: str = "auto") -> None:
    """Let every gated MLP compute act(gate) * up in one pass; its three layers stay what they are."""
    for name, mlp in module.named_modules():
        if "forward" in mlp.__dict__:
            continue
        for activation, function in ACTIVATIONS.items():
            found = find_gated_mlp(mlp, function)
            if found is not None:
                swaps.add(mlp, _gated_forward, _Gated(found, activation, backend))
                swaps.gated.append(name)
                break


def _gated_forward(self: nn.Module, x: Tensor) -> Any:
    state: _Gated = state_of(self)
    gate_layer, up_layer, down_layer = (getattr(self, name) for name in state.names)
    gate, up = gate_layer(x), up_layer(x)
    if type(gate) is not Tensor or type(up) is not Tensor:  # sharded activations
        return down_layer(ACTIVATIONS[state.activation](gate) * up)
    return down_layer(gated_product(gate, up, state.activation, backend=state.backend))


# ---- LayerNorm ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _LayerNorm:
    eps: float
    out_dtypes: dict[bool, torch.dtype]  # of a bf16 input, without and with autocast
    backend: str
    own_forward: Any


def swap_layer_norms(module: nn.Module, swaps: Swaps, backend: str = "auto") -> None:
    """Let every LayerNorm over the last dimension that agrees with `F.layer_norm` run the fused kernel."""
    refused: dict[str, list[str]] = {}
    for name, norm in module.named_modules():
        if not type(norm).__name__.lower().endswith("layernorm") or "forward" in norm.__dict__:
            continue
        eps = next((getattr(norm, n) for n in _EPS_NAMES if hasattr(norm, n)), _USUAL_EPS)
        reason, dtypes = _prove(norm, eps)
        if reason is None:
            swaps.add(norm, _layer_norm_forward, _LayerNorm(eps, dtypes, backend, type(norm).forward))
            swaps.layer_norms.append(name)
        else:
            refused.setdefault(f"{type(norm).__name__}: {reason}", []).append(name)
    swaps.skipped += [f"{shortened(names)} ({reason})" for reason, names in refused.items()]


def _prove(norm: nn.Module, eps: Any) -> tuple[str | None, dict[bool, torch.dtype]]:
    """(what is different about it or None, its output dtypes)."""
    parameters = dict(norm.named_parameters())
    if not isinstance(eps, float) or next(norm.children(), None) is not None or next(norm.buffers(), None) is not None:
        return "its epsilon is no number, or it holds modules or buffers", {}
    if set(parameters) not in ({"weight"}, {"weight", "bias"}) or any(p.ndim != 1 for p in parameters.values()):
        return "it has no weight of one dimension, or other parameters than weight and bias", {}
    generator = torch.Generator().manual_seed(0)
    width = len(parameters["weight"])
    x = torch.randn(3, width, generator=generator, device="cpu") * torch.tensor([[1.0], [30.0], [1e-3]])
    given = {name: torch.randn(width, generator=generator, device="cpu") for name in parameters}
    true = F.layer_norm(x, (width,), given["weight"], given.get("bias"), eps)
    dtypes = {}
    try:
        got = _own_output(norm, x, given, cast=False)
        for cast in (False, True):
            narrow = given if cast else {name: p.bfloat16() for name, p in given.items()}
            dtypes[cast] = _own_output(norm, x.bfloat16(), narrow, cast).dtype
    except (RuntimeError, TypeError, AttributeError) as error:
        return f"its forward failed on a probe: {error}".splitlines()[0], {}
    if got.shape != true.shape or not torch.allclose(got, true, rtol=1e-4, atol=1e-4):
        return "its numbers are not a LayerNorm's", {}
    return None, dtypes


@torch.no_grad()
def _own_output(norm: nn.Module, x: Tensor, parameters: dict[str, Tensor], cast: bool) -> Tensor:
    bare = object.__new__(type(norm))  # shares no hooks, which may count, log or shard
    bare.__dict__ = {**norm.__dict__, "_parameters": {**dict.fromkeys(norm._parameters), **parameters}}
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        return type(norm).forward(bare, x)


def _layer_norm_forward(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    state: _LayerNorm = state_of(self)
    weight: Any = self.weight
    bias: Any = getattr(self, "bias", None)
    plain = type(x) is Tensor and all(type(p) in (nn.Parameter, Tensor) for p in (weight, bias) if p is not None)
    cast = torch.is_autocast_enabled(x.device.type)
    fits = weight.dtype == x.dtype or (cast and weight.dtype == torch.float32)
    if args or kwargs or not plain or not fits or x.dtype == torch.float16 or x.numel() == 0:
        return state.own_forward(self, x, *args, **kwargs)
    # Autocast lists layer_norm among what it computes in fp32 on CUDA: the output is then fp32, whatever came in.
    wide = cast and (x.is_cuda or state.out_dtypes[True] == torch.float32)
    return layer_norm(x.float() if wide else x, weight, bias, state.eps, backend=state.backend)


__all__ = ["swap_gated_mlps", "swap_layer_norms"]
