"""Find the gated MLPs of any module: `down(act(gate(x)) * up(x))`, whatever its author called the three layers.

A class name proves nothing and a name of a layer little (which of `w1` and `w3` is the gate?), so the module is tried: a copy of
it whose layers are exchanged for tiny random ones has to agree with the formula. That takes no real weights, works on `meta`,
and fails for everything that does more than the formula says (dropout, clamping, another activation).
"""

import copy
from collections.abc import Callable
from itertools import permutations
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HIDDEN, ROWS = 8, 24, 5


class GatedMLP(NamedTuple):
    """Names of the layers of one gated MLP, relative to it."""

    gate: str
    up: str
    down: str


def find_gated_mlp(module: nn.Module, activation: Callable[[Tensor], Tensor] = F.silu) -> GatedMLP | None:
    """Which of the module's own three linear layers is what; None if it is no gated MLP of that kind, without biases."""
    linears = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
    others = [child for child in module.children() if not isinstance(child, nn.Linear)]
    if len(linears) != 3 or any(True for other in others for _ in other.parameters()) or module._parameters:
        return None
    if any(layer.bias is not None or _watched(layer) for layer in linears.values()):
        return None
    shapes = {name: tuple(layer.weight.shape) for name, layer in linears.items()}
    for gate, up, down in permutations(linears):
        if shapes[gate] == shapes[up] == shapes[down][::-1] and _agrees(
            module, found := GatedMLP(gate, up, down), activation
        ):
            return found
    return None


def _watched(module: nn.Module) -> bool:
    """Whether hooks would miss a call that does not happen any more."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _agrees(module: nn.Module, names: GatedMLP, activation: Callable[[Tensor], Tensor]) -> bool:
    generator = torch.Generator("cpu").manual_seed(0)
    tiny = {name: nn.Linear(WIDTH, HIDDEN, bias=False, device="meta") for name in (names.gate, names.up)}
    tiny[names.down] = nn.Linear(HIDDEN, WIDTH, bias=False, device="meta")
    for layer in tiny.values():
        layer.weight = nn.Parameter(torch.randn(layer.weight.shape, generator=generator, device="cpu"))
    trial = copy.copy(module)  # shares nothing that is written: the dictionaries below are its own
    trial._modules = {**module._modules, **tiny}
    trial._forward_hooks, trial._forward_pre_hooks = type(module._forward_hooks)(), type(module._forward_pre_hooks)()
    x = 3 * torch.randn(1, ROWS, WIDTH, generator=generator, device="cpu")
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        gate, up, down = (tiny[name] for name in names)
        right = down(activation(gate(x)) * up(x))
        try:
            got = trial(x)
        except Exception:  # it wants other arguments or shapes
            return False
    return (
        isinstance(got, torch.Tensor) and got.shape == right.shape and torch.allclose(got, right, rtol=1e-4, atol=1e-4)
    )
