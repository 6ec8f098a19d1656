"""F4: SIGTERM and SIGUSR1 to any ranks with any skew: all stop behind one step, commit, and exit with the signal's code."""

import signal
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest

from lightning_fms.distributed import latest_committed
from tests.chaos.workload import Account, Plan, account, check, start, uninterrupted

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

    def on_save_checkpoint(self, *_) -> None:
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
