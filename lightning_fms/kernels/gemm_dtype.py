"""In which dtype a linear layer computes."""

import torch
from torch import Tensor


def gemm_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype in which `F.linear` would compute on `hidden` here: autocast's, except for float64."""
    kind = hidden.device.type
    if hidden.dtype != torch.float64 and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


__all__ = ["gemm_dtype"]
