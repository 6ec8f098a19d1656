"""`scaled_dot_product_attention` by FlexAttention, which is a Triton kernel, for runs in which no library may compute.

A causal mask is given to it as blocks: tiles of 128 x 128 that are seen whole, tiles on the diagonal, and nothing else. They
follow from the lengths alone, so they are a few lines of integer arithmetic inside the graph; `create_block_mask` would
make a mask of tokens x tokens first, in each layer. Any other mask is looked up for each score, at full cost.

Trade-off: no dropout, no gradient into a mask. On a Hopper GPU cuDNN's attention is faster (docs/kernels.md).

B batch, H heads, Q queries, K keys, E head dimension.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128
_OPTIONS = {"BACKEND": "TRITON"}


def flex_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` with the same arguments, [..., H, Q, E] and [..., H, K, E].

    Raises:
        ValueError: dropout, a mask that wants a gradient, or a mask beside `is_causal`.
    """
    if dropout_p:
        raise ValueError(f"{dropout_p=}: FlexAttention has no dropout; set it to 0, or leave triton_only off")
    if attn_mask is not None and (is_causal or attn_mask.requires_grad):
        raise ValueError("triton_only: attention takes either is_causal or an attn_mask without a gradient")
    # In a compiled block the compiler is at work already. On CPU it has no backward; eager's kernel stands in for tests.
    bare = torch.compiler.is_compiling() or not query.is_cuda
    attend = _attend if bare else _compiled()
    q, k, v = (_four_dimensions(t) for t in (query, key, value))
    out = attend(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    return out.reshape(*query.shape[:-1], value.shape[-1])


def _four_dimensions(x: Tensor) -> Tensor:
    return x if x.ndim == 4 else x.reshape(-1, *((1,) * (3 - min(x.ndim, 3))), *x.shape[-min(x.ndim, 3) :])


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, gqa: bool
) -> Tensor:
    blocks = causal_blocks(q.shape[-2], k.shape[-2], q.device) if causal else None
    score = None if mask is None else _masked(mask, q.shape[0])
    return flex_attention(  # type: ignore[call-overload]
        q, k, v, score_mod=score, block_mask=blocks, scale=scale, enable_gqa=gqa, kernel_options=_OPTIONS
    )


@cache
def _compiled() -> Callable[..., Tensor]:
    """Asked for at the first use, because `torch.compile` loads all of the compiler."""
    return torch.compile(_attend, dynamic=False, fullgraph=True)


def _masked(mask: Tensor, batch: int) -> Callable[..., Tensor]:
    """Look the mask [..., Q, K] up for each score: booleans that say what is seen, or floats that are added."""
    while mask.ndim < 4:
        mask = mask[None]
    of_batch, of_head, of_query, of_key = (int(size > 1) for size in mask.shape)  # 0: one for all

    def modify(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        found = mask[b * of_batch, h * of_head, query * of_query, key * of_key]
        return torch.where(found, score, -float("inf")) if mask.dtype == torch.bool else score + found

    return modify


def _causal(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def causal_blocks(queries: int, keys: int, device: torch.device) -> BlockMask:
    """The mask `query >= key`, in tiles. Lengths that do not fill their last tile have no tile that counts as whole."""
    rows, columns = -(-queries // BLOCK), -(-keys // BLOCK)
    i = torch.arange(rows, device=device, dtype=torch.int32)
    j = torch.arange(columns, device=device, dtype=torch.int32)

    def listed(counts: Tensor, tiles: Tensor) -> tuple[Tensor, Tensor]:
        return counts[None, None], tiles[None, None].contiguous()

    after_j = (j[:, None] + i[None]).clamp(max=rows - 1)  # the rows from j on
    if queries % BLOCK == 0 and keys % BLOCK == 0:
        diagonal = listed((i < columns).int(), i.clamp(max=columns - 1)[:, None].expand(rows, columns))
        whole = listed(i.clamp(max=columns), j[None].expand(rows, columns))
        diagonal_of = listed((j < rows).int(), j.clamp(max=rows - 1)[:, None].expand(columns, rows))
        whole_of = listed((rows - 1 - j).clamp(min=0), (after_j + 1).clamp(max=rows - 1))
        parts: tuple[Any, ...] = (*diagonal, *whole, *diagonal_of, *whole_of)
    else:
        seen = listed((i + 1).clamp(max=columns), j[None].expand(rows, columns))
        seen_by = listed((rows - j).clamp(min=0), after_j)
        parts = (*seen, None, None, *seen_by, None, None)
    return BlockMask((queries, keys), *parts, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=_causal)  # type: ignore[misc]


__all__ = ["causal_blocks", "flex_sdpa"]
