"""Successive halving: give every candidate a short trial, and the better ones longer ones.

A first trial of a few steps tells bad from good but not good from best; the last one decides. Trials that run out of memory are
results. The score of a trial is the median of its steps after the first third, in which code is compiled, the allocator
grows and clocks settle (Jamieson and Talwalkar, arXiv:1502.07943, for the idea).
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
KEEP = 1 / 3  # of a round goes on to the next


@dataclass(frozen=True)
class Trial:
    """What a run of a few steps came to.

    Attributes:
        step_seconds: of each optimizer step, synchronised, the slowest rank's.
        out_of_memory: whether it ended so.
        error: why there are no times, if for another reason.
    """

    step_seconds: Sequence[float] = ()
    out_of_memory: bool = False
    error: str | None = None

    @property
    def seconds(self) -> float:
        """Median of a step, without the first third; infinite without steps."""
        settled = list(self.step_seconds)[math.ceil(len(self.step_seconds) / 3) :]
        return statistics.median(settled) if settled else math.inf


def halve(candidates: Sequence[T], run: Callable[[T, int], Trial], steps: Sequence[int]) -> "Measured[T]":
    """Measure in rounds, one after the other.

    Args:
        candidates: in the order of hope; a round is not shortened by it.
        run: a trial of so many steps.
        steps: of each round.
    """
    return halve_together(candidates, lambda left, count: [run(one, count) for one in left], steps)


def halve_together(
    candidates: Sequence[T], run: Callable[[Sequence[T], int], Sequence[Trial]], steps: Sequence[int]
) -> "Measured[T]":
    """The same where all trials of a round are started at once."""
    trials: dict[int, Trial] = {}
    left = list(range(len(candidates)))
    for round_, count in enumerate(steps):
        if left:
            trials |= dict(zip(left, run([candidates[i] for i in left], count), strict=True))
        left = sorted((i for i in left if math.isfinite(trials[i].seconds)), key=lambda i: trials[i].seconds)
        if round_ < len(steps) - 1:
            left = left[: max(math.ceil(len(left) * KEEP), 1)]
    return Measured([(candidates[i], trials[i]) for i in sorted(trials)], candidates[left[0]] if left else None)


@dataclass(frozen=True)
class Measured(Generic[T]):
    """Each candidate with its longest trial, and the fastest of the last round."""

    trials: Sequence[tuple[T, Trial]]
    fastest: T | None
