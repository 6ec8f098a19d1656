"""FP8 training of the linear layers of any module, through torchao.

Idea. A linear layer is three GEMMs a step: output, gradient of the input, gradient of the weight. FP8 doubles the
speed of each if both operands fit in 8 bits: e4m3 (3 bits of mantissa) for activations and weights, e5m2 (more range)
for tensorwise gradients. To fit, a tensor is scaled by max / amax before the cast and the product is scaled back.
Weights, their gradients and the optimizer stay as they were; only the GEMMs see FP8.

Recipes, from fast to exact:
- `tensorwise`: one scale a tensor. One outlier costs everyone precision; works with FP8 all-gather.
- `rowwise`: one scale a row, a power of two; outliers stay local. More casts.
- `rowwise_gw_hp`: as rowwise, with the gradient of the weight in bf16, where small values matter most.

How it converts: in place, by giving the layer another class, as `fully_shard` does. torchao's own function makes new
modules instead. In place, nothing that a user or a strategy holds goes stale: Parameters, names, hooks, references,
`reset_parameters` for meta devices, parameters that FSDP already manages. A second call finds nothing to do, and
`restore` gives the plain layer back. State dicts are those of the plain module, both ways.

With FP8 all-gather (FSDP2, tensorwise) the sharded weight itself is cast and half the bytes travel. For that the
Parameter has to be wrapped in torchao's tensor subclass, so it must happen before optimizers are made. Scales are then
computed once after an optimizer step (`precompute_scales`), by one all-reduce for all weights, and dropped when weights
are loaded (`drop_scales`): a stale scale overflows silently.

Sources: Micikevicius et al., FP8 Formats for Deep Learning (arXiv:2209.05433); torchao.float8; the
all-gather extension of FSDP2 (arXiv:2411.00284).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_fms.precision._torchao import (
    Float8Linear,
    Float8LinearConfig,
    ScalingType,
    WeightWithDynamicFloat8CastTensor,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)
from lightning_fms.precision.converted import check_tokens, converted_class
from lightning_fms.precision.selection import Decision

RECIPES = {"tensorwise": "tensorwise", "rowwise": "rowwise", "rowwise_gw_hp": "rowwise_with_gw_hp"}


def float8_config(recipe: str, *, emulate: bool = False, all_gather: bool = False) -> Float8LinearConfig:
    """torchao's configuration of a recipe.

    Args:
        recipe: `tensorwise | rowwise | rowwise_gw_hp`.
        emulate: compute the GEMMs in fp32 on operands rounded to FP8: the same errors, on any device, slowly.
        all_gather: cast weights before FSDP gathers them; `tensorwise` only.
    """
    config = Float8LinearConfig.from_recipe_name(RECIPES[recipe])
    return dataclasses.replace(config, emulate=emulate, enable_fsdp_float8_all_gather=all_gather)


class Float8Forward(Float8Linear):
    """torchao's layer with what it lacks: autocast on any device, and an error that says which batch cannot work."""

    is_float8 = True
    plain_class: type[nn.Linear]

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], in the dtype that `nn.Linear` would give.

        Raises:
            ValueError: when training on a number of tokens that is no multiple of 16.
        """
        weight_grad_in_fp8 = self.config.cast_config_input_for_grad_weight.scaling_type is not ScalingType.DISABLED
        if weight_grad_in_fp8:
            check_tokens(input)
        device = input.device.type
        if not torch.is_autocast_enabled(device):
            return super().forward(input)
        # Autocast would cast FP8 tensors too, which torchao cannot do under `inference_mode`.
        input = input.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            return super().forward(input)


def is_float8(module: nn.Module) -> bool:
    """True for a layer that `convert` has converted."""
    return isinstance(module, Float8Forward)


def convert(
    module: nn.Module, decisions: Sequence[Decision], config: Float8LinearConfig, shards: int = 1
) -> list[Decision]:
    """Convert the chosen layers of `module` in place; layers that are converted already stay as they are.

    Args:
        module: any module, on any device, before `torch.compile`; with FP8 all-gather also before `fully_shard`.
        decisions: from `selection.decide`.
        config: from `float8_config`.
        shards: number of ranks that a weight will be sharded over. A weight whose rows do not divide by it is gathered
            in bf16: torchao's extension needs equal shards.

    Returns:
        The decisions, with a note where a weight is gathered in bf16 although FP8 all-gather is on.
    """
    noted = []
    for decision in decisions:
        linear = module.get_submodule(decision.name)
        if decision.converted:
            assert isinstance(linear, nn.Linear)
            hinder = _hinders_fp8_gather(linear, shards) if config.enable_fsdp_float8_all_gather else ""
            if hinder:
                decision = dataclasses.replace(decision, note=f"gathered in bf16: {hinder}")
            if not is_float8(linear):
                gather = config.enable_fsdp_float8_all_gather and not hinder
                _convert_layer(linear, dataclasses.replace(config, enable_fsdp_float8_all_gather=gather))
        noted.append(decision)
    return noted


def _hinders_fp8_gather(linear: nn.Linear, shards: int) -> str:
    if isinstance(linear.weight, DTensor) and _wrapped(linear.weight) is None:
        return "sharded before it was converted"
    return f"rows do not divide by {shards}" if linear.weight.shape[0] % shards else ""


def _convert_layer(linear: nn.Linear, config: Float8LinearConfig) -> None:
    converted = convert_to_float8_training(linear, config=config)  # a new module that shares the Parameters
    added = {key: value for key, value in converted.__dict__.items() if key not in linear.__dict__}
    if config.enable_fsdp_float8_all_gather:
        linear.weight = converted.weight
        linear.register_state_dict_post_hook(_plain_state)
        linear.register_load_state_dict_post_hook(_drop_scale)
    linear.__dict__.update(added, _added_by_float8=tuple(added))
    linear.__class__ = converted_class(Float8Forward, type(linear))


def restore(module: nn.Module) -> None:
    """Give every converted layer its plain class back; weights wrapped for FP8 all-gather stay converted."""
    for layer in _float8_layers(module):
        if _wrapped(layer.weight) is None and hasattr(layer, "plain_class"):
            layer.__class__ = type(layer).plain_class  # type: ignore[assignment]
            for key in layer.__dict__.pop("_added_by_float8"):
                del layer.__dict__[key]


def precompute_scales(module: nn.Module) -> None:
    """Scales of all weights that are gathered in FP8, by one all-reduce; call it on all ranks after an optimizer step.

    Without it each weight has an all-reduce of its own in the forward pass.
    """
    precompute_float8_dynamic_scale_for_fsdp(module)


def drop_scales(module: nn.Module) -> None:
    """Forget precomputed scales: call it when weights changed other than by an optimizer step."""
    for layer in _float8_layers(module):
        _drop_scale(layer)


def _float8_layers(module: nn.Module) -> list[Float8Forward]:
    return [layer for layer in module.modules() if isinstance(layer, Float8Forward)]


def _wrapped(weight: Tensor) -> Any:
    """torchao's tensor subclass inside a weight that is gathered in FP8, else `None`."""
    local = weight._local_tensor if isinstance(weight, DTensor) else weight.data
    return local if isinstance(local, WeightWithDynamicFloat8CastTensor) else None


def _drop_scale(layer: nn.Module, *_: Any) -> None:
    assert isinstance(layer, nn.Linear)
    if (wrapped := _wrapped(layer.weight)) is not None:
        wrapped._precomputed_scale = None


def _plain_state(layer: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Put the plain tensor (the same storage) in the state dict, so that a checkpoint needs no torchao to be read."""
    weight = state_dict[key := f"{prefix}weight"]
    if (wrapped := _wrapped(weight)) is None:
        return
    plain = wrapped._tensor.detach()
    if isinstance(weight, DTensor):
        plain = DTensor.from_local(
            plain, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )
    state_dict[key] = plain
