"""What the attempts of a run leave behind, and what it says together: where the time went, across all restarts.

Each attempt has a file of its own, rewritten now and then as a whole, so that one that is killed has left the state of a
moment ago. Goodput is the time of steps that count, over all time since the first attempt started. A step that was made after
the last checkpoint of an attempt, and made again by the next one, does not count; nor does the time in which nothing ran.
"""

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

CAUSES = ("startup", "restore", "save", "validation", "data_wait", "end")
_STARTED = time.time()


@dataclass
class Attempt:
    """One start of a run.

    started, updated: seconds since the epoch. world: number of ranks. first_step: optimizer steps done when it began, -1 before.
    last_step: done so far. last_committed_step: complete in storage, -1 for none. end: why it ended, `None` while it runs or if it
    was killed. step_seconds: spent in training steps. seconds: spent otherwise, by cause.
    """

    started: float
    world: int
    host: str
    updated: float = 0.0
    first_step: int = -1
    last_step: int = -1
    last_committed_step: int = -1
    end: str | None = None
    step_seconds: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))

    def write(self, file: Path) -> None:
        """Replace the file by what is known now."""
        self.updated = time.time()
        file.parent.mkdir(parents=True, exist_ok=True)
        aside = file.with_name(f".{file.name}")
        aside.write_text(json.dumps(asdict(self), indent=1))
        aside.replace(file)


def read_attempts(folder: Path) -> list[Attempt]:
    """All attempts of a run, oldest first; a file that cannot be read is left out."""
    found = []
    for file in folder.glob("*.json") if folder.is_dir() else ():
        try:
            found.append(Attempt(**json.loads(file.read_text())))
        except (OSError, ValueError, TypeError):
            continue
    return sorted(found, key=lambda attempt: attempt.started)


@dataclass(frozen=True)
class Goodput:
    """wall: seconds from the first start to the last sign. useful: of steps that count. losses: all other seconds, by cause."""

    attempts: int
    wall: float
    useful: float
    losses: dict[str, float]

    @property
    def share(self) -> float:
        """Useful part of all time, from 0 to 1."""
        return self.useful / self.wall if self.wall > 0 else 0.0

    def __str__(self) -> str:
        lost = [(cause, seconds) for cause, seconds in self.losses.items() if seconds >= 0.001 * self.wall > 0]
        parts = ", ".join(f"{cause.replace('_', ' ')} {seconds / self.wall:.1%}" for cause, seconds in lost)
        starts = f"{self.attempts} attempt" + ("s" if self.attempts > 1 else "")
        return f"goodput {self.share:.1%} of {self.wall:,.0f} s in {starts}" + (f" (lost to {parts})" if parts else "")


def goodput(attempts: Iterable[Attempt]) -> Goodput:
    """Add up the attempts of a run, oldest first."""
    attempts = list(attempts)
    if not attempts:
        return Goodput(0, 0.0, 0.0, {})
    wall = max(attempt.updated for attempt in attempts) - attempts[0].started
    steps = sum(attempt.step_seconds for attempt in attempts)
    losses = {cause: sum(attempt.seconds.get(cause, 0.0) for attempt in attempts) for cause in CAUSES}
    stepped = [
        attempt for attempt in attempts if attempt.first_step >= 0
    ]  # the others came to no step, and made none again
    losses["lost_steps"] = sum(_made_again(a, b) for a, b in pairwise(stepped))
    losses["down_time"] = sum(max(0.0, b.started - a.updated) for a, b in pairwise(attempts))
    useful = steps - losses["lost_steps"]
    losses["other"] = max(0.0, wall - useful - sum(losses.values()))
    return Goodput(len(attempts), wall, useful, losses)


def _made_again(attempt: Attempt, following: Attempt) -> float:
    """Seconds of steps that the following attempt made again."""
    made = attempt.last_step - attempt.first_step
    if made <= 0:
        return 0.0
    again = min(made, max(0, attempt.last_step - following.first_step))
    return attempt.step_seconds * again / made


def process_started() -> float:
    """When this process started, in seconds since the epoch; where the system does not say, when this module was imported."""
    try:
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        boot = next(
            float(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime")
        )
        return boot + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, StopIteration, IndexError):
        return _STARTED
