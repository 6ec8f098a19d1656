"""Floating-point operations per token of a module that we know nothing about.

The usual formula, 6 N + 12 L H E T (PaLM, arXiv:2204.02311, appendix B), needs the number of layers and heads, which a
plain module does not announce. But the cost of a row of T tokens is a T + b T^2: matrix products with weights are
linear in T, attention scores are quadratic. So the forward is run on the `meta` device, where it costs nothing, at two
lengths, the operations are counted, and a and b follow. For a Llama this gives 6 N + 12 L H E T exactly, N being the
weights that take part in a matrix product (not the embedding; a tied one counts once, as the head).

Convention: model FLOPs. The backward counts as two forwards, recomputation by activation checkpointing is not counted,
and attention counts in full although a causal kernel skips half, as in PaLM and nanoGPT. So figures compare.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

PROBES = (64, 128)


@dataclass(frozen=True)
class TrainFlops:
    """FLOPs of forward and backward per token: `per_token + per_token_squared * T` in a row of T tokens."""

    per_token: float
    per_token_squared: float
    counts_attention: bool

    def at(self, tokens: int) -> float:
        """FLOPs per token in rows of `tokens` tokens."""
        return self.per_token + self.per_token_squared * tokens


def matmul_weights(module: nn.Module) -> int:
    """N: parameters of linear layers. A weight shared by two layers multiplies twice and counts twice."""
    return sum(layer.weight.numel() for layer in module.modules() if isinstance(layer, nn.Linear))


def count_train_flops(module: nn.Module) -> TrainFlops:
    """Count by running `module(input_ids)` on `meta`; `module` itself is not touched.

    If its forward takes something else, only the linear layers are counted and `counts_attention` is false.
    """
    try:
        short, long = (_forward_flops(module, tokens) for tokens in PROBES)
    except Exception:  # Anything may happen in a forward that was not made for these arguments.
        return TrainFlops(6.0 * matmul_weights(module), 0.0, counts_attention=False)
    squared = (long / PROBES[1] - short / PROBES[0]) / (PROBES[1] - PROBES[0])
    return TrainFlops(3 * (short / PROBES[0] - squared * PROBES[0]), 3 * squared, counts_attention=True)


def _forward_flops(module: nn.Module, tokens: int) -> int:
    state = {
        name: torch.empty_like(t, device="meta") for name, t in (*module.named_parameters(), *module.named_buffers())
    }
    input_ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        functional_call(module, state, (input_ids,))
    return counter.get_total_flops()
