"""Activation checkpointing of blocks: recompute a block's forward in backward instead of keeping its activations.

`full` recomputes every block (about a third more compute, activations of one block at a time). `selective` lies between: every
n-th block, or, given operators to save, every block but for the outputs of those, which are the expensive ones: with matrix
products and attention saved, what is recomputed is cheap elementwise work (arXiv:2205.05198). `budget` leaves the choice to
the compiler, which solves for the cheapest recomputation that keeps a share of the activations.

The block's `forward` is wrapped in place, so that parameter names stay what the user wrote. Applied before compilation: the
compiler then sees the recomputation (`compile(checkpoint(block))`), while the reverse would hide the block's operations from
it (pytorch/pytorch#161889). The reverse it is all the same where an older compiler would keep what is to be recomputed, see
`kept_by_the_compiler`.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

MODES = ("none", "full", "selective", "budget")
# What is worth keeping: products and attention. Some exist on GPUs only, or in some releases.
COMPUTE = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten._scaled_mm",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
)


def checkpoint_blocks(
    blocks: Mapping[str, nn.Module],
    mode: str = "none",
    every: int = 2,
    save_ops: Sequence[str] | str | None = None,
    where: Callable[[nn.Module], bool] = lambda block: True,
) -> list[str]:
    """Wrap the `forward` of the chosen blocks in place; returns their names.

    Args:
        blocks: the model's blocks by name.
        mode: `none` and `budget` wrap nothing; `full`; `selective`: every `every`-th block, the first one included, or every
            block if `save_ops` are given.
        every: distance of recomputed blocks under `selective`.
        save_ops: operators whose outputs are kept under `selective`, as `aten.mm` or `library.name`; 'compute' is `COMPUTE`.
        where: of the chosen blocks, those for which this holds.

    Raises:
        ValueError: an unknown mode or operator, or `every` < 2.
    """
    check_mode(mode, every, save_ops)
    chosen = [name for name in chosen_blocks(list(blocks), mode, every, save_ops) if where(blocks[name])]
    context = functools.partial(create_selective_checkpoint_contexts, _overloads(save_ops)) if save_ops else None
    for name in chosen:
        block = blocks[name]
        block.forward = _recomputed(block.forward, context)
    return chosen


def chosen_blocks(
    names: Sequence[str], mode: str, every: int = 2, save_ops: Sequence[str] | str | None = None
) -> list[str]:
    """The blocks that a mode recomputes, of all `names` in order; see `checkpoint_blocks`."""
    step = {"none": 0, "budget": 0, "full": 1, "selective": 1 if save_ops else every}[mode]
    return list(names[::step]) if step else []


def kept_by_the_compiler(block: nn.Module) -> bool:
    """Whether the compiler would keep what parts of `block` save for backward, although it is told to recompute the block.

    Before torch 2.14 it did so for what an `autograd.Function` saves; a part that computes by one says `computes_by_function`.
    Such a block is recomputed as a whole, outside of what is compiled.
    """
    older = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 14)
    return older and any(getattr(part, "computes_by_function", False) for part in block.modules())


def check_mode(mode: str, every: int = 2, save_ops: Sequence[str] | str | None = None, budget: float = 0.5) -> None:
    """Refuse what cannot be (ValueError)."""
    if mode not in MODES:
        raise ValueError(f"activation_checkpointing={mode!r}: choose one of {', '.join(MODES)}")
    if every < 2:
        raise ValueError(f"checkpoint_every={every}: 'selective' needs 2 or more ('full' is every block)")
    if save_ops and mode != "selective":
        raise ValueError(f"{save_ops=} does nothing under activation_checkpointing={mode!r}; set it to 'selective'")
    if not 0 <= budget <= 1:
        raise ValueError(f"activation_budget={budget}: give the share of the activations to keep, from 0 to 1")
    if save_ops:
        _overloads(save_ops)


def set_budget(share: float) -> Callable[[], None]:
    """Let the compiler keep this share of a graph's activations, in all graphs from now on; returns what undoes it."""
    before = functorch_config.activation_memory_budget
    functorch_config.activation_memory_budget = share

    def undo() -> None:
        functorch_config.activation_memory_budget = before

    return undo


def _overloads(names: Sequence[str] | str) -> list[Any]:
    """The operators of some names in all their overloads."""
    if isinstance(names, str):
        if names != "compute":
            raise ValueError(f"save_ops={names!r}: give 'compute', or a list of operators such as [aten.mm]")
        found = [_overloads_of(name) for name in COMPUTE]
    else:
        found = [_overloads_of(name) for name in names]
        for name, overloads in zip(names, found, strict=True):
            if not overloads:
                raise ValueError(
                    f"save_ops: there is no operator {name!r} here; name one as torch.ops does, e.g. 'aten.mm'"
                )
    return [overload for overloads in found for overload in overloads]


def _overloads_of(name: str) -> list[Any]:
    library, _, operator = name.replace("::", ".").partition(".")
    packet = getattr(getattr(torch.ops, library), operator, None) if operator else None
    return [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []


def _recomputed(forward, context):  # type: ignore[no-untyped-def]
    options = {"context_fn": context} if context is not None else {}
    if context is not None and "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters:  # newer torch
        options["respect_saved_tensors_hooks"] = True  # what is saved can be moved, see `offload`

    @functools.wraps(forward)
    def recomputed(*args, **kwargs):  # type: ignore[no-untyped-def]
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return recomputed
