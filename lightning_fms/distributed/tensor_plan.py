"""Plans of tensor parallelism: which module of a model is split how, by name.

In the words that `transformers` uses where it has one:

| style | module | input -> output |
|---|---|---|
| `colwise` | linear | whole -> split features |
| `colwise_gather_output` | linear (a head) | whole -> whole |
| `rowwise` | linear | split features -> whole |
| `rowwise_scatter_sequence` | linear | split features -> split tokens |
| `embedding_rowwise`, `embedding_rowwise_scatter_sequence` | embedding | whole ids -> whole, or split tokens |
| `sequence_parallel` | norm, dropout | split tokens -> split tokens |
| `gather_sequence` | any, before its own style | its first tensor argument: split tokens -> whole |

Styles are PyTorch's `ParallelStyle`s; an object of that class can stand in a plan as well.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

Style = str | ParallelStyle | Sequence[str | ParallelStyle]
Plan = Mapping[str, Style]
PLAN_ATTRIBUTE = "tensor_parallel_plan"
TOKENS = 1  # dimension of the tokens in [B, T, ...]

# Plans by the names that a decoder's parts have. With tokens split between the blocks.
LLAMA: Plan = {
    "embedding": "embedding_rowwise_scatter_sequence",
    "layers.*.attention_norm": "sequence_parallel",
    "layers.*.attention": "gather_sequence",
    "layers.*.attention.q_proj": "colwise",
    "layers.*.attention.k_proj": "colwise",
    "layers.*.attention.v_proj": "colwise",
    "layers.*.attention.o_proj": "rowwise_scatter_sequence",
    "layers.*.ffn_norm": "sequence_parallel",
    "layers.*.ffn": "gather_sequence",
    "layers.*.ffn.gate_proj": "colwise",
    "layers.*.ffn.up_proj": "colwise",
    "layers.*.ffn.down_proj": "rowwise_scatter_sequence",
    "norm": "sequence_parallel",
    "head": ("gather_sequence", "colwise_gather_output"),
}
PLANS = {"llama": LLAMA}


class GatherSequence(ParallelStyle):
    """The first tensor argument of a module is whole inside, and its gradient is split again outside."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            for index, value in enumerate(args):
                if isinstance(value, torch.Tensor):
                    return (*args[:index], _whole(value, device_mesh), *args[index + 1 :]), kwargs
            name = next(name for name, value in kwargs.items() if isinstance(value, torch.Tensor))
            return args, {**kwargs, name: _whole(kwargs[name], device_mesh)}

        module.register_forward_pre_hook(gather, with_kwargs=True, prepend=True)
        return module


def _whole(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    # Left a DTensor: several projections of it then add up their gradients before one reduction.
    split = DTensor.from_local(x, mesh, [Shard(TOKENS)], run_check=False)
    return split.redistribute(placements=[Replicate()])


def _scatter(style: ParallelStyle) -> ParallelStyle:
    style.scatters_sequence = True  # type: ignore[attr-defined]
    return style


STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),  # transformers' older name of it
    "rowwise": RowwiseParallel,
    "rowwise_scatter_sequence": lambda: RowwiseParallel(output_layouts=Shard(TOKENS)),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise_scatter_sequence": lambda: _scatter(
        RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(TOKENS))
    ),
    "sequence_parallel": lambda: SequenceParallel(sequence_dim=TOKENS, use_local_output=True),
    "gather_sequence": GatherSequence,
}


def find_plan(modules: Mapping[str, nn.Module], plan: Plan | str) -> tuple[str, dict[str, Style]]:
    """Say where a plan is from, and return it with full names.

    Args:
        modules: all modules by name.
        plan: full names and styles; the name of a shipped plan; or 'auto': the attribute `tensor_parallel_plan` of the module or
            of its parts (names relative to the part), else a shipped plan that fits, else what a `transformers` model says of
            itself.

    Raises:
        ValueError: there is none.
    """
    if not isinstance(plan, str):
        return "as given", dict(plan)
    if plan in PLANS:
        found = _shipped(modules, plan)
        if not found:
            raise ValueError(f"tensor_plan={plan!r}: no part of this model has the modules {', '.join(PLANS[plan])}")
        return plan, found
    if plan != "auto":
        raise ValueError(f"tensor_plan={plan!r}: give 'auto', {', '.join(map(repr, PLANS))}, or a mapping of names")
    if own := _of_parts(modules, PLAN_ATTRIBUTE):
        return f"`{PLAN_ATTRIBUTE}` of the module", own
    for name in PLANS:
        if found := _shipped(modules, name):
            return name, found
    if theirs := _of_parts(modules, "_tp_plan"):
        return "of transformers", theirs
    raise ValueError(
        "tensor parallelism needs a plan, and this model has none: give tensor_plan={module name: style}, or an attribute "
        f"`{PLAN_ATTRIBUTE}` on the module; styles are {', '.join(STYLES)}"
    )


def _shipped(modules: Mapping[str, nn.Module], plan: str) -> dict[str, Style]:
    """A shipped plan at every part of the model that has all its modules."""
    found: dict[str, Style] = {}
    for root in modules:
        inside = {_join(root, pattern): style for pattern, style in PLANS[plan].items()}
        if all(any(re.fullmatch(regex(p), name) for name in modules) for p in inside):
            found.update(inside)
    return found


def _of_parts(modules: Mapping[str, nn.Module], attribute: str) -> dict[str, Style]:
    """Plans that parts of the model carry; the outermost ones."""
    found: dict[str, Style] = {}
    taken: list[str] = []
    for name, module in modules.items():
        plan = getattr(module, attribute, None)
        if isinstance(plan, Mapping) and plan and not any(name.startswith(f"{outer}.") or not outer for outer in taken):
            taken.append(name)
            found.update({_join(name, pattern): style for pattern, style in plan.items()})
    return found


def _join(root: str, pattern: str) -> str:
    return f"{root}.{pattern}" if root else pattern


def regex(pattern: str) -> str:
    """Expression for the full names that an entry means; `*` stands for one part of a name."""
    return re.escape(pattern).replace(r"\*", "[^.]+")


def parts(style: Style) -> list[str | ParallelStyle]:
    """The styles of an entry, in order."""
    return [style] if isinstance(style, str | ParallelStyle) else list(style)


def style_of(style: str | ParallelStyle, pattern: str) -> ParallelStyle:
    """The object of a style; ValueError for an unknown name, with the entry that has it."""
    if isinstance(style, ParallelStyle):
        return style
    if style not in STYLES:
        raise ValueError(f"tensor_plan: {pattern}: {style!r} is no style; give one of {', '.join(STYLES)}")
    return STYLES[style]()
