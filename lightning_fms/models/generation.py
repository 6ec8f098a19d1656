"""Sampling text from a causal language model, one token at a time.

Written for a sample at the end of a run, not for serving: every step runs the model on the whole context, in a buffer
of fixed length, so that there is one shape (no recompilation) and no cache that a sharded or swapped model would have
to share. A position never sees what is to its right, so the unused rest of the buffer changes nothing. The number of
steps does not depend on what is drawn: under a sharded strategy a forward is a collective, and every rank must make as
many.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def pick(logits_V: Tensor, temperature: float, generator: torch.Generator | None) -> int:
    """The next token id from fp32 logits [V] on the CPU: the argmax at temperature 0, else a draw."""
    if temperature == 0:
        return int(logits_V.argmax())
    probabilities = torch.softmax(logits_V / temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


@torch.no_grad()
def generate(
    forward: Callable[[Tensor], Tensor],
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    context: int,
    temperature: float = 0.0,
    eos_id: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> list[int]:
    """Continue `prompt` and return the new token ids, without `eos_id`.

    Args:
        forward: maps token ids int64 [1, context] to logits [1, context, V].
        prompt: token ids; only the last `context - 1` are seen.
        max_new_tokens: upper bound of the number of new tokens.
        context: length of the buffer, at most what the model was trained on.
        temperature: 0 is greedy; 1 draws from the model's own distribution.
        eos_id: token that ends the text; what was drawn after it is cut off. `None` = never ends.
        seed: of the draws. They are made on the CPU, so that every rank of a sharded model draws the same token.
        device: where `forward` wants its input.

    Raises:
        ValueError: for an empty prompt, a context below 2, fewer than 1 new token, or a negative temperature.
    """
    if not len(prompt):
        raise ValueError(f"{prompt=}: generation needs at least one token to start from")
    if context < 2:
        raise ValueError(f"{context=}: must be at least 2, one token to read and one to write")
    if max_new_tokens < 1:
        raise ValueError(f"{max_new_tokens=}: must be at least 1")
    if temperature < 0:
        raise ValueError(f"{temperature=}: must be 0 (greedy) or above")
    generator = torch.Generator().manual_seed(seed)
    tokens, start = list(prompt), len(prompt)
    for _ in range(max_new_tokens):
        window = tokens[-(context - 1) :]
        buffer = torch.zeros(1, context, dtype=torch.int64)
        buffer[0, : len(window)] = torch.tensor(window)
        logits = forward(buffer.to(device))[0, len(window) - 1]
        token = pick(logits.float().cpu(), temperature, generator)
        tokens.append(token)
    new = tokens[start:]
    return new[: new.index(eos_id)] if eos_id in new else new
