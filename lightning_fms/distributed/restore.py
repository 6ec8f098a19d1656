"""Between Lightning's checkpoint dict and storage: a committed folder, or one plain Lightning file.

Both ways of loading do the same in the same order: check everything that can be wrong (damage, another model, other
optimizers), and only then touch a weight. A folder is read slice by slice into what each rank holds; a plain file is mapped into
memory by every rank, which copies its part.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_fms.distributed import checkpoint, commit, state
from lightning_fms.distributed.commit import CheckpointError


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
    path: Path, module: nn.Module, optimizers: Sequence[Optimizer], strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Load a checkpoint of either kind, wherever a crash left it; see `load_folder`. Called on all ranks."""
    path, is_folder = checkpoint.everywhere(lambda: _find(path) if checkpoint.rank_in() == 0 else None)[0]
    kind = load_folder if is_folder else load_file
    return kind(path, module, optimizers, strict, weights_only)


def _find(path: Path) -> tuple[Path, bool]:
    found = commit.resolve(path)
    return found, found.is_dir()


def load_folder(
    path: Path, module: nn.Module, optimizers: Sequence[Optimizer], strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Load a committed folder in place and return the rest of the state. Called on all ranks.

    Args:
        path: the folder.
        module: shows its shards, or its fp32 masters.
        optimizers: none for evaluation; then their state is not read.
        strict: refuse missing and unexpected tensors.
        weights_only: see `checkpoint.load_state`.

    Raises:
        CheckpointError: damaged, or of another model; nothing was touched.
    """
    checkpoint.verify(path)
    rest = checkpoint.read_everywhere(lambda: checkpoint.load_state(path, weights_only))
    saved = checkpoint.read_everywhere(lambda: checkpoint.read_metadata(path))
    own = {f"model.{n}": t for n, t in _tensors(state.module_state(module)).items()}
    model = {name: entry for name, entry in saved.items() if name.startswith("model.")}
    shapes = {name: entry.size for name, entry in model.items() if not state.is_extra(name)}
    state.compare(_unprefixed(shapes), _unprefixed({n: t.shape for n, t in own.items()}), strict, str(path))
    targets = {n: t.detach() for n, t in own.items() if n in saved}
    extra = {n: torch.zeros(e.size, dtype=e.properties.dtype) for n, e in model.items() if state.is_extra(n)}
    targets.update(extra)
    numbered = _matched(rest.pop("optimizer_states", None), optimizers, path)
    for optimizer, one in zip(optimizers, numbered, strict=False):
        state.check_groups(module, optimizer, one)
    filled = [_allocate(module, i, one, saved, targets) for i, one in enumerate(numbered)]
    checkpoint.load_tensors(path, targets)
    state.load_extra_state(module, {**rest.pop("extra_state", {}), **_unprefixed(extra)})
    for optimizer, one in zip(optimizers, filled, strict=False):
        state.load_optimizer_state(module, optimizer, one)
    return rest


def load_file(
    path: Path, module: nn.Module, optimizers: Sequence[Optimizer], strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """The same for one plain file, of `checkpoint_format='consolidated'` or of stock Lightning."""
    checkpoint.everywhere(lambda: checkpoint.check_plain_file(path) if checkpoint.rank_in() == 0 else None)
    rest = checkpoint.read_everywhere(lambda: checkpoint.load_plain_file(path, weights_only))
    saved = {state.clean_name(n): v for n, v in rest.pop("state_dict").items()}
    own = _tensors(state.module_state(module))
    shapes = {n: t.shape for n, t in _tensors(saved).items()}
    state.compare(shapes, {n: t.shape for n, t in own.items()}, strict, str(path))
    numbered = _matched(rest.pop("optimizer_states", None), optimizers, path)
    named = [state.by_name(module, o, one) for o, one in zip(optimizers, numbered, strict=False)]
    for name in own.keys() & shapes.keys():
        state.copy_whole(own[name], saved[name])
    state.load_extra_state(module, {n: v for n, v in saved.items() if state.is_extra(n)})
    parameters = {name: parameter for parameter, name in state.parameter_names(module).items()}
    for optimizer, one in zip(optimizers, named, strict=False):
        state.load_optimizer_state(module, optimizer, _distribute(one, parameters))
    return rest


def _matched(saved: list[Any] | None, optimizers: Sequence[Optimizer], path: Path) -> list[Any]:
    if not optimizers or saved is None:
        return []
    if len(saved) != len(optimizers):
        raise CheckpointError(f"{path} holds {len(saved)} optimizers, this run has {len(optimizers)}")
    return saved


def _unprefixed(named: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix("model."): value for name, value in named.items()}


def _tensors(named: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {n: t for n, t in named.items() if isinstance(t, torch.Tensor) and not state.is_extra(n)}


def split(checkpoint_state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors for DCP under flat names, and the rest with the names of the optimizer tensors it belongs to."""
    weights = checkpoint_state.pop("state_dict")
    tensors = {f"model.{name}": value for name, value in weights.items() if isinstance(value, torch.Tensor)}
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
