"""The Triton kernels themselves, in Triton's interpreter. Started by test_interpreter.py with TRITON_INTERPRET=1."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fms import triton_backend
from lightning_fms.kernels import cross_entropy_rows, linear_cross_entropy, rms_norm
from lightning_fms.kernels.verify import verify_linear_cross_entropy, verify_rms_norm

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # in opcheck


@pytest.fixture(autouse=True)
def several_blocks_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    assert triton_backend.INTERPRETED
    monkeypatch.setattr(cross_entropy_rows, "ROW_BLOCK", 64)
    monkeypatch.setattr(sys.modules[linear_cross_entropy.__module__], "_CHUNK_ROWS", 8)


def leaves(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("vocab", [101, 7])
def test_cross_entropy(reduction: str, smoothing: float, vocab: int) -> None:
    tensors = leaves(torch.float32, (20, 16), (vocab, 16), (vocab,))
    hidden, weight, bias = tensors
    target = torch.randint(0, vocab, (20,))
    target[5:9] = -100
    options = {"reduction": reduction, "label_smoothing": smoothing}
    ours = linear_cross_entropy(hidden, weight, target, bias, chunk_bytes=1, backend="triton", **options)
    theirs = F.cross_entropy(F.linear(hidden, weight, bias), target, **options)
    torch.testing.assert_close(ours, theirs)
    upstream = torch.randn_like(ours)
    grads = torch.autograd.grad(ours, tensors, upstream)  # scaled by the Triton kernel
    torch.testing.assert_close(grads, torch.autograd.grad(theirs, tensors, upstream), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("stride", [5, 2, 0])
def test_target_that_is_a_view(stride: int, reduction: str) -> None:
    hidden, weight = leaves(torch.float32, (20, 16), (50, 16))
    target = torch.randint(0, 50, (100,)).as_strided((20,), (stride,))
    ours = linear_cross_entropy(hidden, weight, target, reduction=reduction, chunk_bytes=1, backend="triton")
    theirs = F.cross_entropy(F.linear(hidden, weight), target, reduction=reduction)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        torch.autograd.grad(ours.sum(), (hidden, weight)), torch.autograd.grad(theirs.sum(), (hidden, weight))
    )


def test_rows_that_are_ignored_or_out_of_range_are_written_and_read_nothing_wild() -> None:
    logits, scale = torch.randn(5, 100), torch.ones(1)
    target = torch.tensor([3, -100, 100, -1, 10**12])
    loss = torch.full((5,), 123.0)
    cross_entropy_rows.cross_entropy_rows(logits, target, loss, scale, -100, 0.0, triton_=True)
    assert loss[0].isfinite()
    assert loss[1] == 0
    assert loss[2:].isnan().all()
    assert not logits[1:].any()


def test_a_row_of_minus_infinity_but_one() -> None:
    logits = torch.full((1, 130), -torch.inf)
    logits[0, 129] = 1.0
    loss = torch.empty(1)
    cross_entropy_rows.cross_entropy_rows(logits, torch.tensor([129]), loss, torch.ones(1), -100, 0.0, triton_=True)
    assert loss.item() == 0
    assert not logits.any()


@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("shape", [(5, 33), (3, 2, 128), (1, 1), (9, 5000)])
def test_rms_norm(shape: tuple[int, ...], weight: bool) -> None:
    tensors = leaves(torch.float32, shape, *([shape[-1:]] if weight else []))
    ours, theirs = rms_norm(*tensors, eps=1e-5), F.rms_norm(tensors[0], shape[-1:], *tensors[1:], eps=1e-5)
    torch.testing.assert_close(ours, theirs)
    upstream = torch.randn_like(ours)
    torch.testing.assert_close(
        torch.autograd.grad(ours, tensors, upstream),
        torch.autograd.grad(theirs, tensors, upstream),
        rtol=1e-4,
        atol=1e-5,
    )


def test_rms_norm_of_strided_rows() -> None:
    (x,) = leaves(torch.float32, (6, 3, 40))
    torch.testing.assert_close(rms_norm(x[:, 1, 4:37], eps=1e-5), F.rms_norm(x[:, 1, 4:37], (33,), eps=1e-5))
    torch.testing.assert_close(rms_norm(x[..., 7], eps=1e-5), F.rms_norm(x[..., 7], (3,), eps=1e-5))


def test_opcheck() -> None:
    hidden, weight = leaves(torch.float32, (30, 16), (50, 16))
    target = torch.randint(0, 50, (30,))
    options = (-100, 0.0, "mean", 1, "auto", "triton", True, True, False)
    torch.library.opcheck(torch.ops.lightning_fms.linear_cross_entropy, (hidden, weight, None, target, *options))
    arguments = (hidden, weight[0].detach().requires_grad_(), 1e-5, torch.float32, "triton")
    torch.library.opcheck(torch.ops.lightning_fms.rms_norm, arguments)


def test_self_tests_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy_rows, "ROW_BLOCK", 1024)
    verify_linear_cross_entropy(torch.device("cpu"), "triton")
    verify_rms_norm(torch.device("cpu"), "triton")


def test_self_test_finds_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cross_entropy_rows.cross_entropy_rows

    monkeypatch.setattr(cross_entropy_rows, "ROW_BLOCK", 1024)

    def wrong(logits: Tensor, *rest: object) -> None:
        right(logits, *rest)  # type: ignore[arg-type]
        logits[:, ::50] *= 1.5

    module = sys.modules[linear_cross_entropy.__module__]
    monkeypatch.setattr(module, "cross_entropy_rows", wrong)
    with pytest.raises(RuntimeError, match="linear cross-entropy kernel is wrong on cpu"):
        verify_linear_cross_entropy(torch.device("cpu"), "triton")
