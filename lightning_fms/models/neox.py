"""GPT-NeoX, the architecture of Pythia, in plain PyTorch.

As in `llama`, the file holds the architecture and nothing else. What differs from Llama: attention and feed-forward read the
same residual stream and are added to it together (one block is as deep as half of one), only a part of each head is rotated,
norms are LayerNorms, layers have biases, the feed-forward is a plain GELU of four times the width. `transformers`'
`GPTNeoXForCausalLM` gives the same logits for the same weights (a test).

Initial weights are those of GPT-NeoX: normal with std sqrt(2 / (5 D)), and 2 / (L sqrt(D)) in layers that write to the residual
stream; biases are zero.

Shapes: B rows, T tokens, D model, H heads, E head dimension, R rotated part of it, F feed-forward, V vocabulary.

Sources: Pythia (arXiv:2304.01373), GPT-NeoX-20B (arXiv:2204.06745).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fms.models.document_mask import DocumentMask, masked_attention
from lightning_fms.models.llama import Decoder, check_sizes, rotate


class Affine(nn.Linear):
    """A linear layer with bias that initialises with its own standard deviation, also after `to_empty`."""

    def __init__(self, in_features: int, out_features: int, std: float) -> None:
        self.std = std
        super().__init__(in_features, out_features)

    def reset_parameters(self) -> None:
        """Fill the weight from N(0, std), the bias with zeros."""
        nn.init.normal_(self.weight, std=self.std)
        nn.init.zeros_(self.bias)


class Attention(nn.Module):
    """Causal self-attention; the first R values of each head's query and key are rotated."""

    def __init__(self, dim: int, n_heads: int, std: float, residual_std: float) -> None:
        super().__init__()
        self.head_dim = dim // n_heads
        self.qkv_proj = Affine(dim, 3 * dim, std)  # query, key and value of the first head, then of the second, ...
        self.o_proj = Affine(dim, dim, residual_std)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor, mask: DocumentMask | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; token t sees tokens 0..t of its row, or what the mask leaves of them."""
        qkv = self.qkv_proj(x_BTD).view(*x_BTD.shape[:2], -1, 3 * self.head_dim)
        q_BTHE, k_BTHE, v_BTHE = qkv.chunk(3, dim=-1)
        q, k = (_rotated(t, cos, sin).transpose(1, 2) for t in (q_BTHE, k_BTHE))
        y_BHTE = masked_attention(q, k, v_BTHE.transpose(1, 2), mask)
        return self.o_proj(y_BHTE.transpose(1, 2).flatten(2))


def _rotated(x_BTHE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, rest = x_BTHE.split((cos.shape[-1], x_BTHE.shape[-1] - cos.shape[-1]), dim=-1)
    return torch.cat((rotate(turned, cos, sin), rest), dim=-1)


class FeedForward(nn.Module):
    """Two layers with GELU in between."""

    def __init__(self, dim: int, ffn_dim: int, std: float, residual_std: float) -> None:
        super().__init__()
        self.up_proj = Affine(dim, ffn_dim, std)
        self.down_proj = Affine(ffn_dim, dim, residual_std)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        return self.down_proj(F.gelu(self.up_proj(x_BTD)))


class Block(nn.Module):
    """Attention and feed-forward side by side, both added to the residual stream."""

    def __init__(self, dim: int, n_heads: int, ffn_dim: int, norm_eps: float, std: float, residual_std: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim, eps=norm_eps)
        self.attention = Attention(dim, n_heads, std, residual_std)
        self.ffn_norm = nn.LayerNorm(dim, eps=norm_eps)
        self.ffn = FeedForward(dim, ffn_dim, std, residual_std)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor, mask: DocumentMask | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        return x_BTD + self.attention(self.attention_norm(x_BTD), cos, sin, mask) + self.ffn(self.ffn_norm(x_BTD))


class NeoX(Decoder):
    """A decoder-only transformer with parallel blocks.

    Args:
        vocab_size: V, the number of token ids, special ones included.
        dim: D, width of the residual stream.
        n_layers: number of blocks.
        n_heads: H; a divisor of `dim`.
        ffn_dim: F. `None` = four times `dim`.
        rotary_fraction: share of each head that is rotated, a whole, even number of values.
        rope_theta: base of the rotary frequencies.
        norm_eps: added to the variance in LayerNorm.

    Raises:
        ValueError: for a size that is not positive, heads that do not divide, or an odd part to rotate.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        n_layers: int,
        n_heads: int,
        ffn_dim: int | None = None,
        rotary_fraction: float = 0.25,
        rope_theta: float = 10_000.0,
        norm_eps: float = 1e-5,
    ) -> None:
        ffn_dim = 4 * dim if ffn_dim is None else ffn_dim
        check_sizes(vocab_size=vocab_size, dim=dim, n_layers=n_layers, n_heads=n_heads, ffn_dim=ffn_dim)
        if dim % n_heads:
            raise ValueError(f"{dim=}, {n_heads=}: dim must be a multiple of n_heads")
        rotated = int(dim // n_heads * rotary_fraction)
        if rotated < 2 or rotated % 2 or rotary_fraction > 1:
            raise ValueError(
                f"{rotary_fraction=} of heads of {dim // n_heads}: {rotated} values, which must be even and at least 2"
            )
        std, residual_std = math.sqrt(2 / (5 * dim)), 2 / (n_layers * math.sqrt(dim))
        blocks = (Block(dim, n_heads, ffn_dim, norm_eps, std, residual_std) for _ in range(n_layers))
        norm = nn.LayerNorm(dim, eps=norm_eps)
        super().__init__(vocab_size, dim, blocks, norm, std, rotated, rope_theta)
