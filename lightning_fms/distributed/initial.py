"""Weights of a new run from somewhere else: a checkpoint of ours, a folder of safetensors, or a plain Lightning file.

Only weights are taken; optimizer, step and data begin anew. Everything is compared before a weight is touched, and each rank
copies its part: slices of a checkpoint, or one whole tensor at a time of other files.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_fms.distributed import checkpoint, commit, safetensors_folder, state
from lightning_fms.distributed.commit import CheckpointError
from lightning_fms.distributed.weight_names import match

# Shapes by saved name, and what copies saved tensors into targets by saved name.
_Opened = tuple[dict[str, torch.Size], Callable[[Mapping[str, Tensor]], None]]


def load_weights(path: Path, module: nn.Module, strict: bool = True) -> int:
    """Copy weights into a module in place; returns their number. Called on all ranks.

    Args:
        path: a committed checkpoint, a safetensors file or folder, or a file of `torch.save` with a `state_dict`.
        module: shows its shards, or its fp32 masters.
        strict: refuse tensors that are missing or over.

    Raises:
        CheckpointError: not found, damaged, or of another model; no weight was touched.
    """
    path, opened_by = checkpoint.everywhere(lambda: _find(path) if checkpoint.rank_in() == 0 else None)[0]
    if opened_by == "committed":
        checkpoint.verify(path)
    shapes, copy = checkpoint.read_everywhere(lambda: _OPEN[opened_by](path))
    own = {n: t for n, t in state.module_state(module).items() if isinstance(t, Tensor) and not state.is_extra(n)}
    ties = _ties(module)
    names = match(shapes, own, ties)
    found = {names.get(name, name): shape for name, shape in shapes.items()}
    wanted = {n: t.shape for n, t in own.items() if n in found or ties.get(n) not in found}
    state.compare(found, wanted, strict, str(path))
    # Where a folder has both names of a tied weight, the first is the weight.
    targets = {name: own[mine].detach() for name, mine in names.items() if ties.get(mine) not in found}
    copy(targets)
    return len(targets)


def _ties(module: nn.Module) -> dict[str, str]:
    """Names of parameters that are the same as one before, and the name of that."""
    first: dict[nn.Parameter, str] = {}
    named = [(state.clean_name(n), p) for n, p in module.named_parameters(remove_duplicate=False)]
    return {name: first[p] for name, p in named if first.setdefault(p, name) != name}


def _find(path: Path) -> tuple[Path, str]:
    if safetensors_folder.is_safetensors(path):
        return path, "safetensors"
    found = commit.resolve(path)
    if not found.exists():
        raise CheckpointError(f"{path}: nothing there; give a checkpoint, or a file or folder of safetensors")
    if found.is_dir() and not any((found / name).exists() for name in (commit.COMMIT, commit.MANIFEST, ".metadata")):
        raise CheckpointError(
            f"{path}: holds neither a checkpoint nor safetensors; give the folder of one (a run has its checkpoints in "
            "<run>/checkpoints/step-<n>.ckpt), or a file or folder of safetensors"
        )
    return found, "committed" if found.is_dir() else "file"


def _open_committed(path: Path) -> _Opened:
    metadata = {
        n.removeprefix("model."): e for n, e in checkpoint.read_metadata(path).items() if n.startswith("model.")
    }
    shapes = {n: e.size for n, e in metadata.items() if not state.is_extra(n)}
    return shapes, lambda targets: checkpoint.load_tensors(path, {f"model.{n}": t for n, t in targets.items()})


def _open_safetensors(path: Path) -> _Opened:
    entries = safetensors_folder.entries(path)

    def copy(targets: Mapping[str, Tensor]) -> None:
        for name, tensor in safetensors_folder.read(entries, list(targets)):
            state.copy_whole(targets[name], tensor)

    return {n: e.shape for n, e in entries.items()}, copy


def _open_file(path: Path) -> _Opened:
    checkpoint.check_plain_file(path)
    content = checkpoint.load_plain_file(path)
    tensors = {state.clean_name(n): t for n, t in content.get("state_dict", content).items() if isinstance(t, Tensor)}

    def copy(targets: Mapping[str, Tensor]) -> None:
        for name, target in targets.items():
            state.copy_whole(target, tensors[name])

    return {n: t.shape for n, t in tensors.items()}, copy


_OPEN: dict[str, Callable[[Path], _Opened]] = {
    "committed": _open_committed, "safetensors": _open_safetensors, "file": _open_file,
}  # fmt: skip
