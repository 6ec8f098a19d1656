"""What the converted layers of all recipes share: a class that is made once, and the check of a batch."""

import torch
from torch import Tensor, nn

from lightning_fms.precision.selection import GRANULE

_CLASSES: dict[tuple[type, type], type] = {}


def converted_class(kind: type[nn.Module], plain: type[nn.Module]) -> type:
    """The FP8 class of a class, made once, so that the compiler sees one type and not one per layer.

    Its `plain_class` is what a layer gets back.
    """
    if (kind, plain) not in _CLASSES:
        _CLASSES[kind, plain] = type(f"Float8{plain.__name__}", (kind, plain), {"plain_class": plain})
    return _CLASSES[kind, plain]


def check_tokens(input: Tensor) -> None:
    """Refuse a training batch that the hardware's GEMM of the weight gradient cannot take.

    Raises:
        ValueError: when training on a number of tokens that is no multiple of 16.
    """
    tokens = input.numel() // input.shape[-1]
    if torch.is_grad_enabled() and tokens % GRANULE:
        raise ValueError(
            f"an FP8 layer got {tokens} tokens (input {tuple(input.shape)}): the GEMM of the weight gradient needs "
            f"a multiple of {GRANULE}. Make rows x seq_len one, or use rowwise_gw_hp"
        )
