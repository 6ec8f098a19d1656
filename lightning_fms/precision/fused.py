"""The `fused` recipe: linear layers and gated MLPs of any module on the products of `row_scaled`.

Layers are converted in place, by another class, as in `float8`; Parameters, names and references stay. A gated MLP whose three
layers are converted becomes one operation: its widest activations then exist in FP8 only (`swiglu_rows`).

Weights are rounded once after they changed and not in each micro-batch: `FusedWeights` holds both layouts of each, two bytes a
value, on one device. They are shown to the layers between `FusedWeights.active()`'s ends only, so that a forward at any
other time, a callback's say, finds nothing stale and rounds for itself. Where weights are sharded each forward and backward
rounds what was gathered, and keeps nothing.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_fms.gated_mlp import GatedMLP, find_gated_mlp
from lightning_fms.precision.converted import check_tokens, converted_class
from lightning_fms.precision.row_scaled import QuantizedWeight, empty_weight, gated_mlp, linear, quantize_weight
from lightning_fms.precision.selection import Decision


class FusedLayer(nn.Module):
    """What the converted classes share.

    computes_by_function: their GEMMs are in an `autograd.Function`, see `distributed.activation`.
    """

    computes_by_function = True
    plain_class: type[nn.Module]
    _fused_emulate: bool
    _fused_exact: bool
    _fused_weights: tuple[QuantizedWeight, ...] | None

    def _rows(self, input: Tensor) -> tuple[Tensor, torch.dtype]:
        """(input as [N, D] in what it is rounded from, dtype of the result)."""
        check_tokens(input)
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        return input.reshape(-1, input.shape[-1]), dtype


class FusedLinear(FusedLayer):
    """A linear layer in FP8 with row scales."""

    is_float8 = True
    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], in the dtype that `nn.Linear` would give.

        Raises:
            ValueError: when training on a number of tokens that is no multiple of 16.
        """
        x, dtype = self._rows(input)
        weights = self._fused_weights
        held = None if weights is None else weights[0]
        output = linear(x, self.weight, held, self._fused_emulate, self._fused_exact).to(dtype)
        if self.bias is not None:
            output = output + self.bias.to(dtype)
        return output.view(*input.shape[:-1], -1)


class FusedGatedMLP(FusedLayer):
    """A gated MLP in FP8 with row scales."""

    _fused_names: GatedMLP

    def forward(self, input: Tensor) -> Tensor:
        """[..., D] -> [..., D]; raises as `FusedLinear`."""
        x, dtype = self._rows(input)
        gate, up, down = (_linear(self, name).weight for name in self._fused_names)
        wide, narrow = self._fused_weights or (None, None)
        output = gated_mlp(x, gate, up, down, wide, narrow, self._fused_emulate, self._fused_exact)
        return output.to(dtype).view(input.shape)


def _linear(mlp: nn.Module, name: str) -> nn.Linear:
    layer = mlp.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    return layer


def convert(
    module: nn.Module, decisions: Sequence[Decision], emulate: bool, exact_gradients: bool = False
) -> list[Decision]:
    """Convert the chosen layers of `module` in place, and the gated MLPs that they make up.

    Args:
        module: any module, on any device, before `torch.compile`.
        decisions: from `selection.decide`.
        emulate: round to FP8 and multiply in fp32.
        exact_gradients: see `row_scaled.linear`.

    Returns:
        The decisions, with a note at the layers of a gated MLP.
    """
    chosen = {decision.name for decision in decisions if decision.converted}
    mlps = {}
    for name, candidate in module.named_modules():
        if isinstance(candidate, FusedLayer) or candidate._forward_hooks or candidate._forward_pre_hooks:
            continue
        found = find_gated_mlp(candidate) if "forward" not in candidate.__dict__ else None
        if found is not None and all(f"{name}.{layer}".lstrip(".") in chosen for layer in found):
            mlps[name] = found
    for name in chosen:
        _convert(module.get_submodule(name), FusedLinear, emulate, exact_gradients)
    for name, found in mlps.items():
        mlp = module.get_submodule(name)
        _convert(mlp, FusedGatedMLP, emulate, exact_gradients)
        mlp.__dict__["_fused_names"] = found
    parts = [(name, part) for name, part in module.named_modules() if isinstance(part, FusedGatedMLP)]
    inside = {f"{name}.{layer}".lstrip(".") for name, part in parts for layer in part._fused_names}
    return [dataclasses.replace(d, note="one with its SwiGLU") if d.name in inside else d for d in decisions]


def _convert(layer: nn.Module, kind: type[FusedLayer], emulate: bool, exact: bool) -> None:
    if not isinstance(layer, FusedLayer):
        layer.__class__ = converted_class(kind, type(layer))
        layer.__dict__.update(_fused_emulate=emulate, _fused_exact=exact, _fused_weights=None)


def restore(module: nn.Module) -> None:
    """Give every converted layer its plain class back."""
    for layer in module.modules():
        if isinstance(layer, FusedLayer):
            layer.__class__ = type(layer).plain_class  # type: ignore[assignment]
            for key in [key for key in layer.__dict__ if key.startswith("_fused_")]:
                del layer.__dict__[key]


class FusedWeights:
    """FP8 copies of the weights of converted layers, rounded again when a weight changed.

    A change is seen by the weight's version counter and address, or told by `invalidate`.

    Args:
        module: converted; its weights are real and whole. Layers with sharded weights are left to round for themselves.
    """

    def __init__(self, module: nn.Module) -> None:
        mlps = [part for part in module.modules() if isinstance(part, FusedGatedMLP)]
        inside = {_linear(mlp, name) for mlp in mlps for name in mlp._fused_names}
        self._layers: list[tuple[FusedLayer, list[list[nn.Linear]]]] = []
        for mlp in mlps:
            gate, up, down = (_linear(mlp, name) for name in mlp._fused_names)
            self._add(mlp, [[gate, up], [down]])
        for part in module.modules():
            if isinstance(part, FusedLinear) and part not in inside:
                assert isinstance(part, nn.Linear)
                self._add(part, [[part]])
        self._held: list[tuple[QuantizedWeight, ...]] = []
        self._versions: list[int] = []
        self._addresses: list[int] = []
        self._graph: Any = None
        self._depth = 0

    def _add(self, layer: FusedLayer, groups: list[list[nn.Linear]]) -> None:
        if not any(isinstance(owner.weight, DTensor) for group in groups for owner in group):
            self._layers.append((layer, groups))

    @contextmanager
    def active(self) -> Iterator[None]:
        """The layers compute with the copies inside; may be nested."""
        if self._depth == 0:
            self.refresh()
            for (layer, _), held in zip(self._layers, self._held, strict=True):
                layer._fused_weights = held
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                for layer, _ in self._layers:
                    layer._fused_weights = None

    def invalidate(self) -> None:
        """Weights changed in a way that moves no version counter."""
        self._versions = []
        if self._depth:
            self.refresh()

    def refresh(self) -> None:
        """Round all weights again if one of them changed."""
        weights = [[[owner.weight for owner in group] for group in groups] for _, groups in self._layers]
        flat = [weight for groups in weights for group in groups for weight in group]
        versions, addresses = [weight._version for weight in flat], [weight.data_ptr() for weight in flat]
        if (versions, addresses) == (self._versions, self._addresses):
            return
        if not self._held:
            self._held = [tuple(empty_weight(group) for group in groups) for groups in weights]
        if addresses != self._addresses:
            self._graph = None
        if self._graph is not None:
            self._graph.replay()
        else:
            self._round(weights)
            if flat and flat[0].is_cuda:
                self._graph = self._captured(weights)
        self._versions, self._addresses = versions, addresses

    def _round(self, weights: list[list[list[Tensor]]]) -> None:
        for groups, held in zip(weights, self._held, strict=True):
            for group, into in zip(groups, held, strict=True):
                quantize_weight(group, into)

    def _captured(self, weights: list[list[list[Tensor]]]) -> Any:
        """All launches as one: hundreds of small ones would be issued while the device waits for the first of the step."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._round(weights)
        return graph
