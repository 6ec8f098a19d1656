"""Between Lightning's checkpoint dict and storage: a committed folder, or one plain Lightning file.

Both ways of loading do the same in the same order: check everything that can be wrong (damage, another model, other
optimizers), and only then touch a weight. A folder is read slice by slice into what each rank holds; a plain file is mapped into
memory by every rank, which copies its part.

Where weights are averaged, the checkpoint dict has the average as `state_dict`, and beside it what training goes on with as
`current_model_state`, as Lightning's callback leaves it. So who reads weights alone gets the average.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_fms.distributed import checkpoint, commit, state
from lightning_fms.distributed.average import AverageOfShards
from lightning_fms.distributed.commit import CheckpointError

# First part of tensors' names: weights (their average, where one is kept), and the weights that training goes on with then.
MODEL, CURRENT = "model", "current"


def save_folder(path: Path, checkpoint_state: dict[str, Any], foreign: bool = False) -> None:
    """Write Lightning's checkpoint dict as a committed folder. Called on all ranks; errors as in `checkpoint.save`.

    Args:
        path: the folder.
        checkpoint_state: as Lightning makes it.
        foreign: see `checkpoint.serialize`.
    """
    tensors, plain = split(checkpoint_state)
    content = serialized(plain, foreign)
    checkpoint.save(path, tensors, content, step=int(checkpoint_state["global_step"]))


def serialized(plain: Mapping[str, Any], foreign: bool, group: dist.ProcessGroup | None = None) -> bytes:
    """What is no tensor of the model, as rank 0 will write it; nothing on other ranks. Called on all ranks.

    Raises ValueError, on all ranks, where it could not be read back.
    """
    checkpoint.everywhere(lambda: state.refuse_shards(plain), group)
    mine = checkpoint.rank_in(group) == 0
    return checkpoint.read_everywhere(lambda: checkpoint.serialize(plain, foreign) if mine else b"", group)


def save_file(path: Path, checkpoint_state: dict[str, Any], foreign: bool = False) -> None:
    """The same as one plain file, written by rank 0. Called on all ranks."""
    optimizers = [state.by_number(s) for s in checkpoint_state.pop("optimizer_states", [])]
    plain = {**checkpoint_state, **({"optimizer_states": optimizers} if optimizers else {})}
    checkpoint.everywhere(lambda: state.refuse_shards(plain))
    checkpoint.everywhere(
        lambda: checkpoint.write_plain_file(path, plain, foreign) if checkpoint.rank_in() == 0 else None
    )


def load(
    path: Path,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    strict: bool,
    weights_only: bool | None,
    average: AverageOfShards | None = None,
) -> dict[str, Any]:
    """Load a checkpoint of either kind, wherever a crash left it; see `load_folder`. Called on all ranks."""
    path, is_folder = checkpoint.everywhere(lambda: _find(path) if checkpoint.rank_in() == 0 else None)[0]
    kind = load_folder if is_folder else load_file
    rest, averaged = kind(path, module, optimizers, strict, weights_only, average)
    if average is not None:
        _tell_of_average(rest, module, average if averaged else None)
    return rest


def _find(path: Path) -> tuple[Path, bool]:
    found = commit.resolve(path)
    return found, found.is_dir()


def load_folder(
    path: Path,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    strict: bool,
    weights_only: bool | None,
    average: AverageOfShards | None,
) -> tuple[dict[str, Any], bool]:
    """Load a committed folder in place. Called on all ranks.

    Args:
        path: the folder.
        module: shows its shards, or its fp32 masters.
        optimizers: none for evaluation; then their state is not read.
        strict: refuse missing and unexpected tensors.
        weights_only: see `checkpoint.load_state`.
        average: takes the average, if the checkpoint has one; the module then gets the weights of training, and else the average.

    Returns:
        The rest of the state, and whether there was an average and something to take it.

    Raises:
        CheckpointError: damaged, or of another model; nothing was touched.
    """
    checkpoint.verify(path)
    rest = checkpoint.read_everywhere(lambda: checkpoint.load_state(path, weights_only))
    saved = checkpoint.read_everywhere(lambda: checkpoint.read_metadata(path))
    holds = any(_is_of(CURRENT, name) for name in saved)
    averaged = average is not None and holds
    targets: dict[str, torch.Tensor] = {}
    for part, holder in _holders(module, average if averaged else None, holds and bool(optimizers)).items():
        shapes = {n: e.size for n, e in _of(part, saved).items() if not state.is_extra(n)}
        own = _own_tensors(holder, shapes, strict, path)
        targets.update({f"{part}.{n}": t.detach() for n, t in own.items() if n in shapes})
    extra = {
        n: torch.zeros(e.size, dtype=e.properties.dtype) for n, e in _of(MODEL, saved).items() if state.is_extra(n)
    }
    targets.update({f"{MODEL}.{name}": tensor for name, tensor in extra.items()})
    numbered = _matched(rest.pop("optimizer_states", None), optimizers, path)
    for optimizer, one in zip(optimizers, numbered, strict=False):
        state.check_groups(module, optimizer, one)
    filled = [_allocate(module, i, one, saved, targets) for i, one in enumerate(numbered)]
    checkpoint.load_tensors(path, targets)
    state.load_extra_state(module, {**rest.pop("extra_state", {}), **extra})
    for optimizer, one in zip(optimizers, filled, strict=False):
        state.load_optimizer_state(module, optimizer, one)
    return rest, averaged


def load_file(
    path: Path,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    strict: bool,
    weights_only: bool | None,
    average: AverageOfShards | None,
) -> tuple[dict[str, Any], bool]:
    """The same for one plain file, of `checkpoint_format='consolidated'` or of stock Lightning."""
    checkpoint.everywhere(lambda: checkpoint.check_plain_file(path) if checkpoint.rank_in() == 0 else None)
    rest = checkpoint.read_everywhere(lambda: checkpoint.load_plain_file(path, weights_only))
    _check_kind(rest, path)
    parts = {MODEL: rest.pop("state_dict"), CURRENT: rest.pop("current_model_state", None)}
    averaged = average is not None and parts[CURRENT] is not None
    copies = []
    goes_on = parts[CURRENT] is not None and bool(optimizers)
    for part, holder in _holders(module, average if averaged else None, goes_on).items():
        saved = {state.clean_name(n): v for n, v in parts[part].items()}
        shapes = {n: t.shape for n, t in _tensors(saved).items()}
        own = _own_tensors(holder, shapes, strict, path)
        copies += [(own[name], saved[name]) for name in own.keys() & shapes.keys()]
    numbered = _matched(rest.pop("optimizer_states", None), optimizers, path)
    named = [state.by_name(module, o, one) for o, one in zip(optimizers, numbered, strict=False)]
    for target, whole in copies:
        state.copy_whole(target, whole)
    weights = parts[MODEL] if parts[CURRENT] is None else parts[CURRENT]
    state.load_extra_state(module, {state.clean_name(n): v for n, v in weights.items() if state.is_extra(n)})
    parameters = {name: parameter for parameter, name in state.parameter_names(module).items()}
    for optimizer, one in zip(optimizers, named, strict=False):
        state.load_optimizer_state(module, optimizer, _distribute(one, parameters))
    return rest, averaged


def _check_kind(content: Mapping[str, Any], path: Path) -> None:
    """Refuse a file of `torch.save` that Lightning did not write: there is nothing to go on from in it."""
    if not isinstance(content.get("state_dict"), Mapping):
        raise CheckpointError(
            f"{path} holds no 'state_dict', so it is no checkpoint of Lightning, and nothing can go on from it. To begin a new run "
            "with its weights: fms-train weights=<path>, or InitialWeights(path) in your Trainer"
        )


def _holders(module: nn.Module, average: AverageOfShards | None, goes_on: bool) -> dict[str, nn.Module]:
    """Which module takes which part of a checkpoint.

    goes_on: training goes on from one that has an average. Without anything to take that, it goes on all the same from the weights
    of training, to which the optimizer's state belongs.
    """
    if average is not None:
        return {CURRENT: module, MODEL: average.module}
    return {CURRENT if goes_on else MODEL: module}


def _own_tensors(
    holder: nn.Module, saved: Mapping[str, torch.Size], strict: bool, path: Path
) -> dict[str, torch.Tensor]:
    """The holder's tensors by name, which fit the saved ones of that name; CheckpointError where they do not."""
    own = _tensors(state.module_state(holder))
    state.compare(saved, {name: tensor.shape for name, tensor in own.items()}, strict, str(path))
    return own


def _tell_of_average(rest: dict[str, Any], module: nn.Module, average: AverageOfShards | None) -> None:
    """Hand what is loaded already to Lightning's callback under its own keys: it copies each tensor to itself.

    Without an average in the checkpoint it takes the weights for one.
    """
    if average is None:
        rest["state_dict"] = _tensors(state.module_state(module))
        return
    with torch.no_grad():
        average.n_averaged.copy_(rest["averaging_state"]["n_averaged"])
    rest["state_dict"], rest["current_model_state"] = average.module.state_dict(), module.state_dict()


def _matched(saved: list[Any] | None, optimizers: Sequence[Optimizer], path: Path) -> list[Any]:
    if not optimizers or saved is None:
        return []
    if len(saved) != len(optimizers):
        raise CheckpointError(f"{path} holds {len(saved)} optimizers, this run has {len(optimizers)}")
    return saved


def _is_of(part: str, name: str) -> bool:
    return name.startswith(f"{part}.")


def _of(part: str, named: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(f"{part}."): value for name, value in named.items() if _is_of(part, name)}


def _tensors(named: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {n: t for n, t in named.items() if isinstance(t, torch.Tensor) and not state.is_extra(n)}


def split(checkpoint_state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors for DCP under flat names, and the rest with the names of the optimizer tensors it belongs to."""
    weights, current = checkpoint_state.pop("state_dict"), checkpoint_state.pop("current_model_state", None)
    if current is not None:  # an average has no extra state
        weights = {**{n: v for n, v in current.items() if state.is_extra(n)}, **_tensors(weights)}
    tensors = {f"{MODEL}.{name}": value for name, value in weights.items() if isinstance(value, torch.Tensor)}
    tensors |= {f"{CURRENT}.{name}": value for name, value in _tensors(current or {}).items()}
    rest = {**checkpoint_state, "extra_state": {n: v for n, v in weights.items() if not isinstance(v, torch.Tensor)}}
    if "optimizer_states" in checkpoint_state:
        rest["optimizer_states"] = [
            {
                "param_groups": optimizer["param_groups"],
                "state": {
                    name: {key: None if isinstance(value, torch.Tensor) else value for key, value in values.items()}
                    for name, values in optimizer["state"].items()
                },
            }
            for optimizer in checkpoint_state["optimizer_states"]
        ]
        for index, optimizer in enumerate(checkpoint_state["optimizer_states"]):
            for name, values in optimizer["state"].items():
                for key, value in values.items():
                    if isinstance(value, torch.Tensor):
                        tensors[f"optimizer.{index}.{name}.{key}"] = value
    return tensors, rest


def _allocate(
    module: nn.Module,
    index: int,
    saved: Mapping[str, Any],
    metadata: Mapping[str, Any],
    targets: dict[str, torch.Tensor],
) -> dict[str, Any]:
    """An optimizer's saved state with memory for its tensors, which is also entered into `targets` to be read."""
    parameters = {name: parameter for parameter, name in state.parameter_names(module).items()}
    filled: dict[str, Any] = {"param_groups": saved["param_groups"], "state": {}}
    for name, values in saved["state"].items():
        if name not in parameters:
            continue
        filled["state"][name] = dict(values)
        for key in values:
            entry = metadata.get(flat := f"optimizer.{index}.{name}.{key}")
            if entry is not None:
                tensor = state.like(parameters[name], entry.size, entry.properties.dtype)
                filled["state"][name][key] = targets[flat] = tensor
    return filled


def _distribute(named: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Whole state tensors of a plain file, placed like their parameters."""

    def place(parameter: torch.Tensor, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        target = state.like(parameter, value.shape, value.dtype)
        state.copy_whole(target, value)
        return target

    placed = {n: {k: place(parameters[n], v) for k, v in values.items()} for n, values in named["state"].items()}
    return {"state": placed, "param_groups": named["param_groups"]}
