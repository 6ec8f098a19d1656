"""Tensor parallelism: split the matrices of a module over the ranks that share a row of data, by a plan of names.

Megatron's scheme (arXiv:1909.08053): of two matrices in a row the first is split by its outputs, the second by its inputs, so
one reduction behind the second is all that the ranks have to say to each other. With sequence parallelism
(arXiv:2205.05198) what lies between the pairs, norms and residual stream, is split along the tokens instead of being
repeated on every rank. Plans are in `tensor_plan`.

Modules that no entry names are repeated on all tensor ranks, and must see the same values there. Whether they do shows in
their gradients, which `check_repeated` compares once: a plan with a hole trains without an error otherwise, and wrongly.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils._pytree import tree_map_only

from lightning_fms.distributed.tensor_plan import TOKENS, Plan, Style, find_plan, parts, regex, style_of


class Split:
    """A plan matched with a module.

    Args:
        module: the root.
        plan: see `tensor_plan.find_plan`.
        size: tensor ranks.

    Raises:
        ValueError: no plan, an entry that names nothing, an unknown style, or sizes that do not divide.
    """

    def __init__(self, module: nn.Module, plan: Plan | str, size: int) -> None:
        modules = dict(module.named_modules())
        self.source, entries = find_plan(modules, plan)
        self.styles: dict[str, list[ParallelStyle]] = {}
        for pattern, style in entries.items():
            named = [name for name in modules if re.fullmatch(regex(pattern), name)]
            if not named:
                raise ValueError(
                    f"tensor_plan: {pattern!r} names no module; `*` stands for one part of a name, and the parts at the top "
                    f"are {', '.join(n for n in modules if n and n.count('.') < 2)}"
                )
            for name in named:
                _check_sizes(name, modules[name], style, size)
                self.styles[name] = [style_of(part, pattern) for part in parts(style)]

    def __len__(self) -> int:
        return len(self.styles)

    def apply(self, members: Iterable[nn.Module], names: Mapping[nn.Module, str], mesh: DeviceMesh) -> None:
        """Split some modules in place; all their parameters must be real, and the same on all ranks.

        Args:
            members: modules, of which the plan may name some.
            names: of all modules, by which the plan knows them.
            mesh: one dimension, the tensor ranks.

        Raises:
            ValueError: a parameter that two modules share, and that they would split differently.
        """
        members = list(members)
        split: dict[nn.Parameter, nn.Parameter] = {}
        for member in members:
            before = dict(member._parameters)
            for style in self.styles.get(names[member], ()):
                parallelize_module(member, mesh, style)
                if hasattr(style, "scatters_sequence"):
                    member.register_forward_pre_hook(_check_tokens(mesh.size()), prepend=True)
            for key, old in before.items():
                new = member._parameters[key]
                if old is not None and new is not None and new is not old:
                    member._parameters[key] = _tied(split.setdefault(old, new), new, f"{names[member]}.{key}")
        for member in members:
            for key, old in member._parameters.items():
                if old is not None and old in split:
                    raise ValueError(
                        f"tensor_plan: {names[member]}.{key} is shared with a module that the plan splits; name both"
                    )


def wait_at(blocks: Iterable[nn.Module]) -> None:
    """Let compiled blocks take only tensors that have arrived.

    The split modules give asynchronous ones, and a compiled graph that one enters loses its gradient (torch 2.14, found by the
    parity tests; no error).
    """

    def arrived(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tree_map_only(AsyncCollectiveTensor, torch.clone, (args, kwargs))

    for block in blocks:
        block.register_forward_pre_hook(arrived, with_kwargs=True)


def check_repeated(parameters: Iterable[tuple[str, nn.Parameter]], mesh: DeviceMesh) -> None:
    """Compare the gradients of what every tensor rank has a copy of; called once, before the first optimizer step.

    Args:
        parameters: with their names, the same ones on all ranks.
        mesh: one dimension, the tensor ranks.

    Raises:
        ValueError: gradients differ, so some module that no entry names sees a part of the data.
    """
    repeated = [(name, p.grad) for name, p in parameters if p.grad is not None and not _is_split(p, mesh)]
    if not repeated:
        return
    locals_ = [g.to_local() if isinstance(g, DTensor) else g for _, g in repeated]
    sums = torch.stack([torch.stack((g.double().sum(), g.double().norm())) for g in locals_])
    least, most = sums.clone(), sums.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN, mesh.get_group())
    dist.all_reduce(most, dist.ReduceOp.MAX, mesh.get_group())
    # Another order of summing moves the last digits; another part of the data moves the first.
    odd = ((most - least).abs().amax(1) > 0.05 * most[:, 1]).tolist()
    names = [name for (name, _), differs in zip(repeated, odd, strict=True) if differs]
    if names:
        raise ValueError(
            f"tensor_plan: the gradient of {names[0]} ({len(names)} in all) differs between tensor ranks, which hold a copy each: "
            "it sees split tokens or features; give its module a style (norms: 'sequence_parallel'), or gather before it"
        )


def _is_split(parameter: nn.Parameter, mesh: DeviceMesh) -> bool:
    """Whether the tensor ranks have different parts of a parameter, or DTensor takes care of its gradient."""
    names = mesh.mesh_dim_names
    assert names is not None
    return isinstance(parameter, DTensor) and names[0] in (parameter.device_mesh.mesh_dim_names or ())


def _check_sizes(name: str, module: nn.Module, style: Style, size: int) -> None:
    for part in parts(style):
        if not isinstance(part, str) or part in ("sequence_parallel", "gather_sequence"):
            continue
        if not isinstance(module, nn.Linear | nn.Embedding):
            raise ValueError(
                f"tensor_plan: {name} is a {type(module).__name__}; {part!r} is for nn.Linear or nn.Embedding"
            )
        # What is gathered again, or never leaves the module, may be split unevenly: a vocabulary.
        if part == "colwise" or part.startswith("rowwise"):
            dimension = 0 if part == "colwise" else 1
            if (length := module.weight.shape[dimension]) % size:
                raise ValueError(
                    f"tensor_plan: {name}, {part!r}: {length} {('outputs', 'inputs')[dimension]} do not divide by {size} "
                    "tensor ranks; change the model's width or the number of ranks"
                )


def _check_tokens(size: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def check(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        tokens = inputs[0].shape[TOKENS]
        if tokens % size:
            raise ValueError(
                f"rows of {tokens} tokens do not divide by {size} tensor ranks, between which the plan splits them; "
                f"change seq_len to a multiple of {size}"
            )

    return check


def _tied(first: nn.Parameter, new: nn.Parameter, name: str) -> nn.Parameter:
    """The one parameter of modules that share it."""
    if isinstance(first, DTensor) and isinstance(new, DTensor) and first.placements != new.placements:
        raise ValueError(
            f"tensor_plan: {name} is shared with another module that splits it as {first.placements}, not {new.placements}; "
            "give both a style that splits the same dimension"
        )
    return first
