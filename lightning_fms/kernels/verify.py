"""Self-tests: each kernel against float64 on the device at hand, no worse than eager PyTorch there.

A Triton compiler that miscompiles one layout on one architecture shows up as slightly wrong gradients weeks later. This
takes a fraction of a second at the start.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fms.kernels.linear_cross_entropy import linear_cross_entropy
from lightning_fms.kernels.rms_norm import rms_norm

_SLACK = 2.0  # times eager's error, in norm


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


def _compare(name: str, fused: Callable[..., Tensor], eager: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
    exact = _outputs(eager, [t.double() for t in inputs])
    for what, ours, theirs, true in zip(
        ("output", "first gradient", "second gradient"),
        _outputs(fused, inputs),
        _outputs(eager, inputs),
        exact,
        strict=True,
    ):
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
