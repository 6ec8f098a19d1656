"""Which linear layers compute in FP8, which stay in bf16, and why.

FP8 pays where a GEMM is large: the tensor cores are twice as fast, and the cast of the operands, a pass over memory, is
amortised. It does harm in two places. The output head turns hidden states into logits, and its rounding errors go
straight into the loss. A weight that is tied to an embedding is a lookup table too, and keeps the precision of one.
And it does not work at all where a dimension is no multiple of 16 bytes: the hardware's GEMM refuses it.

So each `nn.Linear` of a module that we have never seen gets one decision with one reason, and the decisions become a
table that is printed once: a layer that silently stayed in bf16 is a slow run that nobody can explain.

The output head is found by name (`head`, `lm_head`, ...) or by shape: the one linear layer that is as large as the
largest embedding. `skip` covers what neither finds.

Sizes below which FP8 does not gain: torchao's measurements on H100
(https://github.com/pytorch/ao/tree/main/torchao/float8#performance).
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

HEAD_NAMES = ("head", "lm_head", "embed_out", "score", "classifier")
GRANULE = 16  # FP8 GEMMs need every dimension in multiples of 16 elements


@dataclass(frozen=True)
class Decision:
    """One linear layer: converted if `reason` is empty, else kept in bf16 for that reason.

    Attributes:
        name: fully qualified name in the module.
        out_features, in_features: shape of the weight.
        reason: why it stays in bf16; empty for a layer that is converted.
        note: something to know of a converted layer, e.g. that its weight is gathered in bf16.
    """

    name: str
    out_features: int
    in_features: int
    reason: str = ""
    note: str = ""

    @property
    def converted(self) -> bool:
        """True if the layer computes in FP8."""
        return not self.reason

    @property
    def numel(self) -> int:
        """Number of weights."""
        return self.out_features * self.in_features


def too_small_to_gain(recipe: str, out_features: int, in_features: int) -> bool:
    """True where the casts cost more than the faster GEMM saves."""
    if recipe == "fused":  # its casts are a third of torchao's
        return out_features * in_features < 2**21
    if recipe == "tensorwise":
        return in_features <= 4096 and out_features <= 1024
    return out_features <= 2048 or in_features <= 1024 or (out_features <= 4096 and in_features <= 2048)


def decide(
    module: nn.Module, recipe: str, *, head: bool = False, keep_small: bool = True, skip: Sequence[str] = ()
) -> list[Decision]:
    """One decision for each linear layer of `module`, in the order of `named_modules`.

    Args:
        module: any module, on any device, `meta` included.
        recipe: see `recipes`; it sets the size from which FP8 gains.
        head: convert the output head too.
        keep_small: keep layers in bf16 that are too small to gain.
        skip: patterns of names, as in a shell (`*.mlp.router`), that stay in bf16.

    Raises:
        ValueError: for a pattern in `skip` that matches no linear layer.
    """
    linears = {name: m for name, m in module.named_modules() if isinstance(m, nn.Linear)}
    for pattern in skip:
        if not any(fnmatch(name, pattern) for name in linears):
            raise ValueError(f"skip={pattern!r} matches no linear layer; there are {', '.join(_grouped(linears))}")
    owners = Counter(id(p) for m in module.modules() for p in m._parameters.values() if p is not None)
    heads = _output_heads(module, linears)
    decisions = []
    for name, linear in linears.items():
        out_features, in_features = linear.weight.shape
        if any(fnmatch(name, pattern) for pattern in skip):
            reason = "skipped by name"
        elif owners[id(linear.weight)] > 1:
            reason = "weight tied to another module"
        elif name in heads and not head:
            reason = "output head"
        elif not (reason := unfit(linear)) and keep_small and too_small_to_gain(recipe, out_features, in_features):
            reason = "too small to gain"
        decisions.append(Decision(name, out_features, in_features, reason))
    return decisions


def computes_in_fp8(module: nn.Module) -> bool:
    """Whether the module is a linear layer that was converted, by any recipe."""
    return getattr(type(module), "is_float8", False)


def unfit(linear: nn.Linear) -> str:
    """Why this layer cannot compute in FP8; empty if it can."""
    out_features, in_features = linear.weight.shape
    if not computes_in_fp8(linear):  # a layer that is converted already was fit
        if type(linear).forward is not nn.Linear.forward:
            return f"{type(linear).__name__} has a forward of its own"
        if "forward" in linear.__dict__:
            return "its forward is replaced on the instance (the head: by deferred logits)"
    if isinstance(linear, NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight, not its forward"
    if linear.weight.dtype not in (torch.float32, torch.bfloat16):
        return f"weight is {str(linear.weight.dtype).removeprefix('torch.')}"
    if out_features % GRANULE or in_features % GRANULE:
        return f"dimensions are no multiples of {GRANULE}"
    return ""


def summary(decisions: Sequence[Decision]) -> str:
    """One line: how much was converted, and how many layers were not, by reason."""
    done = [d for d in decisions if d.converted]
    share = sum(d.numel for d in done) / max(1, sum(d.numel for d in decisions))
    kept = Counter(d.reason for d in decisions if not d.converted)
    reasons = "; in bf16: " + ", ".join(f"{count} {reason}" for reason, count in kept.items()) if kept else ""
    return f"{len(done)} of {len(decisions)} linear layers ({share:.1%} of their weights){reasons}"


def table(decisions: Sequence[Decision]) -> list[str]:
    """A line for each kind of layer (`layers.*.q_proj`): shape, how many, what it computes in and why; FP8 first."""
    groups = Counter(
        (_pattern(d.name), f"{d.out_features} x {d.in_features}", d.reason, d.note)
        for d in sorted(decisions, key=lambda d: not d.converted)
    )
    width = max((len(pattern) for pattern, *_ in groups), default=0)
    return [
        f"  {pattern:{width}}  {shape:>14}  {count:>4}x  "
        + (f"bf16: {reason}" if reason else "fp8" + (f", {note}" if note else ""))
        for (pattern, shape, reason, note), count in groups.items()
    ]


def _output_heads(module: nn.Module, linears: dict[str, nn.Linear]) -> set[str]:
    named = {name for name in linears if name.rpartition(".")[2] in HEAD_NAMES}
    embeddings = [m.weight.shape for m in module.modules() if isinstance(m, nn.Embedding)]
    if not embeddings:
        return named
    largest = max(embeddings, key=lambda shape: shape.numel())
    as_large = {name for name, linear in linears.items() if linear.weight.shape == largest}
    return named | as_large if len(as_large) == 1 else named


def _pattern(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name) or "(root)"


def _grouped(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(_pattern(name) for name in names))
