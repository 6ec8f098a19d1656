"""F7: a rank that stops, stalls or raises ends the job, with the collective named; a slow one is named with its cause."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_fms.callbacks import HangWatchdog, Straggler
from tests.chaos.workload import Plan, account, start

WORLD = 2


class AtStep(pl.Callback):
    """Does something at a step on one rank, after it has said so."""

    def __init__(self, mark: Path, step: int, rank: int, what: str) -> None:
        self.mark, self.step, self.rank, self.what = mark, step, rank, what

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step and int(os.environ["RANK"]) == self.rank:
            self.mark.touch()
            if self.what == "raise":
                raise RuntimeError("told to fail")
            time.sleep(600)


def plan_in(corpus: Path, folder: Path) -> Plan:
    return Plan(corpus, folder, steps=6, every=100)


def test_f7_a_rank_that_stalls_ends_the_job_with_its_stack(corpus, tmp_path) -> None:
    watchdog = HangWatchdog(10.0, 60.0, tmp_path / "hang")
    hit = start(plan_in(corpus, tmp_path), "hit", WORLD, (AtStep(tmp_path / "mark", 2, 1, "stall"), watchdog))
    waiter, staller = hit.codes()
    assert staller == 124, hit.output()
    assert waiter in (1, 124), hit.output()  # 1 if it learns that the other one has gone before its own time is up
    stalled = (tmp_path / "hang" / "rank-1.txt").read_text()
    assert "has not moved for" in stalled
    assert "on_train_batch_start" in stalled  # of the sleeping thread
    assert "no collective" in stalled


def test_f7_a_stopped_process_is_found_by_the_others_with_the_collective_that_they_wait_in(corpus, tmp_path) -> None:
    watchdog = HangWatchdog(10.0, 60.0, tmp_path / "hang")
    hit = start(plan_in(corpus, tmp_path), "hit", WORLD, (AtStep(tmp_path / "mark", 2, 1, "stall"), watchdog))
    assert hit.wait_for((tmp_path / "mark").exists)
    hit.send(signal.SIGSTOP, [1])
    assert hit.wait_for(lambda: not hit.processes[0].is_alive())
    assert hit.processes[0].exitcode == 124
    waiting = (tmp_path / "hang" / "rank-0.txt").read_text()
    assert "waits in gloo:" in waiting
    assert "of group" in waiting
    hit.kill()


@pytest.mark.parametrize("rank", [0, 1])
def test_f7_a_rank_that_raises_ends_the_others_and_its_error_is_shown(corpus, tmp_path, rank) -> None:
    hit = start(plan_in(corpus, tmp_path), "hit", WORLD, (AtStep(tmp_path / "mark", 2, rank, "raise"),))
    codes = hit.codes()
    assert 0 not in codes
    assert "told to fail" in (hit.folder / f"rank-{rank}.log").read_text()
    assert max(account(plan_in(corpus, tmp_path), "hit").weights) == 2


class Tired(pl.Callback):
    """Sleeps in every step of one rank: before its work, or where its data would be loaded. Writes what the look saw."""

    def __init__(self, folder: Path, watched: Straggler, where: str) -> None:
        self.folder, self.watched, self.where = folder, watched, where

    def _sleep(self, where: str) -> None:
        if where == self.where and int(os.environ["RANK"]) == 1:
            time.sleep(0.5)

    def on_before_backward(self, *_: Any) -> None:
        self._sleep("work")

    def on_train_end(self, *_: Any) -> None:
        report = self.watched.report
        assert report is not None
        rank, late, why = report.slowest()
        said = {"rank": rank, "late": late, "why": why, "slow": self.watched.slow, "wait": report.data_wait}
        (self.folder / f"seen.{os.environ['RANK']}").write_text(json.dumps(said))

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        loader = trainer.datamodule.loader
        ask = loader.micro_batches

        def slowly() -> Any:
            for batch in ask():
                self._sleep("data")
                yield batch

        loader.micro_batches = slowly


@pytest.mark.parametrize(
    ("where", "why", "loads_ahead"),
    [
        ("work", "its own work takes longer", True),
        ("data", "its data comes late", True),
        ("data", "its data comes late", False),
    ],
)
def test_f7_a_slow_rank_is_named_with_its_host_and_cause(corpus, tmp_path, where, why, loads_ahead) -> None:
    straggler = Straggler(every_n_steps=4, patience=2)
    plan = Plan(corpus, tmp_path, steps=13, every=100, mask_first=loads_ahead)
    slow = start(plan, "slow", WORLD, (straggler, Tired(tmp_path, straggler, where)))
    assert slow.codes() == [0] * WORLD, slow.output()
    for rank in range(WORLD):
        seen = json.loads((tmp_path / f"seen.{rank}").read_text())
        assert (seen["rank"], seen["why"], seen["slow"]) == (1, why, [1]), seen
        assert seen["late"] > 0.1
