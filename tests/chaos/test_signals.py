"""F4: SIGTERM and SIGUSR1 to any ranks with any skew: all stop behind one step, commit, and exit with the signal's code."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import DDPStrategy

from lightning_fms.callbacks import Resilience, StepCheckpoint
from lightning_fms.distributed import latest_committed
from tests.chaos.attempts import Attempt
from tests.chaos.workload import Account, Plan, Small, account, check, start, train_with, uninterrupted

WORLD = 2
CODES = {signal.SIGTERM: 143, signal.SIGUSR1: 138}


class Slow(pl.Callback):
    """Makes each step, validation batch, restore or save long enough to be hit, and says that it has come to it."""

    def __init__(self, store: Path, phase: str) -> None:
        self.mark, self.phase = store / f"in-{phase}", phase

    def _pass(self, phase: str) -> None:
        if phase == self.phase:
            self.mark.touch()
            time.sleep(0.15)

    def on_train_batch_start(self, trainer, *_) -> None:
        if trainer.global_step >= 2:
            self._pass("train")

    def on_validation_batch_start(self, *_) -> None:
        self._pass("validation")

    def on_save_checkpoint(self, trainer, *_) -> None:
        if trainer.global_step:  # before the first step the state is only looked at
            self._pass("save")

    def on_load_checkpoint(self, *_) -> None:
        self._pass("restore")


@pytest.fixture(scope="module")
def reference(corpus, tmp_path_factory) -> Account:
    return uninterrupted(Plan(corpus, tmp_path_factory.mktemp("calm"), val_every=3), WORLD)


SMOKE = [
    ("SIGTERM", "all", 0.02, "train"),
    ("SIGUSR1", "one", 0.0, "train"),
    ("SIGTERM", "one", 0.0, "validation"),
    ("SIGUSR1", "all", 0.3, "save"),
    ("SIGTERM", "all", 0.0, "restore"),
]
ALL = [
    (name, who, skew, phase)
    for name in ("SIGTERM", "SIGUSR1")
    for who, skew in (("one", 0.0), ("all", 0.0), ("all", 0.02), ("all", 0.3))
    for phase in ("train", "save", "restore", "validation")
]


@pytest.mark.parametrize(("name", "who", "skew_s", "phase"), ALL)
def test_f4_all_ranks_stop_behind_one_step_commit_and_exit_with_the_signals_code(
    corpus, tmp_path, reference, full, name: str, who: str, skew_s: float, phase: str
) -> None:
    if not full and (name, who, skew_s, phase) not in SMOKE:
        pytest.skip("FMS_CHAOS=full")
    number = getattr(signal, name)
    plan = Plan(corpus, tmp_path, val_every=3, steps=8, every=4 if phase == "save" else 100)
    before = None
    if phase == "restore":
        assert start(Plan(corpus, tmp_path, val_every=3, steps=3, every=3), "before", WORLD).codes() == [0] * WORLD
        before = latest_committed(plan.checkpoints)
    slow = Slow(tmp_path, phase)
    hit = start(plan, "hit", WORLD, (slow,))
    assert hit.wait_for(slow.mark.exists), hit.output()
    hit.send(number, [1] if who == "one" else [0, 1], skew_s)
    codes = hit.codes()
    if phase == "restore":
        assert CODES[number] in codes, hit.output()
        assert 0 not in codes
        assert latest_committed(plan.checkpoints) == before
    else:
        assert codes == [CODES[number]] * WORLD, hit.output()
        check(account(plan, "hit"), reference, same_world=True, first=0)
    stopped = latest_committed(plan.checkpoints)
    assert stopped is not None
    step = int(stopped.name.removeprefix("step-").removesuffix(".ckpt"))
    if phase != "restore":
        assert step == max(account(plan, "hit").weights), "it stopped behind a step that it did not save"
    assert step < plan.steps
    again = start(plan, "again", WORLD)
    assert again.codes() == [0] * WORLD, again.output()
    check(account(plan, "again"), reference, same_world=True, first=step, last=plan.steps)


class Slurm(pl.Callback):
    """The environment of a Slurm job, with a `scontrol` that writes down what it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, *_) -> None:
        program = self.folder / f"bin-{os.environ['RANK']}" / "scontrol"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\necho $@ $(ls {self.folder}/checkpoints) >> {self.folder}/asked\n")
        program.chmod(0o755)
        os.environ.update(SLURM_JOB_ID="42", PATH=f"{program.parent}:{os.environ['PATH']}")


@pytest.mark.parametrize(("name", "asked"), [("SIGUSR1", "requeue 42 step-"), ("SIGTERM", None)])
def test_f4_a_slurm_job_is_put_back_into_the_queue_once_behind_the_commit(corpus, tmp_path, name, asked) -> None:
    plan, slow = Plan(corpus, tmp_path, steps=8, every=100), Slow(tmp_path, "train")
    hit = start(plan, "hit", WORLD, (slow, Slurm(tmp_path)))
    assert hit.wait_for(slow.mark.exists), hit.output()
    hit.send(getattr(signal, name), [0, 1])
    assert hit.codes() == [CODES[getattr(signal, name)]] * WORLD, hit.output()
    assert latest_committed(plan.checkpoints) is not None
    if asked is None:
        assert not (tmp_path / "asked").exists()
    else:
        (line,) = (tmp_path / "asked").read_text().splitlines()
        assert line.startswith(asked)


class Stuck(pl.Callback):
    """One rank never comes back from a step."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def on_train_batch_start(self, trainer, *_) -> None:
        if trainer.global_step == 2 and os.environ["RANK"] == "1":
            self.mark.touch()
            while True:
                time.sleep(1)


def test_f4_where_a_rank_is_stuck_the_clock_ends_all_with_the_signals_code(corpus, tmp_path) -> None:
    plan = Plan(corpus, tmp_path, steps=8, every=2, deadline_s=1.0)
    hit = start(plan, "hit", WORLD, (Stuck(tmp_path / "mark"),))
    assert hit.wait_for((tmp_path / "mark").exists), hit.output()
    hit.send(signal.SIGTERM, [0, 1])
    assert hit.codes() == [143] * WORLD, hit.output()
    assert "did not stop within 1 s after SIGTERM" in (hit.folder / "rank-0.log").read_text()
    assert latest_committed(plan.checkpoints).name == "step-2.ckpt"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"exit_codes": {"SIGNAL": 3}}, "is no signal"),
        ({"exit_codes": {"SIGTERM": 0}}, "0 means success"),
        ({"deadline_s": 0.0}, "deadline_s"),
    ],
)
def test_settings_that_make_no_sense_are_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        Resilience(**arguments)


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*treespec", "ignore:.*Skipping val loop")
def test_resilience_without_anybody_who_saves_is_refused_before_training() -> None:
    trainer = pl.Trainer(
        callbacks=[Resilience()], max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False
    )
    with pytest.raises(ValueError, match="nobody who saves: add StepCheckpoint"):
        trainer.fit(Small(), [{}])


def replicated(plan: Plan, attempt: str, resume: Path | None, extra: tuple = ()) -> None:
    """The run under a stock strategy."""
    strategy = DDPStrategy(process_group_backend="gloo")
    callbacks = (*extra, StepCheckpoint(plan.checkpoints, plan.every), Resilience(deadline_s=plan.deadline_s))
    train_with(plan, attempt, resume, strategy, Small, callbacks)


def test_f4_a_stock_strategy_stops_and_goes_on_too(corpus, tmp_path) -> None:
    plan, slow = Plan(corpus, tmp_path, steps=8, every=100, dropout=0.0), Slow(tmp_path, "train")
    calm = Attempt(tmp_path / "calm", WORLD, replicated, replace(plan, store=tmp_path / "c"), "calm", None)
    assert calm.codes() == [0] * WORLD, calm.output()
    hit = Attempt(tmp_path / "logs", WORLD, replicated, plan, "hit", None, (slow,))
    assert hit.wait_for(slow.mark.exists), hit.output()
    hit.send(signal.SIGTERM, [1])
    assert hit.codes() == [143] * WORLD, hit.output()
    (saved,) = plan.checkpoints.iterdir()
    again = Attempt(tmp_path / "logs-again", WORLD, replicated, plan, "again", saved)
    assert again.codes() == [0] * WORLD, again.output()
    step = int(saved.name.removeprefix("step-").removesuffix(".ckpt"))
    reference = account(replace(plan, store=tmp_path / "c"), "calm")
    check(account(plan, "again"), reference, same_world=True, first=step, last=plan.steps)


class KeepsWeights(pl.Callback):
    """Writes down the weights of every step, and sends itself a signal in the first batch of a validation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, *_) -> None:
        torch.save(pl_module.state_dict(), self.folder / f"weights-{trainer.global_step}.pt")

    def on_validation_batch_start(self, trainer, *_) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("every", [100, 3])
def test_f4_a_stop_in_a_validation_saves_the_weights_of_training_and_not_averaged_ones(corpus, tmp_path, every) -> None:
    plan = Plan(corpus, tmp_path, steps=8, every=every, val_every=3)
    extra = (KeepsWeights(tmp_path), EMAWeightAveraging(decay=0.5))
    hit = Attempt(tmp_path / "logs", 1, replicated, plan, "hit", None, extra)
    assert hit.codes() == [143], hit.output()
    (saved,) = plan.checkpoints.iterdir()
    assert saved.name == "step-3.ckpt"
    found = torch.load(saved, weights_only=False)
    of_training = torch.load(tmp_path / "weights-3.pt")
    assert all(torch.equal(found["current_model_state"][name], value) for name, value in of_training.items())
    assert not torch.equal(found["state_dict"]["head.bias"], of_training["head.bias"])
    ended = account(plan, "hit").val_losses
    assert list(ended) == ([3] if every == 100 else []), "left at once if the step is committed, else saved behind it"
