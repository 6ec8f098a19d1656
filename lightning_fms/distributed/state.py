"""What a checkpoint holds of a module and its optimizers, under names that do not depend on how the run was set up.

Tensors go by qualified parameter name: wrappers that put themselves into names (`torch.compile` of a submodule,
checkpoint wrappers) are stripped. Optimizer state is read from `optimizer.state` as it is. PyTorch's own reader runs a
step with zero gradients where the state is empty, which moves AdamW's step counter and changes training
(pytorch/pytorch#164929); here a parameter without state simply has none, when saved and when loaded.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_fms.distributed.commit import CheckpointError

_LIKE_THE_PARAMETER = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "sum"}
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def clean_name(name: str) -> str:
    """Qualified name without the parts that wrappers add."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def module_state(module: nn.Module) -> dict[str, Any]:
    """`module.state_dict()` under clean names: tensors (shards as DTensors) and extra state, not copied."""
    return {clean_name(name): value for name, value in module.state_dict().items()}


def is_extra(name: str) -> bool:
    """Whether a state dict's entry is a submodule's `get_extra_state`, which may be any object, also a tensor."""
    return name == "_extra_state" or name.endswith("._extra_state")


def load_extra_state(module: nn.Module, extra: Mapping[str, Any]) -> None:
    """Hand extra state back to the submodules that made it."""
    for name, submodule in module.named_modules():
        key = clean_name(f"{name}." if name else "") + "_extra_state"
        if key in extra:
            submodule.set_extra_state(extra[key])


def optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """State of an optimizer by parameter name: `{"state": {name: {key: value}}, "param_groups": [{..., "params": names}]}`.

    A pure read. Raises ValueError where the optimizer holds a parameter that is not in the module.
    """
    names = parameter_names(module)
    groups = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({**settings, "params": [_name_of(p, names) for p in group["params"]]})
    state = {_name_of(p, names): dict(values) for p, values in optimizer.state.items() if values}
    return {"state": state, "param_groups": groups}


def check_groups(module: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Refuse an optimizer whose parameter groups differ from the saved ones; to be called before a weight is touched.

    Args:
        module: names the parameters.
        optimizer: the one to be loaded.
        saved: in the form of `optimizer_state`.

    Raises:
        CheckpointError: another number of groups, or other parameters in one.
    """
    names = parameter_names(module)
    _check_number(optimizer, saved)
    for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        if odd := sorted({_name_of(p, names) for p in group["params"]} ^ set(saved_group["params"])):
            raise CheckpointError(f"an optimizer's parameter groups differ from the checkpoint's at {_first(odd)}")


def _check_number(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    if len(saved["param_groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(saved['param_groups'])} parameter groups, "
            f"this {type(optimizer).__name__} has {len(optimizer.param_groups)}"
        )


def load_optimizer_state(module: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load what `optimizer_state` gave, matched by parameter name. Values must fit the parameters' placement.

    Raises CheckpointError where the parameter groups differ from the saved ones (see `check_groups`).
    """
    check_groups(module, optimizer, saved)
    names = parameter_names(module)
    state, groups, index = {}, [], 0
    for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        wanted = [_name_of(p, names) for p in group["params"]]
        settings = {key: value for key, value in saved_group.items() if key != "params"}
        groups.append({**settings, "params": list(range(index, index + len(wanted)))})
        for name in wanted:
            if name in saved["state"]:
                state[index] = dict(saved["state"][name])
            index += 1
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def by_name(module: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's own numbered state dict (a plain Lightning checkpoint's) under parameter names.

    Numbers say nothing about which parameter is meant, so sizes of groups and shapes of moments have to agree
    (CheckpointError).
    """
    names = parameter_names(module)
    _check_number(optimizer, saved)
    name_of: dict[Any, str] = {}
    groups = []
    for i, (group, saved_group) in enumerate(zip(optimizer.param_groups, saved["param_groups"], strict=True)):
        ours, numbers = [_name_of(p, names) for p in group["params"]], saved_group["params"]
        if len(ours) != len(numbers):
            raise CheckpointError(
                f"an optimizer's parameter groups differ from the checkpoint's: group {i} has {len(numbers)} "
                f"parameters there, {len(ours)} here"
            )
        name_of.update(zip(numbers, ours, strict=True))
        groups.append({**saved_group, "params": ours})
    shapes = {name: parameter.shape for parameter, name in names.items()}
    state = {name_of[n]: values for n, values in saved["state"].items()}
    for name, values in state.items():
        for key in sorted(_LIKE_THE_PARAMETER & values.keys()):
            if isinstance(values[key], torch.Tensor) and values[key].shape != shapes[name]:
                raise CheckpointError(
                    f"{name}: the checkpoint's optimizer has {key} of shape {tuple(values[key].shape)} for it, its own "
                    f"is {tuple(shapes[name])}; were parameters given to the optimizer in another order?"
                )
    return {"state": state, "param_groups": groups}


def by_number(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `by_name`: numbered as `torch.optim` does, for one plain file."""
    order = [name for group in saved["param_groups"] for name in group["params"]]
    number = {name: i for i, name in enumerate(order)}
    groups = [{**group, "params": [number[n] for n in group["params"]]} for group in saved["param_groups"]]
    return {"state": {number[n]: values for n, values in saved["state"].items()}, "param_groups": groups}


def compare(saved: Mapping[str, torch.Size], own: Mapping[str, torch.Size], strict: bool, source: str) -> None:
    """Refuse a checkpoint of another model, naming the first tensors that differ (CheckpointError).

    Args:
        saved: names and global shapes in the checkpoint.
        own: those of the model.
        strict: also refuse missing and unexpected names, not only other shapes.
        source: for the message.
    """
    lines = [f"{n}: {tuple(saved[n])} saved, {tuple(own[n])} here" for n in own if n in saved and saved[n] != own[n]]
    if strict:
        lines += [f"{name}: only in the model" for name in own if name not in saved]
        lines += [f"{name}: only in the checkpoint" for name in saved if name not in own]
    if lines:
        raise CheckpointError(
            f"{source} is of another model; {len(lines)} tensors differ: {_first(lines, '; ')}; give the settings of the model "
            "that was trained, or start a new run"
        )


def like(parameter: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Memory for one state tensor: placed like its parameter where it has its shape, else whole on the CPU."""
    if shape == parameter.shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(shape, dtype=dtype)


@torch.no_grad()
def copy_whole(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy a whole tensor, which every rank has, into a tensor or into this rank's shard of it."""
    if isinstance(target, DTensor):
        source = whole.to(device=target.device, dtype=target.dtype)
        shard = distribute_tensor(source, target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(shard.to_local())
    else:
        target.copy_(whole)


def gather_whole(value: Any, keep: bool = True) -> Any:
    """Nested dicts and lists with every tensor whole and on the CPU (a collective for DTensors, the same on all ranks).

    Args:
        value: what to gather.
        keep: False on ranks that only take part; they get tensors without memory (`meta`), one is gathered at a time.
    """

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
        return whole.cpu().clone() if keep else torch.empty_like(whole, device="meta")

    return map_tensors(gather, value)


def refuse_shards(value: Any, place: str = "state") -> None:
    """Raise ValueError where a nested state holds a DTensor: pickled, it would be this rank's part only."""
    if isinstance(value, DTensor):
        raise ValueError(
            f"checkpoint: {place} is a sharded tensor outside weights and optimizers, of which only rank 0's part "
            f"would be saved. Save it whole (`.full_tensor()`, on all ranks), or keep it in a buffer of the module"
        )
    items = value.items() if isinstance(value, dict) else enumerate(value) if type(value) in (list, tuple) else ()
    for key, item in items:
        refuse_shards(item, f"{place}[{key!r}]")


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Apply a function to every tensor in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_tensors(function, item) for item in value)
    return value


def parameter_names(module: nn.Module) -> dict[torch.Tensor, str]:
    """Clean name of each parameter; a tied one goes by its first."""
    return {parameter: clean_name(name) for name, parameter in module.named_parameters()}


def _name_of(parameter: torch.Tensor, names: Mapping[torch.Tensor, str]) -> str:
    if parameter not in names:
        raise ValueError(
            f"an optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the LightningModule: "
            f"make it an attribute of the module, and create optimizers in `configure_optimizers` only"
        )
    return names[parameter]


def _first(items: list[str], separator: str = ", ", most: int = 4) -> str:
    return separator.join(items[:most]) + (f"{separator}and {len(items) - most} more" if len(items) > most else "")
