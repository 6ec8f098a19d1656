"""One dial for a model's size: its depth says width, heads, learning rate, batch and length of the run.

Sizes that are varied one by one get out of proportion, and a learning rate that suits 100 million parameters breaks a billion.
So one number, the number of blocks, sets all of them, as `--depth` does in nanochat:

- width: 64 a block, rounded up to whole heads of 128 features, which attention kernels like best;
- tokens to train on: 20 a parameter without embeddings (Chinchilla, arXiv:2203.15556);
- learning rate and tokens a step: what DeepSeek LLM fitted (arXiv:2401.02954, section 3.1, equation 1) for AdamW with betas 0.9 and
  0.95, decay 0.1 and clipping at 1, from the operations C of the whole run: 0.3118 C^-0.1250, and 0.2920 C^0.3271 tokens. The
  constants agree with quotations of the equation by others; the paper itself was not at hand. The fit was made from 1e17 to 2e19
  operations, which are depths of 8 to 20; what it says for others is extrapolated. Two things differ: their C counts attention,
  ours is 6 N D; their rate falls in steps, ours along a cosine. They found a broad optimum, so both are starting points.

Plain arithmetic: the configs ask for it through the resolver `of_depth` (see `conf/__init__.py`), so any value given by hand wins.
"""

from collections.abc import Callable

HEAD_DIM = 128
TOKENS_PER_PARAMETER = 20
LARGEST = 512


def checked(depth: object) -> int:
    """The depth, if it is one.

    Raises:
        ValueError: for anything but a whole number from 1 to 512.
    """
    if depth is None:
        raise ValueError(
            "depth=null: model=llama and size=depth take their sizes from it; give depth=<blocks>, e.g. depth=12"
        )
    if isinstance(depth, bool) or not isinstance(depth, int) or not 1 <= depth <= LARGEST:
        raise ValueError(f"depth={depth}: give the number of blocks, a whole number from 1 to {LARGEST}, e.g. depth=12")
    return depth


def width(depth: int) -> int:
    """D, features of the residual stream: 64 a block, in whole heads of 128."""
    return HEAD_DIM * -(-depth // 2)


def heads(depth: int) -> int:
    """Attention heads of 128 features."""
    return width(depth) // HEAD_DIM


def init_std(depth: int) -> float:
    """Standard deviation of the first weights, 1 / sqrt(D): 0.036 at depth 12, 0.02 at depth 40."""
    return float(round(width(depth) ** -0.5, 4))


def parameters(depth: int) -> int:
    """N, weights of all blocks (12 D^2 each, rounded up by the feed-forward's multiple of 64); no embeddings, no norms."""
    dim = width(depth)
    ffn_dim = -(-8 * dim // (3 * 64)) * 64
    return depth * (4 * dim**2 + 3 * dim * ffn_dim)


def tokens(depth: int) -> int:
    """Tokens of the whole run: 20 a parameter."""
    return TOKENS_PER_PARAMETER * parameters(depth)


def learning_rate(depth: int) -> float:
    """Peak rate of AdamW, to two digits: 0.0018 at depth 12, 0.0011 at depth 24."""
    return float(f"{0.3118 * _operations(depth) ** -0.1250:.1e}")


def rows(depth: int, seq_len: int) -> int:
    """Rows of a global batch: the power of two nearest to the fitted tokens a step, at least 8, so that 8 ranks share it."""
    wanted = max(0.2920 * _operations(depth) ** 0.3271 / seq_len, 1.0)
    below = 1 << (int(wanted).bit_length() - 1)
    return max(8, below if wanted / below < 2**0.5 else 2 * below)


def steps(depth: int, seq_len: int, global_batch_size: int) -> int:
    """Optimizer steps until all tokens are read."""
    return -(-tokens(depth) // (seq_len * global_batch_size))


def _operations(depth: int) -> float:
    return 6.0 * parameters(depth) * tokens(depth)


_RULES: dict[str, Callable[..., float]] = {
    "width": width,
    "heads": heads,
    "init_std": init_std,
    "learning_rate": learning_rate,
    "rows": rows,
    "steps": steps,
}


def of_depth(what: str, depth: object, *sizes: object) -> float:
    """One of the rules by name, for the configs.

    Args:
        what: `width`, `heads`, `init_std`, `learning_rate`, `rows`, `steps`.
        depth: number of blocks.
        sizes: what that rule takes beside it, rows and tokens of a batch.

    Raises:
        ValueError: for a depth that is none, or a batch without a fixed number of tokens.
    """
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(
            f"depth={depth}: the batch follows from it in tokens, which takes data.seq_len=<tokens of a row>"
        )
    return _RULES[what](checked(depth), *sizes)


def described(depth: int) -> str:
    """One line: what the dial says, before anything given by hand."""
    count = "1 head" if heads(depth) == 1 else f"{heads(depth)} heads"
    return (
        f"depth {depth}: width {width(depth)}, {count} of {HEAD_DIM}, {_short(parameters(depth))} parameters without embeddings; "
        f"by rule {_short(tokens(depth))} tokens, learning rate {learning_rate(depth):g}"
    )


def _short(number: int) -> str:
    unit, size = next(((u, s) for u, s in (("T", 1e12), ("B", 1e9), ("M", 1e6)) if number >= s), ("k", 1e3))
    return f"{number / size:.3g} {unit}"
