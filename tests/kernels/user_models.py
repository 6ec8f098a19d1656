"""Modules as users write them, in different styles. Nothing here knows of the kernels."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

V, D = 53, 24


class RMSNorm(nn.Module):
    """Llama's own spelling: normalise in fp32, round, then scale."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return y.type_as(x) * self.weight


class ZeroCentredRMSNorm(RMSNorm):
    """Gemma's: looks alike, multiplies with 1 + weight."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1 + self.weight.float())).type_as(x)


class Layer(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.ff = norm(D), nn.Sequential(nn.Linear(D, 2 * D), nn.SiLU(), nn.Linear(2 * D, D))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ff(self.norm(x).cumsum(1) / 3)


class Decoder(nn.Module):
    """Untied head with a bias, own RMSNorm, shift in the loss."""

    def __init__(self, norm: type[nn.Module] = RMSNorm) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(Layer(norm) for _ in range(3))
        self.final = norm(D)
        self.to_vocabulary = nn.Linear(D, V)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.to_vocabulary(self.final(x))

    def loss(self, ids: Tensor) -> Tensor:
        logits = self(ids)
        return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, V), ids[..., 1:].reshape(-1))


class TiedDecoder(nn.Module):
    """Tied head, nn.RMSNorm, loss on transposed logits through the loss module, layers in a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(V, D)
        self.body = nn.Sequential(*(Layer(nn.RMSNorm) for _ in range(2)), nn.RMSNorm(D, eps=1e-6))
        self.lm_head = nn.Linear(D, V, bias=False)
        self.lm_head.weight = self.tokens.weight
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.body(self.tokens(ids)))

    def loss(self, ids: Tensor) -> Tensor:
        return self.criterion(self(ids).float().transpose(1, 2)[..., :-1], ids[:, 1:])
