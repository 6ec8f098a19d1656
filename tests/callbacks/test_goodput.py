"""F9: every attempt leaves a record, and goodput adds up over restarts, killed attempts included."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_fms.callbacks import GoodputLog
from lightning_fms.callbacks.lineage import Attempt, goodput, process_started, read_attempts
from tests.chaos.workload import Plan, start, write_corpus


def test_goodput_is_the_time_of_steps_that_count_over_all_time() -> None:
    first = Attempt(1000.0, 2, "a", updated=1100.0, first_step=0, last_step=30, step_seconds=60.0)
    first.seconds |= {"startup": 20.0, "save": 15.0, "data_wait": 5.0}
    second = Attempt(1120.0, 1, "b", updated=1200.0, first_step=20, last_step=50, step_seconds=60.0)
    second.seconds |= {"startup": 10.0, "restore": 10.0}
    found = goodput([first, second])
    assert (found.wall, found.useful) == (200.0, 100.0)
    assert found.share == 0.5
    assert found.losses == {
        "startup": 30.0, "restore": 10.0, "save": 15.0, "validation": 0.0, "data_wait": 5.0, "end": 0.0,
        "lost_steps": 20.0, "down_time": 20.0, "other": 0.0,
    }  # fmt: skip
    assert sum(found.losses.values()) + found.useful == found.wall
    assert str(found).startswith("goodput 50.0% of 200 s in 2 attempts (lost to startup 15.0%, restore 5.0%")
    assert goodput([]).share == 0.0


def test_an_attempt_that_never_came_to_a_step_loses_none() -> None:
    first = Attempt(0.0, 2, "a", updated=10.0, first_step=0, last_step=4, step_seconds=8.0)
    dead = Attempt(20.0, 2, "a", updated=25.0)
    assert goodput([first, dead]).losses["lost_steps"] == 0.0
    again = Attempt(30.0, 2, "a", updated=40.0, first_step=1, last_step=5, step_seconds=8.0)
    losses = goodput([first, dead, again]).losses
    assert losses["lost_steps"] == 6.0, "those that the next one with steps made again"
    assert losses["down_time"] == 15.0


class Die(pl.Callback):
    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def test_f9_a_killed_attempt_and_the_next_one_leave_a_lineage(corpus, tmp_path) -> None:
    plan = Plan(corpus, tmp_path, steps=8, every=2, val_every=3)
    log = GoodputLog(tmp_path / "attempts", every_n_steps=1)
    assert start(plan, "killed", 2, (log, Die())).codes() == [-9, -9]
    again = start(plan, "again", 1, (log,))
    assert again.codes() == [0], again.output()
    first, second = read_attempts(tmp_path / "attempts")
    assert (first.world, first.first_step, first.last_step, first.end) == (2, 0, 5, None)
    assert (second.world, second.first_step, second.last_step, second.end) == (1, 4, 8, "finished")
    assert second.last_committed_step == 8
    assert first.last_committed_step == 4
    assert min(second.seconds[cause] for cause in ("startup", "restore", "save", "validation")) > 0
    found = goodput([first, second])
    assert found.losses["lost_steps"] == pytest.approx(first.step_seconds / 5)
    assert 0 < found.share < 1
    assert re.search(r"goodput \d+\.\d% of \d+ s in 2 attempts", (again.folder / "rank-0.log").read_text())


def test_a_process_knows_when_it_started() -> None:
    assert process_started() <= Path("/proc/self/cmdline").stat().st_mtime + 1
