"""Let the training step run without cuBLAS, cuDNN, CUTLASS and FlashAttention: every GEMM and attention is a Triton kernel.

Four places call a library in a step of a transformer. Linear layers: their `forward` is swapped for the product of `matmul`.
Attention: `flex_sdpa` stands in for it. The head's GEMMs: `linear_cross_entropy` has its own. Products that a module writes
itself: in compiled blocks Inductor is told to choose among its Triton templates only, by measuring them, which takes longer.
Norms outside compiled blocks are swapped, too, and step aside while the compiler traces. What is left is named in the report;
`benchmarks/triton_only.py` looks at what really ran (`library_kernels.cuda_libraries_used`).
"""

from contextlib import ExitStack
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor, nn

from lightning_fms.kernels.linear import linear
from lightning_fms.kernels.swap import Swaps, shortened

INDUCTOR = {
    "max_autotune_gemm": True,
    "max_autotune_gemm_backends": "TRITON",
    "max_autotune_conv_backends": "TRITON",
    # Templates that load through TMA; Inductor leaves them out where the device or the operands do not allow it.
    "triton.enable_persistent_tma_matmul": True,
}
# In newer versions of torch a thread has settings of its own, and a backward is compiled in one of autograd's threads, if late.
AUTOGRAD = {"force_non_lazy_backward_lowering": True}

# Call a library wherever they run uncompiled, and no kernel of ours stands in for them.
_CALL_LIBRARIES = (
    nn.modules.conv._ConvNd,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
    nn.Bilinear,
)


class CompilerSettings:
    """What the compiler is told for the length of a run; `restore` gives back what was set before."""

    def __init__(self) -> None:
        self._patches: ExitStack | None = None

    @property
    def active(self) -> bool:
        """Whether the settings are in force."""
        return self._patches is not None

    def enter(self) -> None:
        """Let everything that is compiled from now on choose among Triton's GEMMs."""
        if self._patches is None:
            self._patches = ExitStack()
            self._patches.enter_context(torch._inductor.config.patch(INDUCTOR))
            self._patches.enter_context(torch._functorch.config.patch(AUTOGRAD))

    def restore(self) -> None:
        """Take the settings back. What was compiled stays as it is."""
        if self._patches is not None:
            self._patches.close()
            self._patches = None


def swap_linears(module: nn.Module, swaps: Swaps) -> list[str]:
    """Let every plain `nn.Linear` that is not swapped yet use the Triton GEMM; the names."""
    found = []
    for name, child in module.named_modules():
        plain = isinstance(child, nn.Linear) and type(child).forward is nn.Linear.forward
        if plain and "forward" not in child.__dict__:
            swaps.add(child, _linear_forward)
            found.append(name)
    return found


def _linear_forward(self: nn.Linear, input: Tensor) -> Any:
    own = type(self).forward
    if own is not nn.Linear.forward:  # became another layer since, an FP8 one for example
        return own(self, input)
    return linear(input, self.weight, self.bias, "triton_only")


def library_layers(module: nn.Module) -> list[str]:
    """One line for each kind of layer that calls a library where it runs uncompiled."""
    found: dict[str, list[str]] = {}
    for name, child in module.named_modules():
        other_linear = isinstance(child, nn.Linear) and type(child).forward is not nn.Linear.forward
        if isinstance(child, _CALL_LIBRARIES) or other_linear:
            found.setdefault(type(child).__name__, []).append(name)
    return [f"{kind} calls a CUDA library outside compiled blocks: {shortened(names)}" for kind, names in found.items()]


__all__ = ["CompilerSettings", "library_layers", "swap_linears"]
