"""A Llama-style decoder in plain PyTorch: the reference model of the suite.

The file holds the architecture and nothing else. There is no sharding, casting, kernel or checkpoint code: the plugins
add all of that from outside, so what stands here can be read against the papers, and against `transformers`, whose
`LlamaForCausalLM` gives the same logits for the same weights (a test).

Every module that owns parameters has `reset_parameters()`. A model can therefore be built on the `meta` device, where
it costs no memory, be sharded there, and be filled block by block afterwards: an 8B model never exists unsharded.
Rotary tables are computed from `position_ids` and are not kept as buffers, so there is nothing else to fill and no
maximum length. The trade-off is some arithmetic per step: a cosine and a sine per token and frequency.

Shapes: B rows, T tokens, D model, H query heads, K key/value heads, E head dimension, F feed-forward, V vocabulary.

Sources: Llama 3 (arXiv:2407.21783), RoPE (arXiv:2104.09864), GQA (arXiv:2305.13245), SwiGLU (arXiv:2002.05202), and
GPT-2 for the initialisation: normal with std 0.02, divided by sqrt(2 * depth) in layers that write to the residual
stream.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fms.models.document_mask import DocumentMask, document_mask, masked_attention


def rotary_tables(position_ids: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles, fp32 [B, T, 1, E]; `position_ids` is int [B, T].

    Angles are fp32 whatever the model computes in: in bf16, positions above 256 would no longer be exact.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=position_ids.device) / head_dim
    angles_BTE = position_ids[..., None].float() * theta**-exponents
    angles_BTE = torch.cat((angles_BTE, angles_BTE), dim=-1)[:, :, None]
    return angles_BTE.cos(), angles_BTE.sin()


def rotate(x_BTHE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + E/2) of each head, in fp32, and return the dtype of `x_BTHE`."""
    first, second = x_BTHE.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x_BTHE.float() * cos + turned * sin).to(x_BTHE.dtype)


class Projection(nn.Linear):
    """A linear layer without bias that initialises with its own standard deviation, also after `to_empty`."""

    def __init__(self, in_features: int, out_features: int, std: float) -> None:
        self.std = std
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Fill the weight from N(0, std)."""
        nn.init.normal_(self.weight, std=self.std)


class TokenEmbedding(nn.Embedding):
    """An embedding that starts like the linear layers: std 1, as in `nn.Embedding`, is 50 times too wide when tied."""

    def __init__(self, num_embeddings: int, embedding_dim: int, std: float) -> None:
        self.std = std
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        """Fill the weight from N(0, std)."""
        nn.init.normal_(self.weight, std=self.std)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped key/value heads."""

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, std: float, residual_std: float) -> None:
        super().__init__()
        self.head_dim = dim // n_heads
        self.q_proj = Projection(dim, n_heads * self.head_dim, std)
        self.k_proj = Projection(dim, n_kv_heads * self.head_dim, std)
        self.v_proj = Projection(dim, n_kv_heads * self.head_dim, std)
        self.o_proj = Projection(n_heads * self.head_dim, dim, residual_std)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor, mask: DocumentMask | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; token t sees tokens 0..t of its row, or what the mask leaves of them."""
        heads = (*x_BTD.shape[:2], -1, self.head_dim)
        q_BTHE = rotate(self.q_proj(x_BTD).view(heads), cos, sin)
        k_BTKE = rotate(self.k_proj(x_BTD).view(heads), cos, sin)
        v_BTKE = self.v_proj(x_BTD).view(heads)
        q, k, v = (t.transpose(1, 2) for t in (q_BTHE, k_BTKE, v_BTKE))
        y_BHTE = masked_attention(q, k, v, mask)
        return self.o_proj(y_BHTE.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: a gated unit with three matrices."""

    def __init__(self, dim: int, ffn_dim: int, std: float, residual_std: float) -> None:
        super().__init__()
        self.gate_proj = Projection(dim, ffn_dim, std)
        self.up_proj = Projection(dim, ffn_dim, std)
        self.down_proj = Projection(ffn_dim, dim, residual_std)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class Block(nn.Module):
    """One pre-norm decoder layer: attention, then feed-forward, each added to the residual stream."""

    def __init__(
        self, dim: int, n_heads: int, n_kv_heads: int, ffn_dim: int, norm_eps: float, std: float, residual_std: float
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.attention = Attention(dim, n_heads, n_kv_heads, std, residual_std)
        self.ffn_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.ffn = FeedForward(dim, ffn_dim, std, residual_std)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor, mask: DocumentMask | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos, sin, mask)
        return x_BTD + self.ffn(self.ffn_norm(x_BTD))


class Decoder(nn.Module):
    """What decoders have in common: tokens are embedded, go through blocks with one rotary table, and a norm and the head follow.

    Args:
        vocab_size, dim: V, D.
        blocks: of [B, T, D] with cosine, sine and mask; made in this order, behind the embedding.
        norm: the last one.
        std: standard deviation of the initial embedding and head.
        rotated: values of each head that are rotated.
        rope_theta: base of the rotary frequencies.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        blocks: Iterable[nn.Module],
        norm: nn.Module,
        std: float,
        rotated: int,
        rope_theta: float,
    ) -> None:
        super().__init__()
        self.rotated, self.rope_theta = rotated, rope_theta
        self.embedding = TokenEmbedding(vocab_size, dim, std)
        self.layers = nn.ModuleList(blocks)
        self.norm = norm
        self.head = Projection(dim, vocab_size, std)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor:
        """Logits [B, T, V] for the token after each position.

        Args:
            input_ids: int [B, T].
            position_ids: int [B, T] for the rotary angles. `None` = 0..T-1 in every row.
            document_ids: int [B, T], the document of each token: a token sees its own document only. `None` = the whole row.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        cos, sin = rotary_tables(position_ids, self.rotated, self.rope_theta)
        mask = None if document_ids is None else document_mask(document_ids)
        x_BTD = self.embedding(input_ids)
        for block in self.layers:
            x_BTD = block(x_BTD, cos, sin, mask)
        return self.head(self.norm(x_BTD))


def check_sizes(**sizes: int) -> None:
    """Refuse a size that is not positive, by its name (ValueError)."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size}: must be at least 1")


class Llama(Decoder):
    """A decoder-only transformer.

    Args:
        vocab_size: V, the number of token ids, special ones included.
        dim: D, width of the residual stream.
        n_layers: number of blocks.
        n_heads: H, query heads; `dim / n_heads` must be a whole, even number (rotary positions turn pairs).
        n_kv_heads: K, key/value heads, a divisor of `n_heads`. `None` = `n_heads` (no grouping).
        ffn_dim: F. `None` = 8/3 of `dim`, rounded up to a multiple of 64: as many parameters as a plain 4x layer.
        rope_theta: base of the rotary frequencies. 500,000 as in Llama 3, good for contexts up to 8k.
        norm_eps: added to the mean square in RMSNorm.
        tie_embeddings: use the embedding as output head too. Saves V * D parameters, worth it in small models.
        init_std: standard deviation of the initial weights. 0.02 suits a width of 2,000 and more; narrow models learn faster
            from about 1 / sqrt(dim).

    Raises:
        ValueError: for a size that is not positive, or heads that do not divide.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        n_layers: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        ffn_dim: int | None = None,
        rope_theta: float = 500_000.0,
        norm_eps: float = 1e-5,
        tie_embeddings: bool = False,
        init_std: float = 0.02,
    ) -> None:
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        ffn_dim = -(-8 * dim // (3 * 64)) * 64 if ffn_dim is None else ffn_dim
        check_sizes(
            vocab_size=vocab_size, dim=dim, n_layers=n_layers, n_heads=n_heads, n_kv_heads=n_kv_heads, ffn_dim=ffn_dim
        )
        if dim % (2 * n_heads):
            raise ValueError(f"{dim=}, {n_heads=}: dim must be a multiple of 2 * n_heads")
        if n_heads % n_kv_heads:
            raise ValueError(f"{n_heads=}, {n_kv_heads=}: n_heads must be a multiple of n_kv_heads")
        residual_std = init_std / (2 * n_layers) ** 0.5
        blocks = (Block(dim, n_heads, n_kv_heads, ffn_dim, norm_eps, init_std, residual_std) for _ in range(n_layers))
        norm = nn.RMSNorm(dim, eps=norm_eps)
        super().__init__(vocab_size, dim, blocks, norm, init_std, dim // n_heads, rope_theta)
        if tie_embeddings:
            self.head.weight = self.embedding.weight
