"""Transformer encoders in plain PyTorch: for text, of RoBERTa's shape, and for images, of ViT's.

Both are the same stack of blocks, in which every token sees every other. Norms come before attention and feed-forward (as in ViT;
RoBERTa has them behind), which trains without a long warm-up. Architecture only, as in `llama`; all modules can be built on
`meta`.

Shapes: B rows, T tokens, D model, H heads, E head dimension, F feed-forward, V vocabulary, C classes, P patch.

Sources: RoBERTa (arXiv:1907.11692), ViT (arXiv:2010.11929), its plain variant with mean pooling (arXiv:2205.01580).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fms.models.llama import Projection, TokenEmbedding
from lightning_fms.models.neox import Affine, FeedForward

STD = 0.02


class Attention(nn.Module):
    """Self-attention of all tokens with all."""

    def __init__(self, dim: int, n_heads: int, residual_std: float) -> None:
        super().__init__()
        self.head_dim = dim // n_heads
        self.qkv_proj = Affine(dim, 3 * dim, STD)
        self.o_proj = Affine(dim, dim, residual_std)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        qkv = self.qkv_proj(x_BTD).view(*x_BTD.shape[:2], -1, 3 * self.head_dim)
        q, k, v = (t.transpose(1, 2) for t in qkv.chunk(3, dim=-1))
        y_BHTE = F.scaled_dot_product_attention(q, k, v)
        return self.o_proj(y_BHTE.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then feed-forward, each added to the residual stream."""

    def __init__(self, dim: int, n_heads: int, ffn_dim: int, residual_std: float) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, n_heads, residual_std)
        self.ffn = FeedForward(dim, ffn_dim, STD, residual_std)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.ffn(self.ffn_norm(x_BTD))


def _blocks(dim: int, n_layers: int, n_heads: int, ffn_dim: int) -> nn.ModuleList:
    if min(dim, n_layers, n_heads, ffn_dim) < 1 or dim % n_heads:
        raise ValueError(f"{dim=}, {n_layers=}, {n_heads=}, {ffn_dim=}: all at least 1, dim a multiple of n_heads")
    return nn.ModuleList(Block(dim, n_heads, ffn_dim, STD / (2 * n_layers) ** 0.5) for _ in range(n_layers))


class TextEncoder(nn.Module):
    """Predicts each token from all others; the embedding is the output head, too.

    Args:
        vocab_size: V; the last id stands for a masked token, see `MaskedLM`.
        dim, n_layers, n_heads, ffn_dim: D, number of blocks, H, F.
        max_tokens: of a row, 512 as in BERT; positions are learned, so a longer row is refused (ValueError).

    Raises:
        ValueError: for a size that is not positive, or heads that do not divide.
    """

    def __init__(
        self, vocab_size: int, dim: int, n_layers: int, n_heads: int, ffn_dim: int, max_tokens: int = 512
    ) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(vocab_size, dim, STD)
        self.positions = TokenEmbedding(max_tokens, dim, STD)
        self.layers = _blocks(dim, n_layers, n_heads, ffn_dim)
        self.norm = nn.LayerNorm(dim)
        self.head = Projection(dim, vocab_size, STD)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [B, T, V] for each position of `input_ids`, int [B, T]."""
        if input_ids.shape[1] > self.positions.num_embeddings:
            raise ValueError(
                f"a row of {input_ids.shape[1]} tokens, and max_tokens={self.positions.num_embeddings}: give shorter rows, or more"
            )
        x_BTD = self.embedding(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.layers:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


class ViT(nn.Module):
    """Classifies square images.

    Args:
        classes: C.
        dim, n_layers, n_heads, ffn_dim: as in `TextEncoder`.
        image_size: pixels of a side; 224 and 16 as in ViT-L/16.
        patch_size: P, a divisor of it; each P x P patch is a token.

    Raises:
        ValueError: for sizes that do not fit.
    """

    def __init__(
        self,
        classes: int,
        dim: int,
        n_layers: int,
        n_heads: int,
        ffn_dim: int,
        image_size: int = 224,
        patch_size: int = 16,
    ) -> None:
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"{image_size=}, {patch_size=}: patches have to fill the image")
        self.image_size = image_size
        self.patches = nn.Conv2d(3, dim, patch_size, stride=patch_size)
        self.positions = TokenEmbedding((image_size // patch_size) ** 2, dim, STD)
        self.layers = _blocks(dim, n_layers, n_heads, ffn_dim)
        self.norm = nn.LayerNorm(dim)
        self.head = Affine(dim, classes, STD)

    def forward(self, image: Tensor) -> Tensor:
        """Logits [B, C] of images [B, 3, image_size, image_size]."""
        x_BTD = self.patches(image).flatten(2).transpose(1, 2)
        x_BTD = x_BTD + self.positions(torch.arange(x_BTD.shape[1], device=image.device))
        for block in self.layers:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD).mean(1))
