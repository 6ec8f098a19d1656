"""F2: whatever happens to the files of the newest checkpoint, a run goes on from the newest one that is whole, or not at all."""

import os
import random
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import pytest

from lightning_fms.callbacks import StepCheckpoint
from lightning_fms.distributed import CheckpointError, latest_committed
from tests.chaos.workload import Account, Plan, account, check, start, uninterrupted

WORLD, STEPS = 2, 6


@pytest.fixture(scope="module")
def reference(corpus, tmp_path_factory) -> Account:
    return uninterrupted(Plan(corpus, tmp_path_factory.mktemp("calm"), steps=STEPS), WORLD)


@pytest.fixture(scope="module")
def saved(corpus, tmp_path_factory) -> Plan:
    """A run with checkpoints of steps 2 and 4."""
    plan = Plan(corpus, tmp_path_factory.mktemp("saved"), steps=4, every=2)
    assert start(plan, "first", WORLD).codes() == [0] * WORLD
    return replace(plan, steps=STEPS)


def flip(file: Path, seed: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[seed.randrange(len(content))] ^= 1 << seed.randrange(8)
    file.write_bytes(content)


def zero_page(file: Path, seed: random.Random) -> None:
    content = bytearray(file.read_bytes())
    at = seed.randrange(len(content))
    content[at : at + 64] = bytes(b ^ 0xFF for b in content[at : at + 64])
    file.write_bytes(content)


def swap(file: Path, _: random.Random) -> None:
    """The same file of the other checkpoint, which is whole in itself."""
    other = file.parent.parent / "step-2.ckpt" / file.name
    shutil.copy(other, file)


DAMAGE: dict[str, Callable[[Path, random.Random], object]] = {
    "flip": flip,
    "page": zero_page,
    "truncate": lambda file, seed: os.truncate(file, seed.randrange(file.stat().st_size)),
    "delete": lambda file, _: file.unlink(),
    "swap": swap,
    "grow": lambda file, _: file.write_bytes(file.read_bytes() + b"\0"),
}


def files(plan: Plan) -> list[str]:
    return sorted(path.name for path in (plan.checkpoints / "step-4.ckpt").iterdir())


@pytest.mark.parametrize("damage", DAMAGE)
def test_f2_any_damage_to_any_file_of_the_newest_leaves_the_one_before_it(saved, tmp_path, damage) -> None:
    names = files(saved)
    assert {"COMMIT", "manifest.json", ".metadata", "state.pt", "__0_0.distcp", "__1_0.distcp"} <= set(names)
    for number, name in enumerate(names):
        seed = random.Random(number)
        folder = tmp_path / name
        shutil.copytree(saved.checkpoints, folder)
        file = folder / "step-4.ckpt" / name
        before = file.read_bytes()
        DAMAGE[damage](file, seed)
        if file.exists() and file.read_bytes() == before:
            continue  # the same in both checkpoints
        found = latest_committed(folder)
        assert found is not None
        assert found.name == "step-2.ckpt", f"{damage} of {name} was not noticed"


@pytest.mark.parametrize("damage", ["flip", "delete"])
def test_f2_a_run_with_a_damaged_newest_checkpoint_goes_on_from_the_older_one(
    saved, reference, tmp_path, damage
) -> None:
    shutil.copytree(saved.checkpoints, tmp_path / "checkpoints")
    plan = replace(saved, store=tmp_path)
    DAMAGE[damage](plan.checkpoints / "step-4.ckpt" / "__1_0.distcp", random.Random(1))
    again = start(plan, "again", WORLD)
    assert again.codes() == [0] * WORLD, again.output()
    check(account(plan, "again"), reference, same_world=True, first=2, last=STEPS)
    assert latest_committed(plan.checkpoints).name == f"step-{STEPS}.ckpt"


def test_f2_with_every_checkpoint_damaged_nothing_starts_from_zero_in_silence(saved, tmp_path) -> None:
    shutil.copytree(saved.checkpoints, tmp_path / "checkpoints")
    for folder in (tmp_path / "checkpoints").iterdir():
        flip(folder / "state.pt", random.Random(2))
    with pytest.raises(CheckpointError, match="none of the 2"):
        latest_committed(tmp_path / "checkpoints")


class FullDisk(pl.Callback):
    """One rank cannot write files of more than a few kilobytes, from step 2 on until a save has failed."""

    def __init__(self) -> None:
        self.failed = False

    def _limit(self, size: int | None) -> None:
        if os.environ["RANK"] == "1":
            _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (most if size is None else size, most))

    def on_train_batch_start(self, trainer, *_) -> None:
        saver = next(c for c in trainer.callbacks if isinstance(c, StepCheckpoint))
        self.failed = self.failed or saver.schedule._failures > 0
        self._limit(8192 if trainer.global_step >= 1 and not self.failed else None)

    def on_train_end(self, *_) -> None:
        self._limit(None)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["waiting", "background"])
def test_f8_a_disk_that_is_full_for_a_while_on_one_rank_costs_saves_and_nothing_else(
    corpus, reference, tmp_path, asynchronous
) -> None:
    plan = Plan(corpus, tmp_path, steps=STEPS, every=2, keep=-1, asynchronous=asynchronous, slow_s=0.2)
    run = start(plan, "full", WORLD, (FullDisk(),))
    assert run.codes() == [0] * WORLD, run.output()
    found = account(plan, "full")
    check(found, reference, same_world=True, first=0, last=STEPS)
    assert 2 not in found.saved
    assert max(found.saved) == STEPS
    assert latest_committed(plan.checkpoints).name == f"step-{STEPS}.ckpt"
    assert not [path for path in plan.checkpoints.iterdir() if path.name.startswith(".")]
    assert not (plan.checkpoints / "step-2.ckpt").exists()
