"""F6: a bad step gets the same decision on all ranks, is on record, bounded, and resumes with its counts."""

import json
import math
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from callback_runs import RandomTokens, tiny_module, trainer
from lightning.pytorch.plugins import MixedPrecision

from lightning_fms.callbacks import BadSteps
from lightning_fms.callbacks.bad_steps import Window
from tests.chaos.workload import BATCH, Account, Plan, account, start, uninterrupted, weight_hash, write_corpus

WORLD, BAD = 2, 3


class Poison(pl.Callback):
    """Multiplies what flows back at some steps, on the last rank only."""

    def __init__(self, steps: tuple[int, ...], factor: float) -> None:
        self.steps, self.factor = steps, factor

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        if trainer.global_step in self.steps and last:
            loss.register_hook(lambda gradient: gradient * self.factor)


class Notes(pl.Callback):
    """Each rank's own view: what it decided, and the optimizer's step counts and learning rate after each step."""

    def __init__(self, folder: Path, watched: BadSteps) -> None:
        self.folder, self.watched = folder, watched

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        optimizer = trainer.optimizers[0]
        counts = sorted({int(state["step"]) for state in optimizer.state.values()})
        note = {"total": self.watched.total, "counts": counts, "lr": optimizer.param_groups[0]["lr"]}
        note["weights"] = weight_hash(pl_module)
        with (self.folder / f"notes.{os.environ['RANK']}").open("a") as file:
            file.write(json.dumps(note) + "\n")


def notes(folder: Path) -> list[list[dict]]:
    return [[json.loads(line) for line in (folder / f"notes.{r}").read_text().splitlines()] for r in range(WORLD)]


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "bad_steps.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def reference(corpus, tmp_path_factory) -> Account:
    return uninterrupted(Plan(corpus, tmp_path_factory.mktemp("calm"), steps=6), WORLD)


def run(plan: Plan, bad: BadSteps, poison: Poison, name: str = "x") -> list[int]:
    attempt = start(plan, name, WORLD, (poison, bad, Notes(plan.store, bad)))
    codes = attempt.codes()
    (plan.store / "output").write_text(attempt.output())
    return codes


@pytest.mark.parametrize("factor", [math.nan, 1e6])
def test_f6_a_bad_step_of_one_rank_is_skipped_on_all_and_everything_else_goes_on(
    corpus, reference, tmp_path, factor
) -> None:
    plan = Plan(corpus, tmp_path, steps=6, every=100)
    bad = BadSteps(tmp_path / "bad_steps.jsonl", spike=1e3, window=3)
    assert run(plan, bad, Poison((BAD,), factor)) == [0] * WORLD, (tmp_path / "output").read_text()
    found = account(plan, "x")
    assert found.weights[BAD + 1] == found.weights[BAD] == reference.weights[BAD]
    assert found.weights[BAD + 2] != found.weights[BAD + 1]
    assert found.rows == reference.rows
    for view in notes(tmp_path):
        assert [note["total"] for note in view] == [0, 0, 0, 1, 1, 1]
        assert [note["counts"] for note in view] == [[1], [2], [3], [3], [4], [5]]
    (record,) = records(tmp_path)
    assert (record["step"], record["first_row"], record["rows"], record["action"]) == (BAD, BAD * BATCH, BATCH, "skip")
    assert ("nan" in record["reason"]) == math.isnan(factor)


def test_f6_rolled_back_to_the_newest_checkpoint_and_the_rows_since_count_as_read(corpus, reference, tmp_path) -> None:
    plan = Plan(corpus, tmp_path, steps=6, every=2)
    bad = BadSteps(tmp_path / "bad_steps.jsonl", on_bad="rollback")
    assert run(plan, bad, Poison((BAD,), math.nan)) == [0] * WORLD, (tmp_path / "output").read_text()
    found = account(plan, "x")
    assert found.weights[BAD + 1] != reference.weights[2]  # the books are kept before the rollback
    assert found.rows == reference.rows
    first, second = notes(tmp_path)
    assert first == second
    assert [note["counts"] for note in first] == [[1], [2], [3], [2], [3], [4]]  # that of step 2, and on from there
    assert [note["lr"] for note in first] == pytest.approx([0.01, 0.01, 0.007, 0.007, 0.007, 0.0049])
    assert first[BAD]["weights"] == reference.weights[2]
    (record,) = records(tmp_path)
    assert (record["action"], record["restored"]) == ("rollback", 2)


def test_f6_too_many_in_a_row_end_the_run_on_all_ranks(corpus, tmp_path) -> None:
    plan = Plan(corpus, tmp_path, steps=6, every=100)
    bad = BadSteps(tmp_path / "bad_steps.jsonl", max_in_a_row=2)
    assert run(plan, bad, Poison((1, 3, 4, 5), math.inf)) == [1] * WORLD
    assert "2 bad steps in a row, the last one is step 4" in (tmp_path / "output").read_text()
    assert [record["step"] for record in records(tmp_path)] == [1, 3, 4]


def test_f6_counts_and_windows_come_back(corpus, tmp_path) -> None:
    plan = Plan(corpus, tmp_path, steps=3, every=3)
    assert run(plan, BadSteps(max_total=2), Poison((1,), math.nan), "a") == [0] * WORLD
    later = Plan(corpus, tmp_path, steps=6, every=3)
    assert run(later, BadSteps(max_total=2), Poison((4,), math.nan), "b") == [1] * WORLD
    assert "2 bad steps in this run" in (tmp_path / "output").read_text()


def test_a_spike_is_measured_against_a_full_window_that_spikes_do_not_move() -> None:
    window = Window(5)
    for value in (1.0, 1.1, 0.9, 1.0):
        window.values.append(value)
        assert window.z(100.0) == 0
    window.values.append(50.0)
    assert window.z(1.3) < 4
    assert window.z(2.0) > 6
    flat = Window(3)
    flat.values.extend([2.0, 2.0, 2.0])
    assert flat.z(2.001) < 1
    assert flat.z(2.2) > 50


@pytest.mark.parametrize("arguments", [{"window": 0}, {"max_total": 0}, {"spike": -1.0}, {"on_bad": "pray"}])
def test_settings_that_make_no_sense_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        BadSteps(**arguments)


def test_a_gradient_scaler_whose_overflows_would_count_is_refused_before_the_first_step(tmp_path) -> None:
    fp16 = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    run = trainer(tmp_path, BadSteps(), plugins=[fp16])
    with pytest.raises(ValueError, match=r"gradient scaler of '16-mixed'.*'bf16-mixed', or leave BadSteps out"):
        run.fit(tiny_module(), datamodule=RandomTokens())
    assert run.global_step == 0
