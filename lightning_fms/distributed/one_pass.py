"""Adam and AdamW for many tensors in one pass over memory: update, clipping factor and bf16 copy together.

Problem: what follows a backward pass is nothing but memory traffic. PyTorch's fused AdamW moves 28 bytes a parameter (fp32
weight, gradient and two moments read, three of them written), and around it other passes scale the gradients, cast them to
fp32 and round the new weights to the bf16 copies that the next forward computes with: 52 bytes in all.

Idea: one kernel reads the gradient in the dtype that it has (bf16 or fp32), multiplies it by the clipping factor, which
stays on the device, updates weight and moments, and writes the copy from the registers that hold the new weight: 28
bytes with bf16 gradients and copies. One launch does all tensors of a kind: a table holds their addresses and lengths, and a
map says which tensor and which chunk of it a program does. The map depends on the lengths only and stays on the device; the
table is a few kilobytes, sent without waiting when an address has changed (those of gradients may, at every step).

The arithmetic is fp32, in the order of PyTorch's fused kernel. Bias corrections are computed on the host in double precision.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_fms.triton_backend import tl, triton, use_triton

CHUNK, TILE, WARPS = 32768, 2048, 16  # elements of a program, elements at once, warps
BF16_BYTES = 8  # of an access: 4 elements a thread, as of fp32, so that no value has to change threads between them


@dataclass(frozen=True)
class Settings:
    """Hyperparameters of tensors that have made `count` steps, the one to come included.

    Args:
        lr: a number, or a scalar on the tensors' device, which is not waited for.
        betas, eps, weight_decay: as in `torch.optim.Adam`.
        decoupled: decay the weight itself (AdamW) instead of adding to the gradient (Adam).
        count: the step's number, from 1.
    """

    lr: float | Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    count: int

    @property
    def bias_corrections(self) -> tuple[float, float]:
        """Of the mean, and the root of that of the mean square."""
        return 1 - self.betas[0] ** self.count, math.sqrt(1 - self.betas[1] ** self.count)


@dataclass
class Tensors:
    """Equally many of each, in the same order and memory layout.

    Args:
        params, means, squares: fp32; weights, running means of gradients and of their squares. Written.
        grads: all fp32 or all bf16.
        copies: bf16, for the new weights; empty for none.
    """

    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    means: list[Tensor] = field(default_factory=list)
    squares: list[Tensor] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.params)

    def add(self, param: Tensor, grad: Tensor, mean: Tensor, square: Tensor, copy: Tensor | None) -> None:
        """One more of each; all have a copy, or none has."""
        self.params.append(param)
        self.grads.append(grad)
        self.means.append(mean)
        self.squares.append(square)
        if copy is not None:
            self.copies.append(copy)


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    param_ptr,
    grad_ptr,
    mean_ptr,
    square_ptr,
    copy_ptr,
    first,
    count,
    factor,
    step_size,
    decay,
    beta1,
    beta2,
    rest1,
    rest2,
    eps,
    bias2,
    HAS_COPY: tl.constexpr,
    DECOUPLED: tl.constexpr,
    ALIGNED: tl.constexpr,
    BF16_BYTES: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
):
    lane = first + tl.arange(0, TILE)
    params, grads, means, squares = param_ptr + lane, grad_ptr + lane, mean_ptr + lane, square_ptr + lane
    if ALIGNED:
        params, means, squares = tl.multiple_of(params, 16), tl.multiple_of(means, 16), tl.multiple_of(squares, 16)
        grads = tl.multiple_of(grads, 16 if grad_ptr.dtype.element_ty == tl.float32 else BF16_BYTES)
    if MASKED:  # one element an access, because the compiler cannot know where a mask ends
        inside = lane < count
        param, mean = tl.load(params, mask=inside), tl.load(means, mask=inside)
        square, grad = tl.load(squares, mask=inside), tl.load(grads, mask=inside).to(tl.float32)
    else:
        param, mean, square, grad = tl.load(params), tl.load(means), tl.load(squares), tl.load(grads).to(tl.float32)
    grad *= factor
    if DECOUPLED:
        param -= decay * param
    else:
        grad += decay * param
    mean = beta1 * mean + rest1 * grad
    square = beta2 * square + rest2 * grad * grad
    param -= step_size * tl.div_rn(mean, tl.div_rn(tl.sqrt_rn(square), bias2) + eps)
    if MASKED:
        tl.store(params, param, mask=inside)
        tl.store(means, mean, mask=inside)
        tl.store(squares, square, mask=inside)
    else:
        tl.store(params, param)
        tl.store(means, mean)
        tl.store(squares, square)
    if HAS_COPY:
        copies = copy_ptr + lane
        if ALIGNED:
            copies = tl.multiple_of(copies, BF16_BYTES)
        if MASKED:
            tl.store(copies, param.to(tl.bfloat16), mask=inside)
        else:
            tl.store(copies, param.to(tl.bfloat16))


@triton.jit
def _adam_kernel(  # type: ignore[no-untyped-def]
    table_ptr,
    map_ptr,
    factor_ptr,
    lr_ptr,
    step_size,
    decay,
    beta1,
    beta2,
    rest1,
    rest2,
    eps,
    bias2,
    GRAD_BF16: tl.constexpr,
    HAS_COPY: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    LR_ON_DEVICE: tl.constexpr,
    DECOUPLED: tl.constexpr,
    ALIGNED: tl.constexpr,
    BF16_BYTES: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program a chunk. A row of the table: addresses of weight, gradient, mean, square, copy; length."""
    program = tl.program_id(0).to(tl.int64)
    row = table_ptr + tl.load(map_ptr + 2 * program) * 6
    start = tl.load(map_ptr + 2 * program + 1).to(tl.int64) * CHUNK
    param_ptr = tl.load(row).to(tl.pointer_type(tl.float32)) + start
    if GRAD_BF16:
        grad_ptr = tl.load(row + 1).to(tl.pointer_type(tl.bfloat16)) + start
    else:
        grad_ptr = tl.load(row + 1).to(tl.pointer_type(tl.float32)) + start
    mean_ptr = tl.load(row + 2).to(tl.pointer_type(tl.float32)) + start
    square_ptr = tl.load(row + 3).to(tl.pointer_type(tl.float32)) + start
    copy_ptr = tl.load(row + 4).to(tl.pointer_type(tl.bfloat16)) + start
    count = tl.minimum(tl.load(row + 5) - start, CHUNK).to(tl.int32)
    factor = 1.0
    if HAS_FACTOR:
        factor = tl.load(factor_ptr)
    if LR_ON_DEVICE:
        lr = tl.load(lr_ptr).to(tl.float32)
        step_size *= lr
        if DECOUPLED:
            decay *= lr
    whole = count // TILE * TILE
    for first in range(0, whole, TILE):
        _tile(
            param_ptr, grad_ptr, mean_ptr, square_ptr, copy_ptr, first, count, factor, step_size, decay, beta1, beta2,
            rest1, rest2, eps, bias2, HAS_COPY, DECOUPLED, ALIGNED, BF16_BYTES, False, TILE,
        )  # fmt: skip
    if whole < count:
        _tile(
            param_ptr, grad_ptr, mean_ptr, square_ptr, copy_ptr, whole, count, factor, step_size, decay, beta1, beta2,
            rest1, rest2, eps, bias2, HAS_COPY, DECOUPLED, False, BF16_BYTES, True, TILE,
        )  # fmt: skip


class Tables:
    """What the kernel reads beside the tensors, kept on the device from step to step."""

    _LIMIT = 32  # sets of tensors; where others have gradients at every step, old ones go

    def __init__(self) -> None:
        self._kept: dict[object, tuple[list[list[int]], Tensor, bool, Tensor]] = {}

    def of(self, tensors: Tensors) -> tuple[Tensor, bool, Tensor]:
        """Of tensors on one device: the table [tensors, 6], whether all addresses divide by 16, the map [programs, 2]."""
        pointers = [
            [tensor.data_ptr() for tensor in kind]
            for kind in (tensors.params, tensors.grads, tensors.means, tensors.squares, tensors.copies)
        ]
        lengths, device = [param.numel() for param in tensors.params], tensors.params[0].device
        key = device, tuple(lengths), tensors.grads[0].dtype, bool(tensors.copies), CHUNK
        if key not in self._kept:
            if len(self._kept) >= self._LIMIT:
                self._kept.clear()
            self._kept[key] = [], torch.empty(0), False, _send(_chunk_map(lengths), device)
        last, table, aligned, chunk_map = self._kept[key]
        if pointers != last:
            aligned = not any(pointer % 16 for column in pointers for pointer in column)
            columns = [*pointers[:4], pointers[4] or [0] * len(tensors), lengths]
            table = _send(torch.tensor(columns).t().contiguous(), device)
            self._kept[key] = pointers, table, aligned, chunk_map
        return table, aligned, chunk_map


def _chunk_map(lengths: Sequence[int]) -> Tensor:
    """[programs, 2]: which tensor, and which chunk of it."""
    chunks = torch.tensor([-(-length // CHUNK) for length in lengths])
    tensor = torch.repeat_interleave(torch.arange(len(chunks)), chunks)
    first = torch.cumsum(chunks, 0) - chunks
    return torch.stack([tensor, torch.arange(len(tensor)) - first[tensor]], 1).to(torch.int32)


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device without waiting; the pinned memory is free for others when the copy is done."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def adam_step(
    tensors: Tensors, settings: Settings, factor: Tensor | None, tables: Tables, backend: str = "auto"
) -> None:
    """One step of all tensors, in place.

    Args:
        tensors: on one device.
        settings: of all of them.
        factor: multiplies the gradients, a scalar on the device; `.grad` itself stays as it is.
        tables: kept by the caller from step to step.
        backend: 'auto' takes Triton on CUDA, else the reference.
    """
    if not len(tensors):
        return
    if use_triton(backend, tensors.params[0].device, torch.float32):
        _adam_triton(tensors, settings, factor, tables)
    else:
        adam_step_reference(tensors, settings, factor)


def _adam_triton(tensors: Tensors, settings: Settings, factor: Tensor | None, tables: Tables) -> None:
    table, aligned, chunk_map = tables.of(tensors)
    if not len(chunk_map):
        return
    (beta1, beta2), (bias1, bias2) = settings.betas, settings.bias_corrections
    on_device = isinstance(settings.lr, Tensor)
    lr = 1.0 if on_device else float(settings.lr)
    _adam_kernel[(len(chunk_map),)](
        table,
        chunk_map,
        table if factor is None else factor,
        settings.lr if on_device else table,
        lr / bias1,
        lr * settings.weight_decay if settings.decoupled else settings.weight_decay,
        beta1,
        beta2,
        1 - beta1,
        1 - beta2,
        settings.eps,
        bias2,
        GRAD_BF16=tensors.grads[0].dtype == torch.bfloat16,
        HAS_COPY=bool(tensors.copies),
        HAS_FACTOR=factor is not None,
        LR_ON_DEVICE=on_device,
        DECOUPLED=settings.decoupled,
        ALIGNED=aligned,
        BF16_BYTES=BF16_BYTES,
        CHUNK=CHUNK,
        TILE=TILE,
        num_warps=WARPS,
    )


def adam_step_reference(tensors: Tensors, settings: Settings, factor: Tensor | None) -> None:
    """The same in plain PyTorch, a tensor at a time."""
    (beta1, beta2), (bias1, bias2) = settings.betas, settings.bias_corrections
    copies: list[Any] = tensors.copies or [None] * len(tensors)
    for param, grad, mean, square, copy in zip(
        tensors.params, tensors.grads, tensors.means, tensors.squares, copies, strict=True
    ):
        grad = grad.float() if factor is None else grad.float() * factor
        if settings.decoupled:
            param.sub_(param * (settings.lr * settings.weight_decay))
        else:
            grad = grad + settings.weight_decay * param
        mean.mul_(beta1).add_(grad, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        param.sub_(mean / (square.sqrt() / bias2 + settings.eps) * (settings.lr / bias1))
        if copy is not None:
            copy.copy_(param)
