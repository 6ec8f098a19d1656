"""Gated MLPs and LayerNorms are found by what they do, computed by the fused kernels, and given back."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fms.kernels import TritonKernels
from lightning_fms.models import Llama


class OwnLayerNorm(nn.Module):
    """nanoGPT's: the bias is optional, the epsilon a constant."""

    def __init__(self, dim: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(dim))
        self.bias = nn.Parameter(torch.rand(dim)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class OddLayerNorm(OwnLayerNorm):
    """Looks alike, scales with 1 + weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, 1 + self.weight, self.bias, 1e-5)


class GeGLU(nn.Module):
    def __init__(self, approximate: str) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(16, 40, bias=False), nn.Linear(16, 40, bias=False)
        self.w2, self.act = nn.Linear(40, 16, bias=False), nn.GELU(approximate)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.act(self.w1(x)) * self.w3(x))


def model() -> nn.Module:
    torch.manual_seed(0)
    norms = [nn.LayerNorm(16), OwnLayerNorm(16, False), OwnLayerNorm(16, True), OddLayerNorm(16, True)]
    return nn.Sequential(*norms, GeGLU("none"), GeGLU("tanh"), Llama(53, 16, 1, 2).layers[0].ffn)


def step(net: nn.Module, cast: bool) -> list[Tensor]:
    net.zero_grad()
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        y = net(x)
    y.float().square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]


@pytest.mark.parametrize("cast", [False, True])
def test_same_numbers_and_undone(cast: bool) -> None:
    net = model()
    names, plain = list(net.state_dict()), step(net, cast)
    callback = TritonKernels(gated_product=True, layer_norm=True, backend="reference", linear_cross_entropy=False)
    callback.transform_module(net)
    callback.transform_module(net)
    assert "gated product: fused at 4, 5, 6" in callback.report
    assert "LayerNorm: fused at 0, 1, 2" in callback.report
    assert any(line == "not swapped: 3 (OddLayerNorm: its numbers are not a LayerNorm's)" for line in callback.report)
    ours = step(net, cast)
    assert [t.dtype for t in ours] == [t.dtype for t in plain]
    torch.testing.assert_close(ours, plain, rtol=0.05 if cast else 1e-4, atol=0.05 if cast else 1e-5)
    assert list(net.state_dict()) == names
    callback.restore()
    torch.testing.assert_close(step(net, cast), plain, rtol=0, atol=0)


def test_off_unless_asked_for() -> None:
    net, callback = model(), TritonKernels(backend="reference")
    callback.transform_module(net)
    assert not any("forward" in child.__dict__ for child in net.modules())
