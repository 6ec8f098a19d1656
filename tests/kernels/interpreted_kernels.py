"""The Triton kernels themselves, in Triton's interpreter. Started by test_interpreter.py with TRITON_INTERPRET=1."""

import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

import fused_operations
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fms import triton_backend
from lightning_fms.kernels import TritonKernels, cross_entropy_rows, linear_cross_entropy, matmul, rms_norm
from lightning_fms.kernels.linear import linear
from lightning_fms.kernels.verify import (
    verify_gated_product,
    verify_layer_norm,
    verify_linear_cross_entropy,
    verify_matmul,
    verify_rms_norm,
    verify_rotary,
)
from lightning_fms.models import Llama

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


def without_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's products raise: what is computed is computed by Triton."""

    def refused(*_: object, **__: object) -> Tensor:
        raise AssertionError("a library's GEMM")

    for name in ("mm", "addmm", "matmul"):
        monkeypatch.setattr(torch, name, refused)
    monkeypatch.setattr(F, "linear", refused)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
def test_matmul(turned: tuple[bool, bool], dtype: torch.dtype) -> None:
    for (m, n, k), accumulate in (((70, 45, 33), True), ((64, 64, 16), False), ((1, 5, 1), True)):
        shapes = (k, m) if turned[0] else (m, k), (n, k) if turned[1] else (k, n)
        left, right = (x.detach().t() if t else x.detach() for x, t in zip(leaves(dtype, *shapes), turned, strict=True))
        for out_dtype in {dtype, torch.float32}:
            out = torch.randn(m, n + 3).to(out_dtype)[:, :n]
            expected = out.clone()
            matmul.matmul_into(left, right, out, accumulate)
            matmul.matmul_reference(left, right, expected, accumulate)
            torch.testing.assert_close(out, expected, atol=1e-2 if out_dtype == torch.bfloat16 else 1e-4, rtol=1e-2)


def test_matmul_of_nothing_and_of_what_does_not_fit() -> None:
    out = torch.ones(3, 4)
    matmul.matmul_into(torch.ones(3, 0), torch.ones(0, 4), out, accumulate=True)
    assert out.eq(1).all()
    matmul.matmul_into(torch.ones(3, 0), torch.ones(0, 4), out)
    assert out.eq(0).all()
    matmul.matmul_into(torch.ones(0, 2), torch.ones(2, 4), torch.ones(0, 4))
    with pytest.raises(ValueError, match="does not fit out"):
        matmul.matmul_into(torch.ones(3, 2), torch.ones(3, 4), out)
    with pytest.raises(ValueError, match="float64"):
        matmul.matmul_into(torch.ones(3, 2).double(), torch.ones(2, 4).double(), out)


@pytest.mark.parametrize("accumulate", ["native", "fp32"])
def test_cross_entropy_with_its_gemms_by_triton(accumulate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = leaves(torch.float32, (20, 16), (101, 16), (101,))
    target = torch.randint(0, 101, (20,))
    theirs = F.cross_entropy(F.linear(*tensors), target)
    expected = torch.autograd.grad(theirs, tensors)
    options = {"chunk_bytes": 1, "accumulate": accumulate, "backend": "triton_only"}
    with monkeypatch.context() as patch:
        without_libraries(patch)
        hidden, weight, bias = tensors
        ours = linear_cross_entropy(hidden, weight, target, bias, **options)
        found = torch.autograd.grad(ours, tensors)
    torch.testing.assert_close((ours, *found), (theirs, *expected), rtol=1e-4, atol=1e-5)


def test_linear_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for cast in (False, True):
        tensors = leaves(torch.float32, (3, 7, 16), (24, 16), (24,))
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            theirs = F.linear(*tensors)
            upstream = torch.randn_like(theirs)
            with monkeypatch.context() as patch:
                without_libraries(patch)
                ours = linear(*tensors, backend="triton_only")
                found = torch.autograd.grad(ours, tensors, upstream)
        assert ours.dtype == theirs.dtype
        expected = torch.autograd.grad(theirs, tensors, upstream)
        torch.testing.assert_close((ours, *found), (theirs, *expected), atol=2e-2 if cast else 1e-5, rtol=2e-2)
    torch.library.opcheck(torch.ops.lightning_fms.product, leaves(torch.float32, (5, 16), (16, 24)))


def test_linear_by_triton_in_a_compiled_block() -> None:
    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear(x, weight, bias, "triton_only").float().square().sum()

    tensors = leaves(torch.bfloat16, (2, 5, 16), (24, 16), (24,))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(loss(*tensors), tensors)
    for found, true in zip(torch.autograd.grad(compiled(*tensors), tensors), expected, strict=True):
        assert torch.equal(found, true)


def test_a_step_of_a_llama_calls_no_library_for_a_product() -> None:
    """All but attention, whose Triton kernel has no backward on CPU."""
    torch.manual_seed(0)
    model, ids = Llama(53, 32, 1, 2), torch.randint(0, 53, (1, 9))

    def step() -> list[Tensor]:
        model.zero_grad()
        loss = F.cross_entropy(model(ids)[:, :-1].reshape(-1, 53), ids[:, 1:].reshape(-1))
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    def products(events: Iterable[Any]) -> set[str]:
        return {event.name for event in events} & {"aten::mm", "aten::addmm", "aten::bmm", "aten::linear"}

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        plain = step()
    assert {"aten::mm", "aten::linear"} <= products(profiler.events())
    callback, config = TritonKernels(triton_only=True), torch._inductor.config
    callback.transform_module(model)
    assert config.max_autotune_gemm_backends == "TRITON"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.testing.assert_close(step(), plain, rtol=1e-3, atol=1e-5)
    assert not products(profiler.events())
    assert any("Triton only: GEMMs" in line and "7 in all" in line for line in callback.report), callback.report
    callback.restore()
    assert config.max_autotune_gemm_backends != "TRITON"
    torch.testing.assert_close(step(), plain, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in fused_operations.OPERATIONS]
    + [(name, torch.bfloat16) for name in ("silu", "half-split", "layer norm")],
)
def test_fused_operations(name: str, dtype: torch.dtype) -> None:
    function = partial(fused_operations.OPERATIONS[name], backend="triton")
    tensors = fused_operations.inputs(name, dtype)
    eager = fused_operations.EAGER[name]
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    true = fused_operations.outputs(eager, wide)
    for ours, theirs, exact in zip(
        fused_operations.outputs(function, tensors), fused_operations.outputs(eager, tensors), true, strict=True
    ):
        assert ours.dtype == dtype
        error, allowed = (ours.double() - exact).norm(), (theirs.double() - exact).norm()
        more = 1.1 if dtype == torch.float32 else 2.5  # the interpreter rounds bf16 towards zero
        assert error <= more * allowed + 1e-6 * exact.norm()


def test_opcheck() -> None:
    hidden, weight = leaves(torch.float32, (30, 16), (50, 16))
    target = torch.randint(0, 50, (30,))
    options = (-100, 0.0, "mean", 1, "auto", "triton", True, True, False)
    torch.library.opcheck(torch.ops.lightning_fms.linear_cross_entropy, (hidden, weight, None, target, *options))
    arguments = (hidden, weight[0].detach().requires_grad_(), 1e-5, torch.float32, "triton")
    torch.library.opcheck(torch.ops.lightning_fms.rms_norm, arguments)


def test_self_tests_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy_rows, "ROW_BLOCK", 1024)
    cpu = torch.device("cpu")
    for check in (verify_linear_cross_entropy, verify_rms_norm, verify_gated_product, verify_layer_norm, verify_rotary):
        check(cpu, "triton")
    verify_matmul(cpu)


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
