"""Puts another function in the place of `scaled_dot_product_attention`, for the length of a run.

Problem: attention is not a module but a call in the middle of somebody's forward, and that forward may be compiled with
`fullgraph=True`: a mode or a tensor subclass around it would cost every other operation something, and the compiler its cache.

Idea: the call finds its function by name, so the names are what changes: `torch.nn.functional`'s, and every loaded module's
that imported the function itself. The compiler traces the replacement like any Python function, inside the same graph.

Limit: a reference kept elsewhere, in a table or a closure, is not found, and keeps PyTorch's function.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch.nn.functional as F
from torch import Tensor

SDPA = F.scaled_dot_product_attention  # PyTorch's own, whatever stands in its place later
_OURS = __name__.rpartition(".")[0]


class ReplacedSDPA:
    """Call `replace`, and `restore` at the end; both may come twice."""

    def __init__(self) -> None:
        self._places: list[tuple[dict[str, Any], str]] = []

    @property
    def active(self) -> bool:
        """Whether something stands in the place of PyTorch's function."""
        return bool(self._places)

    @property
    def free(self) -> bool:
        """Whether PyTorch's own function stands where it belongs."""
        return F.scaled_dot_product_attention is SDPA

    def replace(self, function: Callable[..., Tensor]) -> None:
        """Let `function` be called instead: it takes SDPA's arguments.

        Raises:
            RuntimeError: something else stands there already.
        """
        if self._places:
            return
        if not self.free:
            raise RuntimeError(
                f"torch.nn.functional.scaled_dot_product_attention is already {F.scaled_dot_product_attention!r}: end "
                "the other run first, or leave attention alone: TritonKernels(attention='off')"
            )
        for module in _modules():
            names = [name for name, value in module.items() if value is SDPA]
            self._places += [(module, name) for name in names]
        for module, name in self._places:
            module[name] = function

    def restore(self) -> None:
        """Put PyTorch's function back."""
        while self._places:
            module, name = self._places.pop()
            module[name] = SDPA


def _modules() -> list[dict[str, Any]]:
    """Globals of `torch.nn.functional` and of every loaded module that is neither PyTorch's nor one of ours that call it."""
    loaded = [
        vars(module)
        for name, module in list(sys.modules.items())
        if type(module) is ModuleType and name.split(".")[0] != "torch" and not name.startswith(_OURS)
    ]
    return [vars(F), *loaded]


__all__ = ["SDPA", "ReplacedSDPA"]
