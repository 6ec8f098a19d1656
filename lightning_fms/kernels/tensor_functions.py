"""Kinds of functions that a tensor subclass sees in `__torch_function__`: those that look, that may write, that watch gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Read from the object itself, nothing is computed.
_PROPERTIES = ["shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad_fn", "is_cuda", "is_cpu"]
_PROPERTIES += ["is_meta", "is_sparse", "is_quantized", "is_nested", "_version", "output_nr", "_base"]
_METHODS = ["size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "is_floating_point"]
_METHODS += ["is_complex", "element_size", "storage_offset", "get_device", "__len__", "__hash__", "is_inference"]
METADATA = {getattr(Tensor, name).__get__ for name in _PROPERTIES} | {getattr(Tensor, name) for name in _METHODS}
METADATA |= {torch.numel, torch.is_floating_point, torch.is_complex}

_WATCHES_GRADIENT = {"register_hook", "retain_grad", "register_post_accumulate_grad_hook", "backward"}
_HANDS_OUT_MEMORY = {"data_ptr", "untyped_storage", "storage", "numpy", "__array__", "__dlpack__"}


def may_write(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether the function may write into the tensors it is given, now or later through memory that it hands out."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    augmented = name.startswith("__i") and name not in ("__invert__", "__iter__", "__index__", "__int__")
    named = name in ("__setitem__", "__set__") or name in _HANDS_OUT_MEMORY
    asked = "out" in kwargs or bool(kwargs.get("inplace"))
    return in_place or augmented or named or asked or func is Tensor.data.__get__  # type: ignore[attr-defined]


def watches_gradient(func: Callable[..., Any]) -> bool:
    """Whether the function's effect depends on gradients that pass through the very tensor it is given."""
    return getattr(func, "__name__", "") in _WATCHES_GRADIENT


__all__ = ["METADATA", "may_write", "watches_gradient"]
