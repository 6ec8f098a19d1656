"""Runs the jobs of a sweep, each in a process group of its own, as many at once as there are devices for.

Jobs share nothing: one that runs out of memory, raises or hangs is a row that failed, and the next one starts on devices that
are empty again. One job at a time is shown as it trains; several only start and end in the terminal, and write into their logs.
Whatever happens to a job is on record before the next one starts.
"""

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_fms.launch.devices import Pool
from lightning_fms.launch.hparams import write_session
from lightning_fms.launch.jobs import Job, Record
from lightning_fms.launch.process_group import JOB, Outcome, ProcessGroup, Signals
from lightning_fms.launch.report import clock, closing, name_of, write_table
from lightning_fms.launch.result import read_result

_OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "can't allocate memory", "MemoryError")
_EVERY_S = 0.05


@dataclass(frozen=True)
class Task:
    """A job, how it is started, and what it needs.

    Attributes:
        command: without what says where it trains.
        devices: how many, or which; for a CPU that of its processes.
    """

    job: Job
    command: tuple[str, ...]
    devices: int | list[int]

    @property
    def ranks(self) -> int:
        """Processes of the job."""
        return len(self.devices) if isinstance(self.devices, list) else self.devices


@dataclass
class _Running:
    task: Task
    group: ProcessGroup
    devices: list[int]
    started: float
    before: float
    shown: "_Follower | None"
    timed_out: bool = False


class _Follower:
    """Shows what is written into a log."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open(errors="replace")
        self._stream.seek(0, os.SEEK_END)

    def show(self) -> None:
        if text := self._stream.read():
            sys.stdout.write(text)
            sys.stdout.flush()

    def close(self) -> None:
        self.show()
        self._stream.close()


class Sweep:
    """Runs tasks until all have ended.

    Args:
        record: of the sweep; kept up to date.
        pool: the devices.
        timeout_s: how long a job may take, `None` = as long as it wants.
        retry_failed: whether jobs that have failed before are tried again.
        grace_s: how long the processes of a job may take to end when they are asked to.
    """

    def __init__(
        self,
        record: Record,
        pool: Pool,
        timeout_s: float | None = None,
        retry_failed: bool = False,
        grace_s: float = 30.0,
    ) -> None:
        if timeout_s is not None and timeout_s <= 0:
            raise ValueError(
                f"hydra.launcher.timeout_s={timeout_s}: give a number of seconds above 0, or null for no limit"
            )
        self.record, self.pool, self.timeout_s, self.grace_s = record, pool, timeout_s, grace_s
        self._over = ("done",) if retry_failed else ("done", "failed")
        self._running: list[_Running] = []

    def run(self, tasks: Sequence[Task]) -> None:
        """Run them in this order.

        Raises:
            SystemExit: after a signal, when all processes have ended.
        """
        waiting = deque(task for task in tasks if task.job.status not in self._over)
        for task in tasks:
            if task not in waiting:
                self._say(task.job, f"{task.job.status} before")
        with Signals() as signals:
            try:
                while waiting or self._running:
                    signals.pass_on([one.group for one in self._running])
                    if signals.received:
                        waiting.clear()
                    while waiting and self._start(waiting[0]):
                        waiting.popleft()
                    for one in list(self._running):
                        self._look_after(one, stopping=bool(signals.received))
                    time.sleep(_EVERY_S)
            finally:
                for one in self._running:
                    one.group.kill()
                write_table(self.record)
        if signals.received:
            closing()
            print(f"stopped; go on with: fms-train -m resume={self.record.folder}", flush=True)
            raise SystemExit(128 + signals.received[0])

    def _start(self, task: Task) -> bool:
        """Start a job if there are devices for it; one that can never have them has failed."""
        job = task.job
        if not self.pool.fits(task.devices):
            self._ended(job, "failed", f"wants trainer.devices={task.devices}; there are {len(self.pool.names)}")
            return True
        devices = self.pool.take(task.devices)
        if devices is None:
            return False
        run, logs = self.record.run(job), self.record.folder / "logs" / f"{job.number:03}"
        again = job.status != "waiting" or run.exists()
        command, environment = list(task.command), {JOB: f"{job.number}"} | self.pool.visible(devices)
        if (run / "run.yaml").is_file():
            command = [word for word in command if not word.startswith("resume=")] + ["resume=auto"]
        if self.pool.most > 1 and "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // (self.pool.most * task.ranks)))
        job.status, job.reason, job.log = "running", "", f"{logs}.log"
        self.record.write()
        self._say(job, "goes on" if again else "starts")
        group = ProcessGroup(
            command, task.ranks, logs, terminal=False, environment=environment, restart=int(again), grace_s=self.grace_s
        )
        shown = _Follower(Path(job.log)) if self.pool.most == 1 else None
        self._running.append(_Running(task, group, devices, time.monotonic(), job.seconds, shown))
        return True

    def _look_after(self, one: _Running, stopping: bool) -> None:
        outcome, job = one.group.poll(), one.task.job
        passed = time.monotonic() - one.started
        job.seconds = one.before + passed
        if one.shown is not None:
            one.shown.show()
        if outcome is None:
            if self.timeout_s is not None and passed > self.timeout_s and not one.timed_out:
                one.timed_out = True
                one.group.send(signal.SIGTERM)
            return
        if one.shown is not None:
            one.shown.close()
        self._running.remove(one)
        self.pool.give_back(one.devices)
        job.result = read_result(self.record.run(job)) if outcome.code == 0 else None
        if job.result is not None:
            self._ended(job, "done", "")
        elif stopping:  # It goes on when the sweep does.
            self.record.write()
        elif one.timed_out:
            self._ended(job, "failed", f"took longer than {self.timeout_s:g} s")
        else:
            self._ended(job, "failed", reason(outcome))

    def _ended(self, job: Job, status: str, why: str) -> None:
        job.status, job.reason = "done" if status == "done" else "failed", why
        self.record.write()
        write_session(self.record.folder / "hparams" / f"{job.number:03}", job)
        came_to = (
            f", {job.result.objective} {job.value:.4f}" if job.result is not None and job.value is not None else ""
        )
        self._say(job, f"{status} after {clock(job.seconds)}{came_to}{f': {why}' if why else ''}")

    def _say(self, job: Job, what: str) -> None:
        number = f"{job.number:03}" if len(self.record.jobs) == 1 else f"{job.number:03} of {len(self.record.jobs)}"
        print(f"job {number}, {name_of(job, self.record.jobs)}: {what}", flush=True)


def reason(outcome: Outcome) -> str:
    """Why a job failed, in one line."""
    told = [line for line in outcome.lines if any(sign in line for sign in _OUT_OF_MEMORY)]
    if told:
        return f"out of memory on rank {outcome.rank}: {told[-1].strip()}"
    if outcome.code == 0:
        return "ended without a result"
    if outcome.signal == signal.SIGKILL:
        return f"{outcome}, by hand or by the kernel for want of memory"
    said = [line.partition(": error: ")[2] for line in outcome.lines if line.startswith("fms-train: error: ")]
    if said:
        return said[-1]
    return f"{outcome}: {outcome.lines[-1].strip()}" if outcome.lines else str(outcome)
