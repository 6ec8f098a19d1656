"""Fused Triton kernels that are swapped into modules which know nothing of them."""

from lightning_fms.kernels.callback import TritonKernels
from lightning_fms.kernels.deferred_logits import DeferredLogits
from lightning_fms.kernels.gated_product import gated_product
from lightning_fms.kernels.layer_norm import layer_norm
from lightning_fms.kernels.linear_cross_entropy import linear_cross_entropy
from lightning_fms.kernels.rms_norm import rms_norm
from lightning_fms.kernels.rotary import rotary

__all__ = [
    "DeferredLogits",
    "TritonKernels",
    "gated_product",
    "layer_norm",
    "linear_cross_entropy",
    "rms_norm",
    "rotary",
]
