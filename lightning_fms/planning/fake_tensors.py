"""What parts of the suite do with addresses and values, for tensors that have neither; it takes the same memory.

Called once in the process of a probe, which does nothing else afterwards.
"""

import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule

from lightning_fms.distributed import offload, one_pass_optimizer
from lightning_fms.kernels import swap
from lightning_fms.planner.probe import fake_safe_swap
from lightning_fms.planner.tracker import storage_key
from lightning_fms.precision.fused import FusedWeights
from lightning_fms.precision.row_scaled import empty_weight


def accept_fake_tensors() -> None:
    """Let the suite run on fake tensors, for the rest of this process."""
    fake_safe_swap()
    torch.rms_norm = partial(_rms_norm, torch.rms_norm)
    swap._needs_real_logits = _needs_real_logits
    loss: Any = importlib.import_module(
        "lightning_fms.kernels.linear_cross_entropy"
    )  # its package has a function of that name
    loss._is_plain = _is_plain
    one_pass_optimizer._OnePass._takes = _takes  # type: ignore[method-assign]
    one_pass_optimizer._OnePass._count = _count  # type: ignore[method-assign]
    one_pass_optimizer.adam_step = _in_place  # type: ignore[assignment]
    offload.Offload._moves = _moves  # type: ignore[method-assign]
    for name, method in (("add", _add), ("send", _send), ("_copy", _in_place)):
        setattr(offload._Page, name, method)


def _rms_norm(
    plain: Any, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Outside of compiled blocks a GPU has one operation, which keeps its input; elsewhere fp32 copies of it are kept, too."""
    if type(input) is not FakeTensor or weight is None:
        return plain(input, normalized_shape, weight, eps)
    output: Tensor = _RMSNorm.apply(input, weight)
    return output


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(input, weight, input.new_empty(*input.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(input, dtype=torch.promote_types(input.dtype, weight.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        input, weight, _ = ctx.saved_tensors
        return torch.empty_like(input), torch.empty_like(weight)


def _needs_real_logits(head: nn.Linear, input: Tensor) -> bool:
    """As the kernels decide for real tensors; they pass fake ones by."""
    return any(isinstance(m, FSDPModule) for m in head.__dict__[swap._STATE].ancestors)


def _is_plain(*tensors: Tensor) -> bool:
    """Gradients of the loss are scaled in place, as real ones are; what the kernels meet while they are traced is no such thing."""
    return all(type(tensor) is FakeTensor for tensor in tensors)


def _takes(self: Any, param: Tensor, grad: Tensor, mean: Tensor, square: Tensor) -> bool:
    """The kernel steps fp32 parameters; that they are plain tensors it cannot see here."""
    return param.dtype == mean.dtype == square.dtype == torch.float32


def _count(self: Any, params: list[Tensor], steps: list[Tensor]) -> list[int]:
    """A counter's value is not known; all have made one step."""
    return [1] * len(params)


def _in_place(*_: Any) -> None:
    """The kernel of the optimizer makes no tensor."""


def _moves(self: Any, tensor: Tensor) -> bool:
    """As for a plain tensor; of its memory only the size is looked at."""
    return tensor.layout == torch.strided and tensor.numel() * tensor.element_size() >= max(1, self._least_bytes)


def _add(self: Any, tensor: Tensor) -> tuple[Any, int]:
    """The same tensor twice is one, told by its storage instead of its address."""
    key = (storage_key(tensor), tensor.storage_offset(), tensor.dtype, tensor.size(), tensor.stride())
    if key not in self._index:
        self._index[key] = len(self._leaving)
        self._leaving.append(tensor.detach())
        self._versions.append(tensor._version)
    return self, self._index[key]


def _send(self: Any) -> int:
    """What lies on the host is on `meta` here, and counts nowhere."""
    self._host = [torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta") for t in self._leaving]
    return sum(t.numel() * t.element_size() for t in self._host)


class FakeFusedWeights(FusedWeights):
    """FP8 weights that are made once: fake ones have no address by which to know them."""

    def refresh(self) -> None:
        """Make them, and round into them."""
        weights = [[[owner.weight for owner in group] for group in groups] for _, groups in self._layers]
        if not self._held:
            self._held = [tuple(empty_weight(group) for group in groups) for groups in weights]
