"""`TritonKernels`: the callback that swaps fused kernels into a LightningModule for the length of a run.

A kernel is swapped where it measured faster or smaller than what the compiler makes of the module's own code ('auto'), and
everything that was not swapped is reported with its reason. Our FSDP2 strategy calls `transform_module` before it
compiles and shards; under any other strategy the callback acts by itself: in `setup`, and once more in `on_fit_start` for
modules that were only built in `configure_model`.
"""

from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_fms.kernels.attention import CHOICES, fastest_backend, preferring
from lightning_fms.kernels.flex_sdpa import flex_sdpa
from lightning_fms.kernels.gathered_weights import mark_changed
from lightning_fms.kernels.linear_cross_entropy import CHUNK_BYTES
from lightning_fms.kernels.sdpa import ReplacedSDPA
from lightning_fms.kernels.swap import Swaps, shortened, swap_head, swap_rms_norms, training_device
from lightning_fms.kernels.swap_parts import swap_gated_mlps, swap_layer_norms
from lightning_fms.kernels.swap_rotary import ReplacedRotary
from lightning_fms.kernels.triton_only import CompilerSettings, library_layers, swap_linears
from lightning_fms.kernels.verify import (
    verify_gated_product,
    verify_layer_norm,
    verify_linear_cross_entropy,
    verify_matmul,
    verify_rms_norm,
    verify_rotary,
)
from lightning_fms.triton_backend import BACKENDS, INTERPRETED

Choice = bool | Literal["auto"]

# What 'auto' means on CUDA; docs/kernels.md says what was measured. Deferred logits save gigabytes in any case. RMSNorm as
# called takes 0.82 ms against eager's 0.34 (16,384 x 4,096, H200), although the kernels alone take 0.07 + 0.13: the rest is
# Python around the registered operations. True once a whole training step is faster with it.
LINEAR_CROSS_ENTROPY_ON_CUDA = True
RMS_NORM_ON_CUDA = False
# Alone and on the device, ours take 1.05 (SwiGLU), 0.76 (LayerNorm) and 0.67 (rotary) of the compiler's time (docs/kernels.md);
# inside a block the compiler fuses them with what is around, which an operation of ours prevents. True once a whole step gains.
GATED_PRODUCT_ON_CUDA = False
LAYER_NORM_ON_CUDA = False
ROTARY_ON_CUDA = False


class TritonKernels(Callback):
    """Swap fused kernels into the module at the start, and put the module's own code back at the end.

    Parameters, their names and the state dict stay as they are, so checkpoints do not depend on this callback.

    Args:
        linear_cross_entropy: the output head returns deferred logits, and `F.cross_entropy` on them never holds the
            [tokens, vocabulary] logits. 'auto': on CUDA (a PyTorch version of it runs on CPU when asked for: less memory,
            eager's time).
        rms_norm: fused RMSNorm. 'auto': off until it is measured faster than the compiler's, also on CUDA.
        gated_product: SwiGLU and GeGLU of gated MLPs in one pass. 'auto': off, as above.
        layer_norm: fused LayerNorm. 'auto': off, as above.
        rotary: fused rotary embedding in the place of the function that turns queries and keys. 'auto': off, as above.
        attention: which backend `scaled_dot_product_attention` tries first where it is called without a mask: 'cudnn',
            'flash', 'auto' (the fastest that is right on this CUDA device) or 'off'. Calls with a mask stay PyTorch's.
        triton_only: no cuBLAS, cuDNN, CUTLASS or FlashAttention in a training step: GEMMs, attention, norms and loss by
            Triton. On CUDA, or under the interpreter; elsewhere it is said that nothing was done.
        backend: 'triton', 'reference' (PyTorch, any device) or 'auto': Triton on CUDA or under TRITON_INTERPRET=1, else
            the reference. With 'reference' or under the interpreter, 'auto' above means on, on any device.
        head: name of the output head, where it cannot be found by structure.
        chunk_bytes: budget of the logits buffer.
        check_targets: stop with a device-side assertion where a target is out of range; see `linear_cross_entropy`.
        verify: compare each kernel with its reference on the training device before the run.

    Raises:
        ValueError: an unknown option, or a `head` that the module does not have.
        RuntimeError: with `verify`, a kernel whose numbers are wrong on this device.
    """

    def __init__(
        self,
        linear_cross_entropy: Choice = "auto",
        rms_norm: Choice = "auto",
        gated_product: Choice = "auto",
        layer_norm: Choice = "auto",
        rotary: Choice = "auto",
        attention: str = "auto",
        triton_only: bool = False,
        backend: str = "auto",
        head: str | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        check_targets: bool = False,
        verify: bool = False,
    ):
        choices = {
            "linear_cross_entropy": linear_cross_entropy,
            "rms_norm": rms_norm,
            "gated_product": gated_product,
            "layer_norm": layer_norm,
            "rotary": rotary,
        }
        for name, value in choices.items():
            if value not in (True, False, "auto"):
                raise ValueError(f"{name}={value!r} is not one of True, False, 'auto'")
        if attention not in CHOICES:
            raise ValueError(f"{attention=} is not one of {', '.join(CHOICES)}")
        if triton_only and attention in ("cudnn", "flash"):
            raise ValueError(f"triton_only computes attention by FlexAttention: {attention=} has to stay at 'auto'")
        if backend not in BACKENDS or backend == "triton_only":
            given = ", ".join(name for name in BACKENDS if name != "triton_only")
            raise ValueError(f"{backend=} is not one of {given} (without any library: triton_only=True)")
        if chunk_bytes <= 0:
            raise ValueError(f"{chunk_bytes=} must be positive")
        self.linear_cross_entropy, self.rms_norm = linear_cross_entropy, rms_norm
        self.gated_product, self.layer_norm, self.rotary = gated_product, layer_norm, rotary
        self.attention, self.triton_only = attention, triton_only
        self.backend, self.head, self.verify = backend, head, verify
        self.loss_options = {"chunk_bytes": chunk_bytes, "check_targets": check_targets, "backend": backend}
        self._swaps = Swaps()
        self._sdpa, self._rotary, self._compiler = ReplacedSDPA(), ReplacedRotary(), CompilerSettings()
        self._attends, self._linears = "", list[str]()
        self._decided: list[str] = []
        self._shown: list[str] = []
        self._verified: set[str] = set()
        self._device: torch.device | None = None
        self._step_hooks: list[Any] = []

    @property
    def report(self) -> list[str]:
        """One line for each thing swapped, and for each that was not with the reason."""
        swaps = self._swaps
        lines = [f"linear cross-entropy: deferred logits at {name}" for name in swaps.heads]
        if swaps.norms:
            lines.append(f"RMSNorm: fused at {shortened(swaps.norms)}")
        if swaps.gated:
            lines.append(f"gated product: fused at {shortened(swaps.gated)}")
        if swaps.layer_norms:
            lines.append(f"LayerNorm: fused at {shortened(swaps.layer_norms)}")
        if self._rotary.names:
            lines.append(f"rotary embedding: fused at {shortened(self._rotary.names)}")
        if self._attends:
            lines.append(f"attention: {self._attends}")
        if self._linears:
            lines.append(f"Triton only: GEMMs of {shortened(self._linears)}, and in compiled blocks")
        return [*lines, *(f"not swapped: {reason}" for reason in (*self._decided, *swaps.skipped))]

    def transform_module(self, module: nn.Module) -> None:
        """Swap what is in `module` now. Calling it again swaps only what came in between."""
        device = self._device or training_device(module)
        if not self._swaps.active:
            self._swaps, self._linears, self._rotary.names = Swaps(), [], []
        self._decided, self._swaps.skipped = [], []
        runs_triton = self.backend != "reference" and (device.type == "cuda" or INTERPRETED)
        without_libraries = self.triton_only and runs_triton
        options = {**self.loss_options, **({"backend": "triton_only"} if without_libraries else {})}
        if self._wanted("linear_cross_entropy", self.linear_cross_entropy, LINEAR_CROSS_ENTROPY_ON_CUDA, device):
            self._verify("linear cross-entropy", verify_linear_cross_entropy, device)
            swap_head(module, self._swaps, self.head, **options)
        if self._wanted("rms_norm", self.rms_norm, RMS_NORM_ON_CUDA or without_libraries, device):
            self._verify("RMSNorm", verify_rms_norm, device)
            swap_rms_norms(module, self._swaps, self.backend, without_libraries and self.rms_norm == "auto")
        self._swap_parts(module, device)
        if without_libraries:
            self._leave_libraries(module, device)
            return
        if self.triton_only:
            self._decided.append(f"triton_only: there is no Triton on {device.type}, or backend={self.backend!r}")
        self._choose_attention(device)

    def _swap_parts(self, module: nn.Module, device: torch.device) -> None:
        """Kernels that are off unless asked for, and not worth a line in the report then."""
        for name, choice, on_cuda, check, swap in (
            ("gated product", self.gated_product, GATED_PRODUCT_ON_CUDA, verify_gated_product, swap_gated_mlps),
            ("LayerNorm", self.layer_norm, LAYER_NORM_ON_CUDA, verify_layer_norm, swap_layer_norms),
            ("rotary embedding", self.rotary, ROTARY_ON_CUDA, verify_rotary, self._swap_rotary),
        ):
            if choice is True or (choice == "auto" and on_cuda and device.type == "cuda"):
                self._verify(name, check, device)
                swap(module, self._swaps, self.backend)

    def _swap_rotary(self, module: nn.Module, swaps: Swaps, backend: str) -> None:
        self._rotary.replace(module, backend)

    def _leave_libraries(self, module: nn.Module, device: torch.device) -> None:
        """What else calls a library: compiled GEMMs, attention, linear layers."""
        self._compiler.enter()
        self._verify("matrix product", verify_matmul, device, "triton_only")
        self._linears += swap_linears(module, self._swaps)
        self._decided += library_layers(module)
        if device.type == "cuda":  # FlexAttention has no backward on CPU
            self._sdpa.replace(flex_sdpa)
            self._attends = "FlexAttention"

    def _choose_attention(self, device: torch.device) -> None:
        if self.attention == "off" or device.type != "cuda" or self.backend == "reference":
            wanted = self.attention in ("cudnn", "flash")
            self._decided += [
                f"attention={self.attention!r}: there is no choice on {device.type}, or with backend='reference'"
            ] * wanted
        elif self.attention == "auto" and not (self._sdpa.free or self._sdpa.active):
            self._decided.append("attention: scaled_dot_product_attention was already replaced by something else")
        elif not self._sdpa.active:
            first, why = fastest_backend(device) if self.attention == "auto" else (self.attention, "as asked for")
            self._sdpa.replace(preferring(first))
            self._attends = f"{first} first where there is no mask ({why})"

    def _wanted(self, name: str, choice: Choice, on_cuda: bool, device: torch.device) -> bool:
        if choice != "auto":
            wanted, why = choice, f"{name}=False"
        elif device.type == "cuda":
            wanted, why = on_cuda, f"{name}: off by default on CUDA; {name}=True forces it"
        else:
            wanted = self.backend == "reference" or INTERPRETED
            why = f"{name}: off by default on {device.type}; {name}=True forces it"
        if not wanted:
            self._decided.append(why)
        return wanted

    def _verify(self, name: str, check: Any, device: torch.device, backend: str | None = None) -> None:
        if self.verify and name not in self._verified:
            check(device, backend or self.backend)
            self._verified.add(name)

    def _act(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._device = trainer.strategy.root_device
        self.transform_module(pl_module)
        if self.report != self._shown:
            self._shown = self.report
            for line in self._shown:
                rank_zero_info(f"kernels: {line}")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Swap in what exists by now."""
        self._act(trainer, pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Swap in what `configure_model` built."""
        self._act(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let logits from before an optimizer step be seen as stale under FSDP2 too."""
        for optimizer in trainer.optimizers if self._swaps.heads else ():

            def after_step(stepped: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
                mark_changed(pl_module, stepped)

            self._step_hooks.append(optimizer.register_step_post_hook(after_step))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put the module's own code back."""
        self.restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Put the module's own code back: Lightning tears no callback down after an error."""
        self.restore()

    def restore(self) -> None:
        """Give every module its own code back. The report stays."""
        self._swaps.restore()
        self._sdpa.restore()
        self._rotary.restore()
        self._compiler.restore()
        while self._step_hooks:
            self._step_hooks.pop().remove()


__all__ = ["TritonKernels"]
