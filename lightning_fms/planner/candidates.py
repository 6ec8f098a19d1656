"""Configurations with what is known of them: memory, time, cost; and how to choose among them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_fms.planner.hardware import Hardware
from lightning_fms.planner.memory import Prediction, Verdict
from lightning_fms.planner.space import Configuration
from lightning_fms.planner.throughput import DAY, StepTime

TOKENS_PER_PARAMETER = 20.0  # Chinchilla (arXiv:2203.15556), approach 1 and 2
HOURS_PER_YEAR = 24 * 365.0


@dataclass(frozen=True)
class Run:
    """How long a run is.

    Attributes:
        steps: optimizer steps.
        tokens_per_step: of all devices.
        parameters: of the model.
    """

    steps: int
    tokens_per_step: int
    parameters: float

    @property
    def tokens(self) -> int:
        """Tokens trained on."""
        return self.steps * self.tokens_per_step

    def chinchilla(self) -> str:
        """The run's tokens against 20 a parameter."""
        ratio = self.tokens / self.parameters
        best = TOKENS_PER_PARAMETER * self.parameters
        if 0.5 <= ratio / TOKENS_PER_PARAMETER <= 2:
            advice = "about compute-optimal"
        elif ratio < TOKENS_PER_PARAMETER:
            advice = f"short: {best / 1e9:,.3g} B tokens would be compute-optimal, or a smaller model"
        else:
            advice = f"{ratio / TOKENS_PER_PARAMETER:,.1f} times as long: cheaper to serve, not the lowest loss for this compute"
        return f"{ratio:,.1f} tokens a parameter (Chinchilla: 20): {advice}"


@dataclass(frozen=True)
class Candidate:
    """A configuration and what it would be like.

    Attributes:
        configuration: what to run.
        memory: predicted, per device.
        verdict: whether it fits.
        time: of a step, bound and estimate.
        measured: seconds of a step on this machine, if it was run.
    """

    configuration: Configuration
    memory: Prediction
    verdict: Verdict
    time: StepTime
    measured: float | None = None

    @property
    def seconds(self) -> float:
        """Of a step: measured where it was, else estimated."""
        return self.time.estimate if self.measured is None else self.measured

    @property
    def interval(self) -> tuple[float, float]:
        """Of the step; a measurement has 5 % either way for a long run's other steps."""
        return self.time.interval if self.measured is None else (0.95 * self.measured, 1.05 * self.measured)

    def days(self, run: Run) -> float:
        """Of the whole run, without interruptions."""
        return self.seconds * run.steps / DAY

    def gpu_hours(self, run: Run) -> float:
        """Of all devices."""
        return self.days(run) * 24 * self.configuration.devices

    def rent(self, run: Run, hardware: Hardware) -> float | None:
        """US dollars for renting."""
        return None if hardware.rent is None else self.gpu_hours(run) * hardware.rent

    def amortised(self, run: Run, hardware: Hardware, years: float) -> float | None:
        """US dollars of the price of a bought machine that this run uses up, if it is never idle."""
        return None if hardware.price is None else self.gpu_hours(run) * hardware.price / (years * HOURS_PER_YEAR)


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those that may fit, fastest first; of equals those that fit for sure, then fewer micro-batches, then the smaller."""
    possible = [c for c in candidates if c.verdict is not Verdict.NO]
    return sorted(possible, key=_rank)


def _rank(candidate: Candidate) -> tuple[float, bool, int, float]:
    """An estimate does not count the time that a host needs for each micro-batch."""
    fits = candidate.verdict is Verdict.FIT
    return candidate.seconds, not fits, candidate.configuration.micro_batches, candidate.memory.active


def chosen(candidates: Iterable[Candidate]) -> Candidate | None:
    """The fastest that fits, else the fastest that may; of those that were measured, where some were."""
    order = ranked(candidates)
    order = [c for c in order if c.measured is not None] or order
    return next((c for c in order if c.verdict is Verdict.FIT), order[0] if order else None)


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of points that no other one beats or equals in both numbers (smaller is better), by the first number."""
    front, best = [], float("inf")
    for i in sorted(range(len(points)), key=lambda i: points[i]):
        if points[i][1] < best:
            front.append(i)
            best = points[i][1]
    return front
