"""Fused linear-cross-entropy (PyTorch rows; the Triton rows run in interpreted_kernels.py): numbers, options, registration."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fms.kernels import linear_cross_entropy
from lightning_fms.kernels.linear_cross_entropy import NATIVE_CHUNKS, chunk_rows, plan_chunks

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # in opcheck
N, D, V = 300, 24, 101
ONE_TILE = 1  # a chunk_bytes that allows a single GEMM tile: 128 tokens a chunk


def inputs(dtype: torch.dtype = torch.float64, bias: bool = True, scale: float = 1.0) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, N // 3, D), (V, D)] + ([(V,)] if bias else [])
    tensors = [(torch.randn(s, generator=generator) * scale).to(dtype).requires_grad_() for s in shapes]
    target = torch.randint(0, V, (3, N // 3), generator=generator)
    target[0, :10] = -100
    return tensors, target


def eager(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: object) -> Tensor:
    logits = F.linear(hidden, weight, bias).reshape(-1, weight.shape[0])
    loss = F.cross_entropy(logits, target.reshape(-1), **options)  # type: ignore[arg-type]
    return loss.reshape(target.shape) if options.get("reduction") == "none" else loss


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_are_those_of_eager_in_float64(reduction: str, label_smoothing: float, bias: bool) -> None:
    tensors, target = inputs(bias=bias)
    hidden, weight, *rest = tensors
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    ours = linear_cross_entropy(hidden, weight, target, *rest, chunk_bytes=ONE_TILE, **options)
    theirs = eager(hidden, weight, target, *rest, **options)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(ours)
    true = torch.autograd.grad(theirs, tensors, upstream)
    torch.testing.assert_close(torch.autograd.grad(ours, tensors, upstream, retain_graph=True), true)
    torch.testing.assert_close(torch.autograd.grad(ours, tensors, upstream), true)  # a second time: recomputed


def test_gradcheck() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weight, bias = (
        torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in ((6, 3), (5, 3), (5,))
    )
    target = torch.tensor([0, 4, -100, 2, 1, 1])
    assert torch.autograd.gradcheck(
        lambda h, w, b: linear_cross_entropy(h, w, target, b, label_smoothing=0.2), (hidden, weight, bias)
    )


def errors(dtype: torch.dtype, tokens: int, accumulate: str, chunk_bytes: int) -> list[tuple[float, float]]:
    """(our error, eager's) against float64 of loss and both gradients."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(tokens, 32, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(257, 32, generator=generator) / 6).to(dtype).requires_grad_()
    target = torch.randint(0, 257, (tokens,), generator=generator)

    def outputs(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
        return [loss.detach().double(), *(g.double() for g in torch.autograd.grad(loss, leaves))]

    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    true = outputs(eager(*wide, target), *wide)
    theirs = outputs(F.cross_entropy(F.linear(hidden, weight).float(), target), hidden, weight)
    fused = linear_cross_entropy(hidden, weight, target, accumulate=accumulate, chunk_bytes=chunk_bytes)
    ours = outputs(fused, hidden, weight)
    return [(float((o - t).norm()), float((e - t).norm())) for o, e, t in zip(ours, theirs, true, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_no_larger_than_eagers(dtype: torch.dtype) -> None:
    # 16 chunks: 'auto' accumulates in fp32 and rounds once, as one GEMM does.
    (loss, *grads) = errors(dtype, 2048, "auto", ONE_TILE)
    assert loss[0] <= loss[1] + 1e-6
    for ours, theirs in grads:
        assert ours <= 1.02 * theirs


def test_native_accumulation_stays_close_to_one_gemm_up_to_its_limit() -> None:
    # Logits near 0: the rounding of the logits themselves, which eager shares, does not hide that of the partial sums.
    tokens = 128 * NATIVE_CHUNKS
    _, _, (native, eager_) = errors(torch.bfloat16, tokens, "native", ONE_TILE)
    _, _, (wide, _) = errors(torch.bfloat16, tokens, "fp32", ONE_TILE)
    _, _, (auto, _) = errors(torch.bfloat16, tokens, "auto", ONE_TILE)
    assert wide <= 1.02 * eager_
    assert auto == native <= 1.5 * eager_


@pytest.mark.parametrize("accumulate", ["auto", "fp32"])
def test_a_narrow_weight_under_wide_hidden_states_is_summed_in_fp32(accumulate: str) -> None:
    torch.manual_seed(0)
    hidden, target = torch.randn(4096, 64), torch.randint(0, 1024, (4096,))
    weight = (torch.randn(1024, 64) * 0.02).bfloat16().requires_grad_()
    exact = weight.detach().double().requires_grad_()
    (true,) = torch.autograd.grad(eager(hidden.double(), exact, target), exact)

    def error(how: str) -> float:
        loss = linear_cross_entropy(hidden, weight, target, chunk_bytes=ONE_TILE, accumulate=how)
        (ours,) = torch.autograd.grad(loss, weight)
        return float((ours.double() - true).norm() / true.norm())

    assert error(accumulate) < 0.5 * error("native")


def test_fp32_weight_keeps_an_fp32_gradient_under_autocast() -> None:
    tensors, target = inputs(torch.float32)
    hidden, weight, bias = tensors
    true = torch.autograd.grad(eager(*(t.double() for t in (hidden, weight)), target, bias.double()), tensors)
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_cross_entropy(hidden, weight, target, bias)
        theirs = eager(hidden, weight, target, bias)
    assert ours.dtype == torch.float32
    for mine, other, exact in zip(
        torch.autograd.grad(ours, tensors), torch.autograd.grad(theirs, tensors), true, strict=True
    ):
        assert mine.dtype == torch.float32
        assert (mine - exact).norm() <= 1.02 * (other - exact).norm()


def test_all_ignored_is_zero_with_zero_gradients() -> None:
    tensors, target = inputs(torch.bfloat16)
    loss = linear_cross_entropy(tensors[0], tensors[1], torch.full_like(target, -100), tensors[2])
    assert loss.item() == 0
    assert all(not grad.any() for grad in torch.autograd.grad(loss, tensors))


def test_no_tokens_at_all() -> None:
    (hidden, weight), target = inputs(bias=False)
    loss = linear_cross_entropy(hidden[:, :0], weight, target[:, :0])
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert loss.item() == 0
    assert all(not grad.any() for grad in grads)


def test_infinite_logits_of_other_tokens_do_no_harm() -> None:
    (hidden, weight, bias), target = inputs()
    bias.data[V // 2 :] = -math.inf
    target.clamp_(max=V // 2 - 1)
    ours = linear_cross_entropy(hidden, weight, target, bias)
    torch.testing.assert_close(ours, eager(hidden, weight, target, bias))
    assert torch.autograd.grad(ours, hidden)[0].isfinite().all()


def test_arguments_are_not_written_to() -> None:
    tensors, target = inputs(torch.float32)
    versions = [t._version for t in (*tensors, target)]
    (3 * linear_cross_entropy(tensors[0], tensors[1], target, tensors[2])).backward()
    assert versions == [t._version for t in (*tensors, target)]


def test_gradients_are_handed_over_without_a_copy() -> None:
    # The weight gradient of a large vocabulary is a GiB: it may exist once.
    tensors, target = inputs(torch.float32, bias=False)
    loss = linear_cross_entropy(*tensors, target)
    made = [t.data_ptr() for t in loss.grad_fn.ready[:2]]  # type: ignore[union-attr]
    (2 * loss).backward()
    assert [t.grad.data_ptr() for t in tensors] == made  # type: ignore[union-attr]


def test_frozen_weight_gets_no_gradient_buffer() -> None:
    (hidden, weight), target = inputs(torch.float32, bias=False)
    loss = linear_cross_entropy(hidden, weight.detach(), target)
    assert [t.numel() for t in loss.grad_fn.ready] == [hidden.numel(), 0, 0]  # type: ignore[union-attr]
    torch.testing.assert_close(
        torch.autograd.grad(loss, hidden), torch.autograd.grad(eager(hidden, weight, target), hidden)
    )
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, target).requires_grad


def test_non_contiguous_hidden_and_strided_target() -> None:
    (_, weight), target = inputs(bias=False)
    wide = torch.randn(D, N // 3, 3, dtype=torch.float64, requires_grad=True)
    labels = target.t().contiguous().t()
    torch.testing.assert_close(
        linear_cross_entropy(wide.permute(2, 1, 0), weight, labels), eager(wide.permute(2, 1, 0), weight, labels)
    )


def test_compiles_without_a_graph_break() -> None:
    tensors, target = inputs(torch.float32)

    def step(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return 2 * linear_cross_entropy(hidden.tanh(), weight, target, bias, chunk_bytes=ONE_TILE)

    ours = torch.compile(step, fullgraph=True, backend="aot_eager")(*tensors)
    theirs = step(*tensors)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, tensors), torch.autograd.grad(theirs, tensors))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("bias", [False, True])
def test_opcheck(reduction: str, bias: bool) -> None:
    tensors, target = inputs(torch.float32, bias)
    hidden, weight, *rest = tensors
    arguments = [hidden.reshape(-1, D).detach().requires_grad_(), weight, *(rest or [None]), target.reshape(-1)]
    options = (-100, 0.0, reduction, ONE_TILE, "auto", "reference", True, True, bias)
    torch.library.opcheck(torch.ops.lightning_fms.linear_cross_entropy, (*arguments, *options))
    plain = [None if t is None else t.detach() for t in arguments]
    options = (torch.ones(1), -100, 0.0, ONE_TILE, "auto", "reference", True, True, bias)  # type: ignore[assignment]
    torch.library.opcheck(torch.ops.lightning_fms.linear_cross_entropy_backward, (*plain, *options))


def test_chunks_are_even_and_within_the_budget() -> None:
    assert chunk_rows(8192, 128256, 2, 512 * 2**20) == 2048
    assert chunk_rows(100, 128256, 2, 512 * 2**20) == 100
    assert chunk_rows(2200, 128256, 2, 512 * 2**20) == 1152  # 1100 and 1100, not 2048 and 152
    assert chunk_rows(0, 10, 2, 1) == 1


def test_chunks_grow_instead_of_an_fp32_sum_that_would_take_as_much() -> None:
    head, budget = (128256, 2048), 512 * 2**20
    assert plan_chunks(8192, head, 2, budget) == (2048, False)
    assert plan_chunks(16384, head, 2, budget) == (4096, False)  # 0.5 GiB more of logits, 1 GiB less of sums
    assert plan_chunks(65536, head, 2, budget) == (2048, True)  # 4 chunks would take 3.4 GiB more
    assert plan_chunks(32768, (131072, 1024), 2, budget) == (2048, True)  # memory stays flat
    assert plan_chunks(16384, head, 2, budget, "fp32") == (2048, True)
    assert plan_chunks(16384, head, 2, budget, "native") == (2048, False)


def test_wrong_targets_and_arguments_are_refused() -> None:
    (hidden, weight), target = inputs(bias=False)
    for bad in (V, -1):
        wrong = target.clone()
        wrong[1, 7] = bad
        with pytest.raises(IndexError, match=rf"target {bad} \(token 107\) is outside \[0, {V}\)"):
            linear_cross_entropy(hidden, weight, wrong)
    with pytest.raises(ValueError, match="must be int64 of shape"):
        linear_cross_entropy(hidden, weight, target[:2])
    with pytest.raises(ValueError, match="does not fit weight"):
        linear_cross_entropy(hidden[..., :-1], weight, target)
    with pytest.raises(ValueError, match="reduction='max'"):
        linear_cross_entropy(hidden, weight, target, reduction="max")
    with pytest.raises(ValueError, match="backend='triton' cannot run"):
        linear_cross_entropy(hidden, weight, target, backend="triton")
    loss = linear_cross_entropy(hidden, weight, target)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)
