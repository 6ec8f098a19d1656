"""Self-tests: each kernel against float64 on the device at hand, no worse than eager PyTorch there.

A Triton compiler that miscompiles one layout on one architecture shows up as slightly wrong gradients weeks later. This
takes a fraction of a second at the start.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fms.kernels.gated_product import gated_product
from lightning_fms.kernels.layer_norm import layer_norm
from lightning_fms.kernels.linear import linear
from lightning_fms.kernels.linear_cross_entropy import linear_cross_entropy
from lightning_fms.kernels.rms_norm import rms_norm
from lightning_fms.kernels.rotary import rotary
from lightning_fms.kernels.swap_parts import ACTIVATIONS
from lightning_fms.triton_backend import INTERPRETED

_SLACK = 3.0 if INTERPRETED else 2.0  # times eager's error, in norm; the interpreter rounds bf16 towards zero


def verify_linear_cross_entropy(device: torch.device, backend: str = "auto") -> None:
    """Loss and gradients of 150 tokens, width 64, vocabulary 1001, bf16.

    Raises:
        RuntimeError: an error beyond twice eager's.
    """
    torch_state = torch.Generator().manual_seed(0)
    hidden = torch.randn(150, 64, generator=torch_state)
    weight = torch.randn(1001, 64, generator=torch_state) / 8
    target = torch.randint(0, 1001, (150,), generator=torch_state).masked_fill_(torch.arange(150) % 7 == 0, -100)
    target = target.to(device)
    inputs = [t.to(device, torch.bfloat16) for t in (hidden, weight)]

    def eager(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = F.linear(hidden, weight)
        return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), target)

    def fused(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, target, backend=backend)

    _compare("linear cross-entropy", fused, eager, inputs)


def verify_rms_norm(device: torch.device, backend: str = "auto") -> None:
    """Output and gradients of 37 rows of 1000 features, bf16.

    Raises:
        RuntimeError: an error beyond twice eager's.
    """
    torch_state = torch.Generator().manual_seed(0)
    x, weight = torch.randn(37, 1000, generator=torch_state), torch.randn(1000, generator=torch_state)
    inputs = [t.to(device, torch.bfloat16) for t in (x, weight)]
    _compare(
        "RMSNorm",
        lambda x, weight: rms_norm(x, weight, 1e-5, backend=backend),
        lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-5),
        inputs,
    )


def verify_gated_product(device: torch.device, backend: str = "auto") -> None:
    """SwiGLU and both GeGLUs of 37 rows of 1000 features, bf16.

    Raises:
        RuntimeError: an error beyond twice eager's.
    """
    inputs = _random(device, (37, 1000), (37, 1000))
    for name, activation in ACTIVATIONS.items():
        _compare(
            f"gated product ({name})",
            lambda gate, up, name=name: gated_product(gate, up, name, backend=backend),
            lambda gate, up, activation=activation: activation(gate) * up,
            inputs,
        )


def verify_layer_norm(device: torch.device, backend: str = "auto") -> None:
    """Output and gradients of 37 rows of 1000 features, bf16.

    Raises:
        RuntimeError: an error beyond twice eager's.
    """
    _compare(
        "LayerNorm",
        lambda x, weight, bias: layer_norm(x, weight, bias, 1e-5, backend=backend),
        lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias, 1e-5),
        _random(device, (37, 1000), (1000,), (1000,)),
    )


def verify_rotary(device: torch.device, backend: str = "auto") -> None:
    """Half-split and interleaved pairs in 2 rows of 37 tokens, 3 heads of 20 features of which 16 are turned, bf16.

    Raises:
        RuntimeError: an error beyond twice eager's.
    """
    (x,) = _random(device, (2, 37, 3, 20))
    angles = torch.linspace(0, 6, 2 * 37 * 8, dtype=torch.float64).view(2, 37, 8)
    cos, sin = (table.to(device, torch.bfloat16) for table in (angles.cos(), angles.sin()))
    for interleaved in (False, True):

        def eager(x: Tensor, interleaved: bool = interleaved) -> Tensor:
            c, s = (table[:, :, None].to(x.dtype) for table in (cos, sin))
            turned, rest = x[..., :16], x[..., 16:]
            a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
            parts = (a * c - b * s, b * c + a * s)
            both = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
            return torch.cat((both, rest), dim=-1)

        _compare(
            f"rotary ({'interleaved' if interleaved else 'half-split'})",
            lambda x, interleaved=interleaved: rotary(x, cos, sin, interleaved=interleaved, backend=backend),
            eager,
            [x],
        )


def verify_matmul(device: torch.device, backend: str = "triton_only") -> None:
    """A linear layer of 150 tokens, 64 features, 200 outputs, bf16, without a library.

    Raises:
        RuntimeError: an error beyond twice eager's.
    """
    x, weight, bias = _random(device, (150, 64), (200, 64), (200,))
    _compare("matrix product", lambda x, weight, bias: linear(x, weight, bias, backend), F.linear, [x, weight, bias])


def _random(device: torch.device, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, device="cpu").to(device, torch.bfloat16) for shape in shapes]


def _compare(name: str, fused: Callable[..., Tensor], eager: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
    exact = _outputs(eager, [t.double() for t in inputs])
    whats = ("output", *(f"gradient {number} of {len(inputs)}" for number in range(1, len(inputs) + 1)))
    results = _outputs(fused, inputs), _outputs(eager, inputs), exact
    for what, ours, theirs, true in zip(whats, *results, strict=True):
        error, allowed = float((ours - true).norm()), float((theirs - true).norm())
        floor = 1e-6 * float(true.norm())
        if not error <= _SLACK * allowed + floor:
            raise RuntimeError(
                f"the {name} kernel is wrong on {inputs[0].device}: {what} is off by {error:.2e} where eager PyTorch is "
                f"off by {allowed:.2e}; switch it off, and report the GPU with its torch and triton versions"
            )


@torch.enable_grad()
def _outputs(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    y = function(*leaves)
    upstream = torch.linspace(-1, 1, y.numel(), device=y.device, dtype=torch.float64).view(y.shape)
    grads = torch.autograd.grad(y, leaves, upstream.to(y.dtype) if y.ndim else None)
    return [t.detach().double() for t in (y, *grads)]
