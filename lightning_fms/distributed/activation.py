"""Activation checkpointing of blocks: recompute a block's forward in backward instead of keeping its activations.

`full` recomputes every block (about a third more compute, activations of one block at a time), `selective` every n-th
(a dial between the two). The block's `forward` is wrapped in place, so that parameter names stay what the user wrote.
Applied before compilation: the compiler then sees the recomputation (`compile(checkpoint(block))`), while the reverse
would hide the block's operations from it (pytorch/pytorch#161889).
"""

import functools
from collections.abc import Mapping

from torch import nn
from torch.utils.checkpoint import checkpoint

MODES = ("none", "full", "selective")


def checkpoint_blocks(blocks: Mapping[str, nn.Module], mode: str = "none", every: int = 2) -> list[str]:
    """Wrap the `forward` of the chosen blocks in place; returns their names.

    Args:
        blocks: the model's blocks by name.
        mode: `none`, `full`, or `selective`: every `every`-th block, the first one included.
        every: distance of recomputed blocks under `selective`.

    Raises:
        ValueError: an unknown mode, or `every` < 2.
    """
    check_mode(mode, every)
    step = {"none": 0, "full": 1, "selective": every}[mode]
    chosen = [name for i, name in enumerate(blocks) if step and i % step == 0]
    for name in chosen:
        block = blocks[name]
        block.forward = _recomputed(block.forward)
    return chosen


def check_mode(mode: str, every: int) -> None:
    """Refuse an unknown mode (ValueError)."""
    if mode not in MODES:
        raise ValueError(f"activation_checkpointing={mode!r}: choose one of {', '.join(MODES)}")
    if every < 2:
        raise ValueError(f"checkpoint_every={every}: 'selective' needs 2 or more ('full' is every block)")


def _recomputed(forward):  # type: ignore[no-untyped-def]
    @functools.wraps(forward)
    def recomputed(*args, **kwargs):  # type: ignore[no-untyped-def]
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return recomputed
