"""Gated products, rotary embedding and LayerNorm beside what users write: for the tests of both paths."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fms.kernels import gated_product, layer_norm, rotary

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
Function = Callable[..., Tensor]


def half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As in transformers, on [B, T, H, E], the last features untouched where the tables are narrower."""
    x, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    cos, sin = (torch.cat((t, t), dim=-1)[:, :, None] for t in (cos, sin))
    first, second = x.chunk(2, dim=-1)
    return torch.cat((x * cos + torch.cat((-second, first), dim=-1) * sin, rest), dim=-1)


def full_tables(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """As in transformers, whose tables have a column for each feature."""
    x, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    if interleaved:
        turned = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    else:
        turned = torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)
    return torch.cat((x * cos[:, :, None] + turned * sin[:, :, None], rest), dim=-1)


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As in Llama's own code, with complex numbers."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    pairs, rest = x[..., : 2 * cos.shape[-1]].to(wide), x[..., 2 * cos.shape[-1] :]
    turned = (
        torch.view_as_complex(pairs.contiguous().unflatten(-1, (-1, 2)))
        * torch.complex(cos.to(wide), sin.to(wide))[:, :, None]
    )
    return torch.cat((torch.view_as_real(turned).flatten(-2).to(x.dtype), rest), dim=-1)


def activate(gate: Tensor, activation: str) -> Tensor:
    return (
        F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh" if "tanh" in activation else "none")
    )


OPERATIONS: dict[str, Function] = {
    **{name: partial(gated_product, activation=name) for name in ACTIVATIONS},
    "half-split": rotary,
    "interleaved, partial": partial(rotary, interleaved=True),
    "half-split, partial, transposed": rotary,
    "half-split, partial, full tables": partial(rotary, full=True),
    "interleaved, full tables": partial(rotary, interleaved=True, full=True),
    "layer norm": layer_norm,
    "layer norm without a bias": layer_norm,
    "layer norm without parameters": layer_norm,
}
EAGER: dict[str, Function] = {
    **{name: lambda gate, up, a=name: activate(gate, a) * up for name in ACTIVATIONS},
    "half-split": half_split,
    "interleaved, partial": interleaved,
    "half-split, partial, transposed": half_split,
    "half-split, partial, full tables": full_tables,
    "interleaved, full tables": partial(full_tables, interleaved=True),
    **{
        f"layer norm{kind}": lambda x, *parameters: F.layer_norm(x, x.shape[-1:], *parameters)
        for kind in ("", " without a bias", " without parameters")
    },
}


def inputs(name: str, dtype: torch.dtype) -> list[Tensor]:
    """Odd sizes, and strides that are not those of a fresh tensor."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    if name in ACTIVATIONS:
        return [half.detach().requires_grad_() for half in random(3, 5, 66).chunk(2, dim=-1)]
    if "norm" in name:
        sizes = {"layer norm": 2, "layer norm without a bias": 1, "layer norm without parameters": 0}
        parameters = [random(33).requires_grad_() for _ in range(sizes[name])]
        return [(3 + 2 * random(4, 5, 40))[..., 7:].detach().requires_grad_(), *parameters]
    pairs, x = 10 if "full" in name else 5, random(2, 7, 3, 13 if "partial" in name else 10)
    angles = torch.rand(1 if "partial" in name else 2, 7, pairs, generator=generator) * 6
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if "transposed" in name else x
    return [x.requires_grad_(), angles.cos().to(dtype), angles.sin().to(dtype)]


def outputs(function: Function, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The result and the gradients."""
    y = function(*tensors)
    upstream = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape).to(y.dtype)
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, leaves, upstream)]
