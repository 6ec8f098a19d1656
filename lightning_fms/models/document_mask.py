"""Attention that stays inside a document, for rows that hold several.

`document_ids` [B, T] number the documents of each row; a token sees the tokens before it with its own number. They are the
only source of the mask: an EOS may occur inside a document, and position ids that restart do not keep documents apart.

On a GPU the mask is a `BlockMask` for FlexAttention (arXiv:2412.05496), which skips tiles that are masked as a whole, so
short documents cost less than one long row. Elsewhere it is a tensor of booleans for `scaled_dot_product_attention`.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

DocumentMask = Tensor | BlockMask


@cache
def _compiled() -> Callable[..., Tensor]:
    """Asked for at the first use: `torch.compile` loads all of the compiler, which a run without it need not wait for."""
    return torch.compile(flex_attention, dynamic=False)


def document_mask(document_ids: Tensor) -> DocumentMask:
    """Return the mask of causal attention within documents.

    Args:
        document_ids: int [B, T].

    Returns:
        On a GPU a `BlockMask`; elsewhere bool [B, 1, T, T], true where query (dim 2) sees key (dim 3).
    """
    B, T = document_ids.shape
    if document_ids.is_cuda:

        def within(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (document_ids[b, query] == document_ids[b, key])

        return create_block_mask(within, B, None, T, T, device=document_ids.device)
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return same & torch.ones(T, T, dtype=torch.bool, device=document_ids.device).tril()


def masked_attention(q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, mask: DocumentMask | None) -> Tensor:
    """Causal attention [B, H, T, E]; K may be a divisor of H. Without a mask every earlier token of the row is seen."""
    grouped = q_BHTE.shape[1] != k_BKTE.shape[1]
    if mask is None:
        return F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, is_causal=True, enable_gqa=grouped)
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, attn_mask=mask, enable_gqa=grouped)
    attend: Any = flex_attention if torch.compiler.is_compiling() else _compiled()
    return attend(q_BHTE, k_BKTE, v_BKTE, block_mask=mask, enable_gqa=grouped)
