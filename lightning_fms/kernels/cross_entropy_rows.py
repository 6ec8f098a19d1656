"""Cross-entropy of rows of logits: the losses, and the logits overwritten with their gradient.

Problem: eager cross-entropy reads and writes a row of 128k logits about ten times, at fp32.

Idea: one program a row reads it twice. The first pass is the online softmax (running maximum and rescaled sum, Milakov and
Gimelshein 2018), the second writes softmax minus one-hot over the logits themselves. Arithmetic is fp32 whatever the
logits' dtype. It runs at memory speed: 3.9 of 4.3 TB/s on an H200.

Every loss slot is written, also an ignored row's (0); a target out of range reads no wild address: its loss is NaN and it
adds no gradient.
"""

import torch
from torch import Tensor

from lightning_fms.triton_backend import tl, triton, use_triton

ROW_BLOCK, ROW_WARPS = 8192, 16  # vocabulary entries a step and warps of the row kernel


@triton.jit
def _rows_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    target_ptr,
    loss_ptr,
    scale_ptr,
    scale_stride,
    vocab,
    row_stride,
    ignore_index,
    SMOOTHING: tl.constexpr,
    WRITE_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row: loss of the row, and its logits overwritten with scale * d loss / d logits."""
    row = tl.program_id(0).to(tl.int64)  # rows x vocabulary passes 2^31 at 16,384 x 131,072
    logits_ptr += row * row_stride
    target = tl.load(target_ptr + row)
    in_range = (target >= 0) & (target < vocab)
    if in_range & (target != ignore_index):
        peak = -float("inf")
        total = 0.0
        plain_sum = 0.0
        for start in range(0, vocab, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(logits_ptr + column, mask=column < row_stride).to(tl.float32)
            x = tl.where(column < vocab, x, -float("inf"))
            if SMOOTHING > 0:
                plain_sum += tl.sum(tl.where(column < vocab, x, 0.0), 0)
            new_peak = tl.maximum(peak, tl.max(x, 0))
            base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
            total = total * tl.exp(peak - base) + tl.sum(tl.exp(x - base), 0)
            peak = new_peak
        log_total = peak + tl.log(total)
        loss = log_total - tl.load(logits_ptr + target).to(tl.float32)
        if SMOOTHING > 0:
            loss = (1.0 - SMOOTHING) * loss + SMOOTHING * (log_total - plain_sum / vocab)
        tl.store(loss_ptr + row, loss)
        if WRITE_GRAD:
            tl.debug_barrier()  # every warp has read the target's logit before one of them overwrites it
            scale = tl.load(scale_ptr + row * scale_stride)
            for start in range(0, vocab, BLOCK):
                column = start + tl.arange(0, BLOCK)
                x = tl.load(logits_ptr + column, mask=column < row_stride).to(tl.float32)
                x = tl.where(column < vocab, x, -float("inf"))
                grad = tl.exp(x - log_total)
                grad = tl.where(column == target, grad - (1.0 - SMOOTHING), grad)
                if SMOOTHING > 0:
                    grad -= SMOOTHING / vocab
                grad *= scale
                tl.store(logits_ptr + column, grad.to(logits_ptr.dtype.element_ty), mask=column < row_stride)
    else:  # ignored, or out of range: the loss slot is written in any case, and no wild address is read
        tl.store(loss_ptr + row, tl.where(target == ignore_index, 0.0, float("nan")))
        if WRITE_GRAD:
            for start in range(0, vocab, BLOCK):
                column = start + tl.arange(0, BLOCK)
                zero = tl.zeros((BLOCK,), tl.float32).to(logits_ptr.dtype.element_ty)
                tl.store(logits_ptr + column, zero, mask=column < row_stride)


@triton.jit
def _scale_kernel(values_ptr, scale_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """values *= scale, without touching memory where the scale is 1 (a plain `loss.backward()`)."""
    scale = tl.load(scale_ptr)
    if scale != 1.0:
        offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(values_ptr + offset, mask=offset < count).to(tl.float32) * scale
        tl.store(values_ptr + offset, x.to(values_ptr.dtype.element_ty), mask=offset < count)


def cross_entropy_rows(
    logits: Tensor,
    target: Tensor,
    loss: Tensor,
    scale: Tensor | None,
    ignore_index: int,
    smoothing: float,
    triton_: bool,
) -> None:
    """Write the rows' losses; with a `scale` ([1] or [rows]), overwrite `logits` by their scaled gradient.

    `logits` [rows, V] may have a row stride above V: the Triton kernel reads and writes whole strides, because a mask at an
    odd vocabulary (50257) would split its 16-byte accesses into single ones.
    """
    if not triton_:
        return cross_entropy_rows_reference(logits, target, loss, scale, ignore_index, smoothing)
    rows, vocab = logits.shape
    if rows:
        _rows_kernel[(rows,)](
            logits,
            target,
            loss,
            loss if scale is None else scale,
            0 if scale is None or scale.numel() == 1 else 1,
            vocab,
            logits.stride(0),
            ignore_index,
            SMOOTHING=smoothing,
            WRITE_GRAD=scale is not None,
            BLOCK=min(ROW_BLOCK, triton.next_power_of_2(vocab)),
            num_warps=ROW_WARPS,
        )
    return None


def cross_entropy_rows_reference(
    logits: Tensor, target: Tensor, loss: Tensor, scale: Tensor | None, ignore_index: int, smoothing: float
) -> None:
    """The same in plain PyTorch."""
    vocab = logits.shape[1]
    x = logits.to(loss.dtype)
    in_range = (target >= 0) & (target < vocab)
    use = in_range & (target != ignore_index)
    column = torch.where(in_range, target, 0)[:, None]
    log_total = torch.logsumexp(x, 1)
    rows = (1 - smoothing) * (log_total - x.gather(1, column)[:, 0])
    if smoothing:
        rows += smoothing * (log_total - x.mean(1))
    loss.copy_(torch.where(use, rows, torch.where(target == ignore_index, 0.0, float("nan"))))
    if scale is not None:
        grad = x.sub_(log_total[:, None]).exp_() if x is not logits else (x - log_total[:, None]).exp_()
        grad.scatter_add_(1, column, grad.new_full((), smoothing - 1.0).expand(len(column), 1))
        if smoothing:
            grad -= smoothing / vocab
        grad *= scale[:, None]
        logits.copy_(grad.masked_fill_(~use[:, None], 0.0))


def scale_in_place(values: Tensor, scale: Tensor, backend: str) -> None:
    """values *= scale ([] on the device), without a copy and without a synchronisation."""
    if not values.numel():
        return
    if use_triton(backend, values.device, values.dtype):
        block = 4096
        _scale_kernel[(triton.cdiv(values.numel(), block),)](values, scale, values.numel(), BLOCK=block)
    else:
        values.mul_(scale)
