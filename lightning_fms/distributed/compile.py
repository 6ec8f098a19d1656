"""Compile each block in place, and run what cannot be compiled.

One graph per block class instead of one per model: compilation takes seconds, every layer reuses it, and the user's
`training_step` with its logging stays ordinary Python. The block's `forward` is replaced, not the block: names in
checkpoints stay clean, and hooks (FSDP's all-gather, the user's own) run outside the graph. This is `Module.compile` one
level further in. That method compiles `Module._call_impl`, one code object for all classes, which shares the
recompilation limit among them and puts hooks into the traced frame; a failure there would leave FSDP's state half-way.

`torch.compile` reports a block that cannot be traced (or a machine without a compiler) at the first call. The fallback
lives there: that class runs uncompiled from then on, with the reason in one line; `strict` raises instead.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

log = logging.getLogger(__name__)


def compile_blocks(
    blocks: Mapping[str, nn.Module],
    options: Mapping[str, Any] | None = None,
    strict: bool = False,
    report: Callable[[str], None] | None = None,
) -> list[str]:
    """Compile the `forward` of each block in place with `fullgraph=True`; returns the names.

    Args:
        blocks: the model's blocks by name.
        options: keyword arguments for `torch.compile`, e.g. `{"backend": "aot_eager"}` or `{"mode": "max-autotune"}`.
        strict: raise where a block cannot be compiled, instead of running its class uncompiled.
        report: called with one line for each class that falls back.
    """
    failed: set[type] = set()
    for block in blocks.values():
        eager = block.forward
        compiled = torch.compile(eager, **{"fullgraph": True, **(options or {})})
        if not strict:
            compiled = _with_fallback(compiled, eager, type(block), failed, report)
        block.forward = compiled
    return list(blocks)


def _with_fallback(
    compiled: Callable[..., Any],
    eager: Callable[..., Any],
    owner: type,
    failed: set[type],
    report: Callable[[str], None] | None,
) -> Callable[..., Any]:
    @functools.wraps(eager)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if owner in failed:
            return eager(*args, **kwargs)
        try:
            return compiled(*args, **kwargs)
        except TorchDynamoException as error:  # raised while tracing, before anything of the block ran
            failed.add(owner)
            line = f"{owner.__name__} runs uncompiled: {_first_line(error)}"
            log.warning(line)
            if report is not None:
                report(line)
        return eager(*args, **kwargs)

    return forward


def _first_line(error: Exception) -> str:
    """What went wrong, with the compiler's explanation, which names the function, where it gives one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    explained = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")]
    return ": ".join([*lines[:1], *explained[:1]]) or type(error).__name__
