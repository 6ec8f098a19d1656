"""Shard any module with FSDP2, group by group, so that memory never holds more than one unsharded block.

Groups are what one all-gather brings: each block, each embedding outside the blocks, and the root with everything else
(final norm and head stay there, unsharded until backward, because a fused linear-cross-entropy reads the head's weight
after its forward). A parameter that is tied across groups cannot be split between them: such a group stays in the root.

The root is the whole LightningModule. Its `forward` is not what Lightning calls, so the step methods are registered as
forward methods of their own. Before a group is sharded it is materialised (if it was on `meta`) or made equal to
rank 0's copy (if it was not): initial weights never depend on the number of ranks, and replicas cannot start apart.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from lightning_fms.distributed.materialize import Materializer, on_meta
from lightning_fms.fsdp_parameters import fsdp_parameters

STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")


def choose_groups(module: nn.Module, blocks: Mapping[str, nn.Module]) -> tuple[dict[str, nn.Module], list[str]]:
    """Submodules that get a group of their own, by name, and one line for each that has to stay in the root."""
    embeddings = {name: m for name, m in module.named_modules() if isinstance(m, nn.Embedding)}
    inside = tuple(f"{name}." for name in blocks)
    candidates = {n: m for n, m in embeddings.items() if not n.startswith(inside)} | dict(blocks)
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    groups, notes = {}, []
    for name, candidate in candidates.items():
        foreign = [n for p in candidate.parameters() for n in names_of[p] if not n.startswith(f"{name}.")]
        if foreign:
            notes.append(f"{name} stays in the root group: it shares a parameter with {foreign[0]}")
        else:
            groups[name] = candidate
    return groups, notes


def shard_module(
    module: nn.Module,
    groups: Mapping[str, nn.Module],
    mesh: DeviceMesh,
    device: torch.device,
    materializer: Materializer,
    policy: MixedPrecisionPolicy,
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
    split: Callable[[Iterable[nn.Module], Mapping[nn.Module, str]], None] | None = None,
) -> None:
    """Apply `fully_shard` in place to each group and then to the root, and register the step methods.

    Args:
        module: the root; the LightningModule.
        groups: from `choose_groups`.
        mesh: one dimension (FSDP) or two (HSDP).
        device: of this rank.
        materializer: for tensors on `meta`.
        policy: precision of gathered parameters and reduced gradients.
        reshard_after_forward: free a block's parameters after its forward and gather them again in backward (less
            memory, one more all-gather). The root is always kept until backward.
        cpu_offload: keep shards and optimizer state in host memory.
        split: called with a group's modules, which are real by then, and the names of all modules: splits some between
            tensor ranks.
    """
    offload = CPUOffloadPolicy(pin_memory=True) if cpu_offload else OffloadPolicy()
    names = {m: name for name, m in module.named_modules()}
    done: set[nn.Module] = set()
    for group, reshard in [(g, reshard_after_forward) for g in groups.values()] + [(module, None)]:
        if group is not module:
            group.forward = _unaliased(group.forward)
        members = [m for m in group.modules() if m not in done]
        _fill_or_copy(members, names, device, materializer)
        if split is not None:
            split(members, names)
        fully_shard(group, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)
        done.update(members)
    for method in STEP_METHODS:
        if hasattr(module, method):
            register_fsdp_forward_method(module, method)


def check_prefetch(depth: int) -> None:
    """Refuse what is no number of groups (ValueError)."""
    if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
        raise ValueError(f"prefetch={depth!r}: give the number of groups to gather ahead, 1 or more")


def prefetch_groups(module: nn.Module, groups: Mapping[str, nn.Module], depth: int) -> None:
    """Gather the parameters of the next `depth` groups while one computes, forward and backward.

    FSDP gathers one ahead by itself. More hides gathers that are longer than a group's compute (small batches, slow links), and
    takes the memory of as many gathered groups. Groups are taken to run in the order of their names in the model; where they do
    not, results are the same, and gathers come at the wrong time.
    """
    order: list[Any] = list(groups.values())
    module.set_modules_to_forward_prefetch(order[:depth])  # type: ignore[operator]
    for i, group in enumerate(order):
        group.set_modules_to_forward_prefetch(order[i + 1 : i + 1 + depth])
        group.set_modules_to_backward_prefetch(order[max(0, i - depth) : i][::-1])


def _unaliased(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Copy outputs that are views: an in-place operation on one would drop FSDP's hook and give wrong gradients."""

    @functools.wraps(forward)
    def unaliased(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda t: t if t._base is None else t.clone(), output)

    return unaliased


def copy_views_of_groups(root: nn.Module) -> list[nn.Module]:
    """Wrap the `forward` of each group below the root as `shard_module` does, on a module that is sharded already."""
    groups: list[nn.Module] = [group for group in fsdp_modules(root) if group is not root]  # type: ignore[misc]
    for group in groups:
        group.forward = _unaliased(group.forward)
    return groups


def silence_view_warning() -> Callable[[], None]:
    """FSDP warns about views at each forward. Groups return none (see above), and the root is safe by its loss.

    Returns what undoes it.
    """
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    entry = warnings.filters[0]

    def undo() -> None:
        with contextlib.suppress(ValueError):  # someone else reset them
            warnings.filters.remove(entry)  # type: ignore[attr-defined]
            warnings._filters_mutated()  # type: ignore[attr-defined]

    return undo


def _fill_or_copy(
    members: Iterable[nn.Module], names: Mapping[nn.Module, str], device: torch.device, materializer: Materializer
) -> None:
    for member in members:
        member._apply(lambda t: t if t.is_meta else t.to(device), recurse=False)
        own = [*member.parameters(recurse=False), *member.buffers(recurse=False)]
        copy_from_rank_zero(tensor for tensor in own if not tensor.is_meta)
        if on_meta(member, recurse=False):
            materializer.fill([(names[member], member)])


def copy_from_rank_zero(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrite plain tensors with those of rank 0, in place. Tensors that are already distributed are left alone."""
    for tensor in tensors:
        if not isinstance(tensor, DTensor):
            dist.broadcast(tensor.detach(), src=0)


def is_sharded(module: nn.Module) -> bool:
    """Whether the module was sharded already, by us or by the user in `configure_model`."""
    return any(isinstance(m, FSDPModule) for m in module.modules()) or any(
        isinstance(p, DTensor) for p in module.parameters()
    )


def fsdp_modules(module: nn.Module) -> Iterator[FSDPModule]:
    """All sharded groups, the root first."""
    return (m for m in module.modules() if isinstance(m, FSDPModule))


def reshard(module: nn.Module) -> None:
    """Free every unsharded parameter; the module then shows its shards. Does nothing where they are sharded."""
    for group in fsdp_modules(module):
        group.reshard()


def drop_held_gradients(module: nn.Module, parameters: Collection[torch.Tensor] | None = None) -> None:
    """Forget gradients that were held back for a reduction that never came (a window given up half-way).

    Args:
        module: the root.
        parameters: sharded parameters that are concerned; None is all.
    """
    for parameter in _fsdp_parameters(module, parameters):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def mark_changed(module: nn.Module, parameters: Collection[torch.Tensor] | None = None) -> None:
    """Tell autograd that gathered weights will differ: a graph older than the change raises in backward, as in eager.

    An all-gather writes new values into the same tensors without moving their version counters.

    Args:
        module: the root, resharded.
        parameters: sharded parameters that changed; None is all.
    """
    for parameter in _fsdp_parameters(module, parameters):
        if hasattr(parameter, "_unsharded_param"):
            torch.autograd.graph.increment_version(parameter._unsharded_param)


def _fsdp_parameters(module: nn.Module, chosen: Collection[torch.Tensor] | None) -> Iterator[Any]:
    return (p for p in fsdp_parameters(module) if chosen is None or p.sharded_param in chosen)
