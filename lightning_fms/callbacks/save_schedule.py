"""When to save: every so many steps, or as often as failures make it worth.

Between two saves, half of the interval is lost by a failure on average; a save costs its own time. The sum is smallest for an
interval of `sqrt(2 * save time * mean time to failure)` (Young, 1974). Save time and step time are measured while the run
trains. A failed save is tried again soon, and less and less often while it keeps failing.
"""

from math import sqrt

# The first save, which measures what a save costs; also a proof that saving works at all.
FIRST_STEPS = 10


class SaveSchedule:
    """Which steps are saved. All ranks have to be given the same numbers.

    Args:
        every_n_steps: Optimizer steps between two saves; with `mean_hours_to_failure`, at most so many.
        mean_hours_to_failure: Of the whole job, not of one device; `None` saves every `every_n_steps`.

    Raises:
        ValueError: For numbers that are not above 0.
    """

    def __init__(self, every_n_steps: int, mean_hours_to_failure: float | None = None) -> None:
        if every_n_steps < 1:
            raise ValueError(f"{every_n_steps=}: must be at least 1; to save nothing leave the callback out")
        if mean_hours_to_failure is not None and mean_hours_to_failure <= 0:
            raise ValueError(f"{mean_hours_to_failure=}: must be above 0, or null for a fixed interval")
        self.every_n_steps, self.mean_hours_to_failure = every_n_steps, mean_hours_to_failure
        self.interval = every_n_steps
        self._next: int | None = None
        self._failures = 0

    def start(self, step: int) -> None:
        """Begin at a step, which is not 0 after a resume."""
        self._failures = 0
        measured = self.mean_hours_to_failure is not None
        self._next = step + min(FIRST_STEPS, self.every_n_steps) if measured else None

    def due(self, step: int) -> bool:
        """Whether the step that just ended is to be saved."""
        if self._next is None:
            return step % self.every_n_steps == 0
        return step >= self._next

    def began(self, step: int, save_seconds: float, step_seconds: float) -> None:
        """A save of `step` began well, and held training up for so long; it may still fail."""
        self._next = None
        if self.mean_hours_to_failure is not None:
            best = sqrt(2 * save_seconds * 3600 * self.mean_hours_to_failure)
            self.interval = max(1, min(self.every_n_steps, round(best / max(step_seconds, 1e-9))))
            self._next = step + self.interval

    def committed(self) -> None:
        """A save is complete: the next failure is a first one."""
        self._failures = 0

    def failed(self, step: int) -> int:
        """A save of `step` failed: try again after 1, 2, 4, ... steps, at most an interval; returns how many."""
        wait = min(2**self._failures, self.interval)
        self._failures = min(self._failures + 1, 30)
        self._next = step + wait
        return wait
