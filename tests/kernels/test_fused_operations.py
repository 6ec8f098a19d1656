"""Gated products, rotary embedding and LayerNorm (PyTorch path; the Triton kernels run in interpreted_kernels.py)."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from fused_operations import ACTIVATIONS, EAGER, OPERATIONS, inputs, outputs
from torch import Tensor

from lightning_fms.kernels import gated_product, layer_norm, rotary

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # in opcheck


@pytest.mark.parametrize("name", OPERATIONS)
def test_output_and_gradients_are_those_of_eager_in_float64(name: str) -> None:
    tensors = inputs(name, torch.float64)
    torch.testing.assert_close(outputs(OPERATIONS[name], tensors), outputs(EAGER[name], tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPERATIONS)
def test_error_is_no_larger_than_eagers(name: str, dtype: torch.dtype) -> None:
    tensors = inputs(name, dtype)
    true = outputs(EAGER[name], [t.detach().double().requires_grad_(t.requires_grad) for t in tensors])
    for ours, theirs, exact in zip(
        outputs(OPERATIONS[name], tensors), outputs(EAGER[name], tensors), true, strict=True
    ):
        assert ours.dtype == dtype
        error, allowed = (ours.double() - exact).norm(), (theirs.double() - exact).norm()
        assert error <= 1.05 * allowed + 1e-6 * exact.norm()


@pytest.mark.parametrize("name", ["silu", "interleaved, partial", "layer norm"])
def test_compiles_without_a_graph_break(name: str) -> None:
    tensors = inputs(name, torch.float32)

    def function(*inputs: Tensor) -> Tensor:
        return OPERATIONS[name](inputs[0] * 2, *inputs[1:]).sin()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(outputs(compiled, tensors), outputs(function, tensors))


@pytest.mark.parametrize("empty", [(0, 8), (3, 0, 8)])
def test_no_rows(empty: tuple[int, ...]) -> None:
    x = torch.zeros(empty, requires_grad=True)
    (gated_product(x, x) + layer_norm(x, torch.ones(8))).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == empty
    assert rotary(torch.zeros(0, 3, 2, 8), torch.ones(1, 3, 4), torch.ones(1, 3, 4)).shape == (0, 3, 2, 8)


def test_rotary_keeps_the_layout_and_the_callers_tensor() -> None:
    x = torch.randn(2, 3, 7, 8)  # [B, H, T, E]
    before, table = x.clone(), torch.rand(1, 7, 4)
    y = rotary(x.transpose(1, 2), table, table)
    assert y.stride() == x.transpose(1, 2).stride()
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: gated_product(x, x[:, :3]), "not of one shape"),
        (lambda x: gated_product(x, x, "relu"), "activation='relu'"),
        (lambda x: layer_norm(x, torch.ones(7)), "do not fit x"),
        (lambda x: layer_norm(x, None, torch.ones(8)), "do not fit x"),
        (lambda x: rotary(x[None, None], torch.ones(1, 1, 5), torch.ones(1, 1, 5)), "do not fit x"),
        (lambda x: rotary(x[None], torch.ones(1, 2, 4), torch.ones(1, 2, 4)), "do not fit x"),
        (
            lambda x: rotary(x[None, None], torch.ones(1, 1, 4, requires_grad=True), torch.ones(1, 1, 4)),
            "tables that want a gradient",
        ),
    ],
)
def test_wrong_arguments_are_refused(call: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.randn(2, 8))


def test_opcheck() -> None:
    gate, up = (torch.randn(5, 12, requires_grad=True) for _ in range(2))
    for activation in ACTIVATIONS[:2]:
        torch.library.opcheck(torch.ops.lightning_fms.gated_product, (gate, up, activation, "reference"))
    x, weight = torch.randn(5, 12, requires_grad=True), torch.randn(12, requires_grad=True)
    torch.library.opcheck(torch.ops.lightning_fms.layer_norm, (x, weight, None, 1e-5, "reference"))
    heads, table = torch.randn(2, 3, 4, 10, requires_grad=True), torch.rand(1, 3, 4)
    torch.library.opcheck(torch.ops.lightning_fms.rotary, (heads, table, table, True, False, False, "reference"))


def test_gelu_of_both_kinds_is_pytorchs() -> None:
    gate, up = torch.randn(2, 40, 16).double()
    assert torch.allclose(gated_product(gate, up, "gelu"), F.gelu(gate) * up)
    assert torch.allclose(gated_product(gate, up, "gelu_tanh"), F.gelu(gate, approximate="tanh") * up)
