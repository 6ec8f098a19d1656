"""Which checkpoints stay: the newest few, one every so many hours, and the best by a metric.

A pure function of what is there and complete, so that it does not matter which attempt of a run saved what, and an unfinished
checkpoint never counts as one of those that stay.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint: its path, optimizer steps done, seconds since the epoch, and the metric if it is known."""

    path: Path
    step: int
    time: float
    score: float | None = None


@dataclass(frozen=True)
class Retention:
    """Rules of which any one keeps a checkpoint.

    Args:
        keep: How many of the newest stay; -1 keeps all.
        keep_every_hours: Of older ones, one stays for every so many hours; `None` keeps none for its age.
        keep_best: How many with the best metric stay.
        mode: Whether the best metric is the smallest, `"min"`, or the largest, `"max"`.

    Raises:
        ValueError: For numbers that would keep nothing, and another mode.
    """

    keep: int = 2
    keep_every_hours: float | None = None
    keep_best: int = 0
    mode: str = "min"

    def __post_init__(self) -> None:
        if self.keep < -1 or self.keep == 0:
            raise ValueError(f"keep={self.keep}: must be at least 1, or -1 to keep all")
        if self.keep_every_hours is not None and self.keep_every_hours <= 0:
            raise ValueError(f"keep_every_hours={self.keep_every_hours}: must be above 0, or null")
        if self.keep_best < 0:
            raise ValueError(f"keep_best={self.keep_best}: must be at least 0")
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode={self.mode!r}: give 'min' or 'max'")

    def superfluous(self, saved: Iterable[Saved]) -> list[Saved]:
        """Those that no rule keeps, oldest first."""
        by_step = sorted(saved, key=lambda one: one.step)
        if self.keep == -1:
            return []
        kept = {one.path for one in by_step[-self.keep :]} | self._hourly(by_step) | self._best(by_step)
        return [one for one in by_step if one.path not in kept]

    def _hourly(self, by_step: list[Saved]) -> set[Path]:
        kept: set[Path] = set()
        if self.keep_every_hours is None:
            return kept
        due = float("-inf")
        for one in by_step:
            if one.time >= due:
                kept.add(one.path)
                due = one.time + 3600 * self.keep_every_hours
        return kept

    def _best(self, by_step: list[Saved]) -> set[Path]:
        sign = 1 if self.mode == "min" else -1
        known = [(sign * one.score, one.step, one.path) for one in by_step if one.score is not None]
        known = [entry for entry in known if entry[0] == entry[0]]  # NaN is not the best of anything
        return {path for _, _, path in sorted(known)[: self.keep_best]}  # of equals the oldest
