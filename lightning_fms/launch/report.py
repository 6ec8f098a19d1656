"""What a sweep says at its end: a table of its jobs, the best one, and a file with every figure."""

import csv
from collections.abc import Sequence
from pathlib import Path

from lightning_fms.launch.jobs import Job, Record
from lightning_fms.tables import table

TABLE = "results.csv"
# Of the sweeps of this process that have not said how they ended.
open_records: list[Record] = []
_WIDEST = 24


def settings(job: Job) -> dict[str, str]:
    """The overrides of a job by key."""
    split = (override.lstrip("+~").partition("=") for override in job.overrides)
    return {key: value for key, _, value in split if not key.startswith(("hydra.", "hydra/"))}


def varied(jobs: Sequence[Job]) -> list[str]:
    """The keys in which jobs differ; all of them if there is but one job."""
    of = [settings(job) for job in jobs]
    keys = dict.fromkeys(key for one in of for key in one)
    return [key for key in keys if len(of) == 1 or len({one.get(key) for one in of}) > 1]


def name_of(job: Job, jobs: Sequence[Job]) -> str:
    """A job in a few words: in what it differs from the others."""
    of = settings(job)
    return ", ".join(f"{key}={of[key]}" for key in varied(jobs) if key in of) or "as given"


def clock(seconds: float) -> str:
    """4000 -> '1:06:40'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def figures(record: Record) -> list[str]:
    """The metrics that the table shows: the objective, other losses, the rate."""
    results = [job.result for job in record.jobs if job.result is not None]
    logged = dict.fromkeys(name for result in results for name in result.metrics)
    chosen = dict.fromkeys(result.objective for result in results if result.objective)
    losses = [name for name in logged if name.endswith("loss")]
    return list(dict.fromkeys([*chosen, *losses, *(name for name in ("tokens_per_second",) if name in logged)]))


def lines(record: Record) -> list[str]:
    """The table, why jobs failed, the best job, and what to do next."""
    keys, metrics = varied(record.jobs), figures(record)
    heads = ["job", *keys, "status", "time", *(name.replace("tokens_per_second", "tokens/s") for name in metrics)]
    rows = []
    for job in record.jobs:
        of, found = settings(job), job.result.metrics if job.result is not None else {}
        shown = [_shown(name, found[name]) if name in found else "" for name in metrics]
        cells = [_short(of.get(key, "")) for key in keys]
        status = "stopped" if job.status == "running" else job.status
        rows.append([f"{job.number:03}", *cells, status, clock(job.seconds) if job.seconds else "", *shown])
    failed = [f"failed: {job.number:03} {job.reason}; log: {job.log}" for job in record.jobs if job.status == "failed"]
    return [
        "",
        *table(heads, rows, right={"time", *heads[-len(metrics) :]} if metrics else {"time"}),
        *failed,
        *_best(record),
    ]


def closing() -> int:
    """Say how the sweeps of this process ended; how many of their jobs failed."""
    failed = 0
    while open_records:
        record = open_records.pop()
        failed += sum(job.status == "failed" for job in record.jobs)
        print("\n".join(lines(record)), flush=True)
    return failed


def _best(record: Record) -> list[str]:
    best = record.best()
    told = [f"all figures: {record.folder / TABLE}    tensorboard --logdir {record.folder}"]
    if best is None or best.result is None:
        return told
    name, run = name_of(best, record.jobs), record.run(best)
    return [f"best: job {best.number:03}, {name}: {best.result.objective} {best.value:.4f}, in {run}", *told]


def _shown(name: str, value: float) -> str:
    return f"{value:,.0f}" if name == "tokens_per_second" else f"{value:.4f}"


def _short(text: str) -> str:
    return text if len(text) <= _WIDEST else f"...{text[3 - _WIDEST :]}"


def write_table(record: Record) -> Path:
    """Every job with every metric, for a spreadsheet; only keys that differ are columns."""
    keys = varied(record.jobs)
    results = [job.result for job in record.jobs if job.result is not None]
    metrics = sorted({name for result in results for name in result.metrics})
    path = record.folder / TABLE
    with path.open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(["job", *keys, "status", "seconds", "steps", "objective", *metrics, "reason"])
        for job in record.jobs:
            of, found = settings(job), job.result.metrics if job.result is not None else {}
            steps = job.result.steps if job.result is not None else ""
            told = [job.status, f"{job.seconds:.1f}", steps, "" if job.value is None else job.value]
            rows.writerow(
                [
                    job.number,
                    *(of.get(key, "") for key in keys),
                    *told,
                    *(found.get(m, "") for m in metrics),
                    job.reason,
                ]
            )
    return path
