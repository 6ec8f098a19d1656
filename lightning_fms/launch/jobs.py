"""The jobs of a sweep and what has become of them, in `sweep.json` of the sweep's folder.

A sweep takes days and is killed like everything else. So what it knows is on disk at every moment: the command line that it
was started with, every job by its overrides, and how each ended. A sweep that is started again asks here before it
starts a job: one that is done is done, one that was running goes on in its folder. Jobs are known by their overrides and not by
their place, since a search need not propose the same in the same order.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning_fms.launch.result import Result, read_result

RECORD = "sweep.json"
Status = Literal["waiting", "running", "done", "failed"]


class JobFailed(Exception):
    """A job that ended without a result; the message says why."""


@dataclass
class Job:
    """One job.

    Attributes:
        number: the name of its folder.
        overrides: what it was asked for with.
        status: `running` is also one that was when the sweep was killed.
        seconds: how long it took, over all attempts.
        reason: why it failed.
        log: what its first rank wrote.
        result: what it came to.
    """

    number: int
    overrides: tuple[str, ...]
    status: Status = "waiting"
    seconds: float = 0.0
    reason: str = ""
    log: str = ""
    result: Result | None = None

    @property
    def value(self) -> float | None:
        """Of the objective."""
        return self.result.value if self.result is not None else None


@dataclass
class Record:
    """All jobs of a sweep.

    Attributes:
        folder: of the sweep; job 3 trains in its `003`.
        words: the command line that it was started with.
        jobs: in the order in which they were asked for.
        maximize: whether more of the objective is better.
    """

    folder: Path
    words: list[str]
    jobs: list[Job] = field(default_factory=list)
    maximize: bool = False

    def job(self, overrides: Sequence[str]) -> Job:
        """The job with these overrides, typed in whatever order; a new one if there is none."""
        found = next((job for job in self.jobs if sorted(job.overrides) == sorted(overrides)), None)
        if found is None:
            found = Job(max((job.number for job in self.jobs), default=-1) + 1, tuple(overrides))
            self.jobs.append(found)
        return found

    def run(self, job: Job) -> Path:
        """Where a job trains."""
        return self.folder / f"{job.number:03}"

    def best(self) -> Job | None:
        """The job with the best objective."""
        ended = [job for job in self.jobs if job.value is not None and job.value == job.value]
        sign = -1.0 if self.maximize else 1.0
        return min(ended, key=lambda job: sign * (job.value or 0.0), default=None)

    def write(self) -> None:
        """Put all of it on disk, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        known: dict[str, Any] = {"words": self.words, "maximize": self.maximize, "jobs": list(map(asdict, self.jobs))}
        aside = self.folder / f".{RECORD}"
        aside.write_text(json.dumps(known, indent=1))
        os.replace(aside, self.folder / RECORD)


def read_record(folder: Path) -> Record | None:
    """What is known of the sweep in a folder; `None` if there was none.

    A job that was running and left a result with an objective has ended while nobody looked. One without has failed over its
    objective, or had none: it goes on from its last checkpoint, and says so again.

    Raises:
        ValueError: if the record cannot be read.
    """
    try:
        known = json.loads((folder / RECORD).read_text())
        jobs = [Job(**{**job, "overrides": tuple(job["overrides"]), "result": _result(job)}) for job in known["jobs"]]
        record = Record(folder, known["words"], jobs, known["maximize"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / RECORD}: is no record of a sweep ({type(error).__name__})") from None
    for job in record.jobs:
        result = read_result(record.run(job)) if job.status == "running" else None
        if result is not None and result.objective is not None:
            job.status, job.result = "done", result
    return record


def _result(job: dict[str, Any]) -> Result | None:
    return None if job["result"] is None else Result(**job["result"])


def newest_sweep(root: Path) -> Path | None:
    """The folder of the sweep that was started last, of all that are where `fms-train -m` puts them by default."""
    found = [path.parent for path in root.glob(f"*/sweeps/*/{RECORD}")]
    return max(found, key=lambda folder: folder.name, default=None)
