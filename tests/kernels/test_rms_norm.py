"""RMSNorm (PyTorch path; the Triton kernels run in interpreted_kernels.py): numbers, shapes, registration."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fms.kernels import rms_norm

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # in opcheck
EPS = 1e-5


def leaves(shape: tuple[int, ...], weight: bool, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator)] + ([torch.randn(shape[-1], generator=generator)] * weight)
    return [t.to(dtype).requires_grad_() for t in tensors]


@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("shape", [(5, 33), (2, 3, 64), (7,), (4, 1), (0, 16)])
def test_output_and_gradients_are_those_of_eager_in_float64(shape: tuple[int, ...], weight: bool) -> None:
    tensors = leaves(shape, weight)
    ours = rms_norm(*tensors, eps=EPS)
    theirs = F.rms_norm(tensors[0], shape[-1:], *tensors[1:], eps=EPS)
    torch.testing.assert_close(ours, theirs)
    upstream = torch.randn_like(ours)
    torch.testing.assert_close(
        torch.autograd.grad(ours, tensors, upstream), torch.autograd.grad(theirs, tensors, upstream)
    )


def test_non_contiguous_input_and_gradient() -> None:
    (x,) = leaves((3, 33, 5), False)
    ours, theirs = rms_norm(x.transpose(1, 2), eps=EPS), F.rms_norm(x.transpose(1, 2), (33,), eps=EPS)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        torch.autograd.grad(ours.mT.exp().sum(), x), torch.autograd.grad(theirs.mT.exp().sum(), x)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_no_larger_than_eagers(dtype: torch.dtype) -> None:
    tensors = leaves((64, 96), True, dtype)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    upstream = torch.randn(64, 96, dtype=torch.float64).to(dtype)

    def outputs(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        return [t.double() for t in (y.detach(), *torch.autograd.grad(y, inputs, upstream.to(y.dtype)))]

    true = outputs(F.rms_norm(wide[0], (96,), wide[1], EPS), wide)
    eager = outputs(F.rms_norm(tensors[0], (96,), tensors[1], EPS), tensors)
    for ours, theirs, exact in zip(outputs(rms_norm(*tensors, eps=EPS), tensors), eager, true, strict=True):
        assert (ours - exact).norm() <= 1.05 * (theirs - exact).norm() + 1e-6 * exact.norm()


def test_output_dtype() -> None:
    x, w = torch.randn(2, 8, dtype=torch.bfloat16), torch.randn(8)
    assert rms_norm(x, w).dtype == torch.float32
    assert rms_norm(x, w, out_dtype=torch.bfloat16).dtype == torch.bfloat16


def test_compiles_without_a_graph_break() -> None:
    tensors = leaves((6, 40), True, torch.float32)

    def function(x: Tensor, w: Tensor) -> Tensor:
        return rms_norm(x * 2, w, EPS).sin()

    ours, theirs = torch.compile(function, fullgraph=True, backend="aot_eager")(*tensors), function(*tensors)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), tensors), torch.autograd.grad(theirs.sum(), tensors))


@pytest.mark.parametrize("weight", [False, True])
def test_opcheck(weight: bool) -> None:
    tensors = leaves((6, 40), weight, torch.float32)
    w = tensors[1] if weight else None
    torch.library.opcheck(torch.ops.lightning_fms.rms_norm, (tensors[0], w, EPS, torch.float32, "reference"))
    arguments = (torch.randn(6, 40), tensors[0].detach(), None if w is None else w.detach(), torch.rand(6))
    torch.library.opcheck(torch.ops.lightning_fms.rms_norm_backward, (*arguments, "reference"))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="does not fit x"):
        rms_norm(torch.randn(2, 8), torch.randn(7))
    with pytest.raises(ValueError, match="backend='cuda'"):
        rms_norm(torch.randn(2, 8), backend="cuda")
