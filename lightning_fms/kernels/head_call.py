"""One call of an output head whose result is wanted later: its inputs, and whether they are still what they were.

Problem: logits that are computed later must be those of the call. Until then an optimizer step, a write or FSDP's reshard
may change or free the hidden states and the weight.

Idea: remember autograd's version counters and compare them before each use; memory that was freed shows in its size.

Trade-off: a write through `.data` moves no counter and is not seen.
"""

import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_fms.kernels.gemm_dtype import gemm_dtype
from lightning_fms.kernels.linear import linear


class Source:
    """One call of the head: its inputs as they were, and the real logits once somebody needed them."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, loss_options: dict[str, Any]):
        self.hidden, self.weight, self.bias, self.loss_options = hidden, weight, bias, loss_options
        self.dtype = gemm_dtype(hidden)
        self.grad = torch.is_grad_enabled()
        self.versions = [_version(t) for t in self.inputs]
        self.views: weakref.WeakSet[Any] = weakref.WeakSet()
        self.changed = False  # written, hooked, or its memory handed out: only the real logits are true from here on

    @property
    def inputs(self) -> list[Tensor]:
        """Hidden states, weight and, if there is one, bias."""
        return [t for t in (self.hidden, self.weight, self.bias) if t is not None]

    def check(self) -> None:
        """Make sure that the inputs are what they were.

        Raises:
            RuntimeError: one of them changed or was freed.
        """
        for tensor, version in zip(self.inputs, self.versions, strict=True):
            name = "weight" if tensor is self.weight else "bias" if tensor is self.bias else "input"
            if _version(tensor) != version:
                raise RuntimeError(
                    f"the output head's {name} changed after these logits were made and before they were used; use the "
                    "logits before the optimizer step, or switch to real ones: TritonKernels(linear_cross_entropy=False)"
                )
            if tensor.numel() and not tensor.untyped_storage().size():
                raise RuntimeError(
                    f"the output head's {name} was resharded after these logits were made and before they were used; "
                    "use the logits inside the step, or switch to real ones: TritonKernels(linear_cross_entropy=False)"
                )

    @contextmanager
    def modes(self, detached: bool = False) -> Generator[None, None, None]:
        """Autograd's modes at the call, whatever they are where the logits are looked at.

        A look inside `torch.inference_mode` must not leave an inference tensor behind for later, differentiable uses.
        """
        with torch.inference_mode(self.hidden.is_inference()), torch.set_grad_enabled(self.grad and not detached):
            yield

    def project(self, hidden: Tensor, detached: bool) -> Tensor:
        """Real logits of `hidden`, as the head would have computed them at its call."""
        self.check()
        with self.modes(detached), torch.autocast(hidden.device.type, enabled=False):
            w, b = self.weight.to(self.dtype), None if self.bias is None else self.bias.to(self.dtype)
            return linear(hidden.to(self.dtype), w, b, self.loss_options.get("backend", "auto"))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


__all__ = ["Source"]
