"""Output projection and cross-entropy in one operation that never holds the logits.

Problem: with a vocabulary of 128k, the logits of 8,192 tokens are 2 GiB in bf16, and eager cross-entropy keeps several
copies of them (11.7 GiB at the peak), more than all the layers below.

Idea: tokens are taken in chunks whose logits fit a small buffer. Per chunk, one GEMM makes the logits, one Triton kernel
reads a row twice (online softmax, then gradient) and overwrites the logits with their gradient, two GEMMs turn that into
the gradients of `hidden` and `weight`. The gradient is ready when the forward ends, so the backward only multiplies it
with the incoming scalar: three GEMMs in all, as many as eager, and no logits survive (the scheme of Liger-Kernel and
apple/ml-cross-entropy, with cuBLAS for the GEMMs).

Trade-offs: larger chunks are faster and need more memory (`chunk_bytes`). The weight gradient is a sum over chunks: up to
`NATIVE_CHUNKS` of them it is accumulated in its own dtype inside the GEMM, whose rounded partial sums make its error up to
1.5 times that of eager's single GEMM (1.1 times once the rounding of real logits dominates); beyond that in an fp32
buffer, which costs 4 bytes a weight and has eager's error for any number of chunks. Each chunk reads and writes that buffer,
so where larger chunks would be few enough and take no more memory than it, they are taken instead. `reduction='none'` and
fp16 cannot be scaled afterwards, so they compute the logits once more in the backward.

The mean over no token at all is 0 with zero gradients (eager: NaN), so a batch without a target is no accident.

N tokens, D model, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from lightning_fms.kernels.cross_entropy_rows import cross_entropy_rows, scale_in_place
from lightning_fms.kernels.gemm_dtype import gemm_dtype
from lightning_fms.kernels.head_gemms import accumulate as add_to_gradient
from lightning_fms.kernels.head_gemms import multiply, project
from lightning_fms.triton_backend import use_triton

CHUNK_BYTES = 512 * 2**20  # 4 chunks at 8,192 tokens and a vocabulary of 128,256: the memory knee of the benchmark
NATIVE_CHUNKS = 4  # docs/kernels.md has the measured error of the weight gradient by number of chunks
_CHUNK_ROWS = 128  # chunks are multiples of a GEMM tile
_ROW_ALIGN = 64  # elements: an odd vocabulary (50257) would push cuBLAS off its aligned kernels
_REDUCTIONS = ("mean", "sum", "none")
_ACCUMULATE = ("auto", "native", "fp32")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    chunk_bytes: int = CHUNK_BYTES,
    accumulate: str = "auto",
    check_targets: bool = False,
    backend: str = "auto",
) -> Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias), target)` without the logits.

    Softmax and loss are computed in fp32, the GEMMs in `hidden`'s dtype (under autocast: in autocast's). No host
    synchronisation, no write into an argument, traceable with `torch.compile(fullgraph=True)`.

    Args:
        hidden: [..., D], any floating dtype.
        weight: [V, D]. Where its dtype is wider than the GEMMs', its gradient is accumulated in that wider dtype.
        target: [...], int64, `ignore_index` where there is none.
        bias: [V].
        ignore_index: target value of a token that counts neither in the loss nor in the mean.
        label_smoothing: as in `F.cross_entropy`, in [0, 1].
        reduction: 'mean' over the tokens that are not ignored (0 if there is none), 'sum' or 'none'.
        chunk_bytes: budget of the logits buffer; at least 128 tokens are taken at once.
        accumulate: how the weight gradient is summed over chunks: 'native' (its own dtype), 'fp32', or 'auto':
            fp32 where there are more than `NATIVE_CHUNKS` chunks. 'fp32' has eager's error, at 4 bytes more a weight. Where
            the logits buffer needs no more than those bytes to bring so many chunks down to `NATIVE_CHUNKS`, 'auto' gives
            them to it.
        check_targets: on CUDA, stop with a device-side assertion (as eager does, without a synchronisation; the process
            cannot use the device afterwards). Off, a target out of range gives the loss NaN and adds no gradient.
        backend: 'triton', 'reference' (PyTorch), 'auto' (Triton where it can run), or 'triton_only': the GEMMs too are
            Triton's.

    Returns:
        fp32 (fp64 for fp64 inputs) scalar, or [...] for reduction 'none'.

    Raises:
        ValueError: shapes, dtypes or options that do not fit.
        IndexError: on CPU, a target outside [0, V) that is not `ignore_index`.
    """
    _validate(hidden, weight, target, bias, label_smoothing, reduction, chunk_bytes, accumulate)
    dtype = gemm_dtype(hidden)
    if check_targets and hidden.is_cuda:
        legal = ((target >= 0) & (target < weight.shape[0])) | (target == ignore_index)
        torch._assert_async(legal.all(), f"cross-entropy target outside [0, {weight.shape[0]})")
    grad = torch.is_grad_enabled()
    rows = torch.ops.lightning_fms.linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]).to(dtype),
        weight,
        bias,
        target.reshape(-1),
        ignore_index,
        label_smoothing,
        reduction,
        chunk_bytes,
        accumulate,
        backend,
        grad and hidden.requires_grad,
        grad and weight.requires_grad,
        grad and bias is not None and bias.requires_grad,
    )[0]
    return rows.reshape(target.shape) if reduction == "none" else rows


def linear_cross_entropy_reference(hidden: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    """The same function of plain PyTorch: what the kernel is compared with."""
    return linear_cross_entropy(hidden, weight, target, backend="reference", **options)


def _validate(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    label_smoothing: float,
    reduction: str,
    chunk_bytes: int,
    accumulate: str,
) -> None:
    if weight.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} [..., D] does not fit weight {tuple(weight.shape)} [V, D]")
    if target.dtype != torch.int64 or target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"target must be int64 of shape {tuple(hidden.shape[:-1])}, not {target.dtype} {tuple(target.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)} [V, D]")
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{reduction=} is not one of {', '.join(_REDUCTIONS)}")
    if accumulate not in _ACCUMULATE:
        raise ValueError(f"{accumulate=} is not one of {', '.join(_ACCUMULATE)}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{label_smoothing=} must be between 0 and 1")
    if chunk_bytes <= 0:
        raise ValueError(f"{chunk_bytes=} must be positive")


# ---- chunks of tokens ---------------------------------------------------------------------------------------------


def chunk_rows(tokens: int, vocab: int, itemsize: int, chunk_bytes: int) -> int:
    """Tokens a chunk: even chunks of a multiple of 128 tokens whose logits fit `chunk_bytes` (at least 128)."""
    fit = max(chunk_bytes // (_padded(vocab) * itemsize), 1)
    fit = max(fit // _CHUNK_ROWS * _CHUNK_ROWS, _CHUNK_ROWS)
    chunks = max(-(-tokens // fit), 1)
    even = -(-tokens // chunks)
    return max(min(-(-even // _CHUNK_ROWS) * _CHUNK_ROWS, tokens), 1)


def plan_chunks(
    tokens: int, weight: tuple[int, int], itemsize: int, chunk_bytes: int, accumulate: str = "auto"
) -> tuple[int, bool]:
    """Tokens a chunk, and whether the gradient of `weight` ([V, D], as narrow as the GEMMs) is summed in fp32."""
    vocab, dim = weight
    rows = chunk_rows(tokens, vocab, itemsize, chunk_bytes)
    if accumulate != "auto" or -(-tokens // rows) <= NATIVE_CHUNKS:
        return rows, accumulate == "fp32"
    larger = -(-tokens // NATIVE_CHUNKS // _CHUNK_ROWS) * _CHUNK_ROWS
    fits = larger * _padded(vocab) * itemsize <= chunk_bytes + 4 * vocab * dim
    return (larger, False) if fits else (rows, True)


def _padded(vocab: int) -> int:
    return -(-vocab // _ROW_ALIGN) * _ROW_ALIGN


def _loss_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _raise_out_of_range(target: Tensor, vocab: int, ignore_index: int) -> None:
    """CPU only, where looking costs no synchronisation."""
    bad = ((target < 0) | (target >= vocab)) & (target != ignore_index)
    if bad.any():
        row = int(bad.nonzero()[0])
        raise IndexError(
            f"cross-entropy target {int(target[row])} (token {row}) is outside [0, {vocab}) and is not "
            f"{ignore_index=}: the tokenizer's vocabulary is larger than the model's, or labels are not masked"
        )


def _chunked(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    scale: Tensor,
    ignore_index: int,
    smoothing: float,
    chunk_bytes: int,
    accumulate: str,
    backend: str,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per-token losses [N] and the gradients of sum(scale * losses) that are asked for (empty otherwise)."""
    (tokens, _), vocab = hidden.shape, weight.shape[0]
    target = target.contiguous()  # the row kernel knows no stride; `labels[:, -1]` stays a view up to here
    triton_ = use_triton(backend, hidden.device, hidden.dtype)
    gemms_by_triton = triton_ and backend == "triton_only"
    if hidden.device.type == "cpu":
        _raise_out_of_range(target, vocab, ignore_index)
    rows, wide = _chunks(hidden, weight, chunk_bytes, accumulate, needs)
    loss = torch.empty(tokens, dtype=_loss_dtype(hidden.dtype), device=hidden.device)
    grad_h, grad_w, grad_b = _grad_buffers(hidden, weight, bias, wide, needs)
    w = weight.to(hidden.dtype)
    b = None if bias is None else bias.to(hidden.dtype)
    buffer = torch.empty(rows, _padded(vocab), dtype=hidden.dtype, device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, tokens, rows):
            part = slice(start, min(start + rows, tokens))
            logits, h = buffer[: part.stop - start, :vocab], hidden[part]
            project(h, w, b, logits, gemms_by_triton)
            part_scale = scale if scale.numel() == 1 else scale[part]
            cross_entropy_rows(
                logits, target[part], loss[part], part_scale if any(needs) else None, ignore_index, smoothing, triton_
            )
            if needs[0]:
                multiply(logits, w, grad_h[part], gemms_by_triton)
            if needs[1]:
                add_to_gradient(grad_w, logits, h, start == 0, gemms_by_triton)
            if needs[2]:
                grad_b += logits.sum(0, dtype=grad_b.dtype)
    grad_w = grad_w.to(weight.dtype) if needs[1] else grad_w
    return loss, grad_h, grad_w, grad_b.to(bias.dtype) if bias is not None and needs[2] else grad_b


def _chunks(
    hidden: Tensor, weight: Tensor, chunk_bytes: int, accumulate: str, needs: tuple[bool, bool, bool]
) -> tuple[int, bool]:
    """`plan_chunks` where its question is asked: a weight without gradient, or of fp32, has nothing to sum more widely."""
    asked = needs[1] and weight.element_size() < 4
    shape = (weight.shape[0], weight.shape[1])
    return plan_chunks(hidden.shape[0], shape, hidden.element_size(), chunk_bytes, accumulate if asked else "native")


def _grad_buffers(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wide: bool, needs: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    sum_dtype = torch.promote_types(weight.dtype, torch.float32 if wide else weight.dtype)
    empty = torch.empty if hidden.shape[0] else torch.zeros  # no token, no GEMM that would write them
    return (
        empty(hidden.shape if needs[0] else 0, dtype=hidden.dtype, device=hidden.device),
        empty(weight.shape if needs[1] else 0, dtype=sum_dtype, device=hidden.device),
        torch.zeros(weight.shape[0] if needs[2] else 0, dtype=_loss_dtype(hidden.dtype), device=hidden.device),
    )


def _row_scale(target: Tensor, grad: Tensor | None, reduction: str, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """What each row's gradient is multiplied with: [1], or [N] for reduction 'none'. Stays on the device."""
    scale = torch.ones(1, dtype=dtype, device=target.device) if grad is None else grad.reshape(-1).to(dtype)
    if reduction == "mean":
        scale = scale / (target != ignore_index).sum().clamp(min=1).to(dtype)
    return scale.contiguous()


# ---- registration -------------------------------------------------------------------------------------------------


@torch.library.custom_op("lightning_fms::linear_cross_entropy", mutates_args=())
def _forward_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    chunk_bytes: int,
    accumulate: str,
    backend: str,
    grad_hidden: bool,
    grad_weight: bool,
    grad_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    now = _scaled_afterwards(hidden.dtype, reduction)
    scale = _row_scale(target, None, reduction, ignore_index, _loss_dtype(hidden.dtype))
    needs = (now and grad_hidden, now and grad_weight, now and grad_bias)
    loss, *grads = _chunked(
        hidden, weight, bias, target, scale, ignore_index, label_smoothing, chunk_bytes, accumulate, backend, needs
    )
    if reduction != "none":
        loss = loss.sum() * scale[0] if reduction == "mean" else loss.sum()
    return loss, grads[0], grads[1], grads[2]


@_forward_op.register_fake
def _forward_fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, _ignore: int, _smoothing: float, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    reduction, *_, grad_hidden, grad_weight, grad_bias = options
    now = _scaled_afterwards(hidden.dtype, reduction)
    dtype = _loss_dtype(hidden.dtype)
    return (
        hidden.new_empty(target.shape if reduction == "none" else (), dtype=dtype),
        hidden.new_empty(hidden.shape if now and grad_hidden else 0),
        hidden.new_empty(weight.shape if now and grad_weight else 0, dtype=weight.dtype),
        hidden.new_empty(weight.shape[0] if now and grad_bias else 0, dtype=dtype if bias is None else bias.dtype),
    )


def _scaled_afterwards(dtype: torch.dtype, reduction: str) -> bool:
    """Whether the forward can leave the gradient ready: one scale for all rows, and no underflow of p/N in fp16."""
    return reduction != "none" and dtype != torch.float16


@torch.library.custom_op("lightning_fms::linear_cross_entropy_backward", mutates_args=())
def _backward_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    scale: Tensor,
    ignore_index: int,
    label_smoothing: float,
    chunk_bytes: int,
    accumulate: str,
    backend: str,
    grad_hidden: bool,
    grad_weight: bool,
    grad_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    needs = (grad_hidden, grad_weight, grad_bias)
    return _chunked(
        hidden, weight, bias, target, scale, ignore_index, label_smoothing, chunk_bytes, accumulate, backend, needs
    )[1:]


@_backward_op.register_fake
def _backward_fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, scale: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *_, grad_hidden, grad_weight, grad_bias = options
    return (
        hidden.new_empty(hidden.shape if grad_hidden else 0),
        hidden.new_empty(weight.shape if grad_weight else 0, dtype=weight.dtype),
        hidden.new_empty(
            weight.shape[0] if grad_bias else 0, dtype=_loss_dtype(hidden.dtype) if bias is None else bias.dtype
        ),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, target, *options = inputs
    ctx.save_for_backward(hidden, weight, bias, target)
    ctx.options = options
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    # Outputs without a grad_fn, so keeping them here makes no reference cycle. They are handed out once: scaled in
    # place, a second copy of a 1 GiB weight gradient would double this operation's memory.
    ctx.ready = output[1:] if _scaled_afterwards(hidden.dtype, options[2]) else None


def _backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    needs = ctx.options[-3:]
    if grad_loss is None:
        return (None,) * 13
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "the fused linear cross-entropy has no second derivative; for create_graph=True use real logits "
            "(TritonKernels(linear_cross_entropy=False))"
        )
    if ctx.ready is None:
        grads = _recomputed(ctx, grad_loss)
    elif _is_plain(grad_loss, ctx.ready[0]):
        grads, ctx.ready = ctx.ready, None
        for grad in grads:
            scale_in_place(grad, grad_loss, ctx.options[5])
    else:  # traced: the compiler decides about reuse
        grads = tuple(grad * grad_loss.to(grad.dtype) for grad in ctx.ready)
    grad_hidden, grad_weight, grad_bias = (grad if need else None for grad, need in zip(grads, needs, strict=True))
    return grad_hidden, grad_weight, grad_bias, *(None,) * 10


def _is_plain(*tensors: Tensor) -> bool:
    return all(type(tensor) is Tensor for tensor in tensors)


def _recomputed(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, ...]:
    """Per-token scales, fp16, or a second backward through the same graph."""
    hidden, weight, bias, target = ctx.saved_tensors
    ignore_index, smoothing, reduction, *rest = ctx.options
    scale = _row_scale(target, grad_loss, reduction, ignore_index, _loss_dtype(hidden.dtype))
    return torch.ops.lightning_fms.linear_cross_entropy_backward(
        hidden, weight, bias, target, scale, ignore_index, smoothing, *rest
    )


_forward_op.register_autograd(_backward, setup_context=_setup_context)
