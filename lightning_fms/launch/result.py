"""What a run came to, in its folder, for whoever started it: a sweep that compares jobs, a search that chooses the next one.

A training process prints its loss and is gone. `result.json` says the same to programs: the figures logged last, and the
one of them that a sweep is about, its objective.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

RESULT = "result.json"
# In this order: a loss on data that was not trained on says more than one of the last batch.
USUAL = ("val_loss", "loss")


@dataclass(frozen=True)
class Result:
    """The end of a run.

    Attributes:
        steps: optimizer steps, over all attempts.
        seconds: of the last attempt.
        metrics: what was logged last, by name.
        objective: the name of the metric that counts; `None` where nothing usual was logged.
    """

    steps: int
    seconds: float
    metrics: dict[str, float]
    objective: str | None

    @property
    def value(self) -> float | None:
        """Of the objective."""
        return None if self.objective is None else self.metrics[self.objective]


def objective_in(metrics: Mapping[str, float], wanted: str | None) -> str | None:
    """The metric that counts: the one that is wanted, else the loss of the validation, else that of training.

    Raises:
        ValueError: if the wanted one was not logged.
    """
    if wanted is not None and wanted not in metrics:
        raise ValueError(f"objective={wanted}: the run logged no such metric; it logged {', '.join(sorted(metrics))}")
    return wanted or next((name for name in USUAL if name in metrics), None)


def write_result(folder: Path, result: Result) -> None:
    """Put it into a run's folder, whole or not at all."""
    aside = folder / f".{RESULT}"
    aside.write_text(json.dumps(asdict(result), indent=1))
    os.replace(aside, folder / RESULT)


def read_result(folder: Path) -> Result | None:
    """What a run came to; `None` if it has not ended."""
    try:
        return Result(**json.loads((folder / RESULT).read_text()))
    except FileNotFoundError:
        return None
