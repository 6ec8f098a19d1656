"""F5: saved at any batch, epoch end or validation end, with and without accumulation, a resumed run is the uninterrupted one."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_fms.distributed import FSDPCompileStrategy
from tests.chaos.attempts import Attempt
from tests.chaos.workload import BATCH, Plan, Small, account, train_with

EPOCHS, STEPS_AN_EPOCH = 3, 4


class SaveEverywhere(pl.Callback):
    """Saves at every hook at which Lightning lets a callback save."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0

    def _save(self, trainer: Any, where: str) -> None:
        self.number += 1
        trainer.save_checkpoint(self.folder / f"{self.number:02}-{where}-{trainer.global_step}")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._save(trainer, "batch")

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self._save(trainer, "epoch")

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self._save(trainer, "validation")


def all_of_them(plan: Plan, full: bool) -> None:
    """The uninterrupted run, and a resume from each of its checkpoints, in one process."""
    folder = plan.store / "everywhere"
    train_with(plan, "calm", None, FSDPCompileStrategy(), Small, (SaveEverywhere(folder),))
    found = sorted(folder.iterdir())
    for path in found if full else random.Random(2).sample(found, 5):
        train_with(plan, path.name, path, FSDPCompileStrategy(), Small, ())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_f5_resumed_from_a_save_at_any_moment_is_the_uninterrupted_run_to_the_bit(
    corpus, tmp_path, full, accumulate
) -> None:
    plan = Plan(
        corpus, tmp_path, steps=EPOCHS * STEPS_AN_EPOCH, epoch=STEPS_AN_EPOCH, micro=BATCH // accumulate, val_every=2
    )
    one = Attempt(tmp_path / "logs", 1, all_of_them, plan, full)
    assert one.codes(250) == [0], one.output()
    calm = account(plan, "calm")
    assert sorted(calm.weights) == list(range(1, plan.steps + 1))
    points = sorted(path.name for path in (tmp_path / "everywhere").iterdir())
    assert len(points) == plan.steps * accumulate + EPOCHS + plan.steps // 2
    resumed = [name for name in points if list((tmp_path / "books").glob(f"{name}.*"))]
    assert len(resumed) == (len(points) if full else 5)
    bad = [line for name in resumed for line in compare(replace(plan), name, calm)]
    assert not bad, "\n".join(bad)


def compare(plan: Plan, name: str, calm: Any) -> list[str]:
    """What differs behind the point of a save."""
    at, found = int(name.rsplit("-", 1)[1]), account(plan, name)
    left = {step: value for step, value in calm.weights.items() if step > at}
    later = {step: value for step, value in calm.val_losses.items() if step > at}
    problems = []
    if found.weights != left:
        problems.append(
            f"{name}: steps {sorted(found.weights)}, weights {'equal' if found.weights == left else 'differ'}"
        )
    if dict(found.rows) != {step: calm.rows[step] for step in left}:
        problems.append(f"{name}: other rows")
    if {step: loss for step, loss in found.val_losses.items() if step > at} != later:
        problems.append(f"{name}: validations {found.val_losses} instead of {later}")
    return problems
