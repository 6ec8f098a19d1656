"""Stock Lightning under the same blows: it must fail, or the blows prove nothing."""

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from tests.chaos.attempts import Attempt, Stuck
from tests.chaos.crash_points import with_crash
from tests.chaos.test_signals import Slow
from tests.chaos.workload import Account, Plan, Small, account, train_with

WORLD = 2


class StockSmall(Small):
    """What stock Lightning asks of a user who shards."""

    def configure_model(self) -> None:
        if not hasattr(self.head, "unshard"):
            for layer in (self.embed, *self.layers, self.head):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])


def stock(plan: Plan, attempt: str, resume: Path | None, extra: tuple = ()) -> None:
    saver = ModelCheckpoint(plan.checkpoints, "{step}", every_n_train_steps=plan.every, save_top_k=1, save_last=True)
    strategy = ModelParallelStrategy(data_parallel_size=WORLD, tensor_parallel_size=1, process_group_backend="gloo")
    train_with(plan, attempt, resume, strategy, StockSmall, (*extra, saver))


@pytest.fixture(scope="module")
def plan(corpus, tmp_path_factory) -> Plan:
    return Plan(corpus, tmp_path_factory.mktemp("stock"), steps=3, every=1, dropout=0.0)


def test_stock_lightning_loses_checkpoints_when_it_is_killed_while_it_saves(plan, full, tmp_path) -> None:
    note = tmp_path / "operations"
    count = Plan(plan.corpus, tmp_path / "count", plan.steps, plan.every, dropout=0.0)
    counted = Attempt(tmp_path / "logs", WORLD, with_crash, stock, count.checkpoints, 0, -1, note, count, "x", None)
    assert counted.codes() == [0] * WORLD, counted.output()
    reference = account(count, "x")
    assert sorted(reference.weights) == [1, 2, 3]
    assert survives(plan, reference, tmp_path / "calm", -1), "it cannot even go on when nothing happens"
    made = note.with_name("operations.0").read_text().splitlines()
    points = [number for number, what in enumerate(made) if "last.ckpt" in what][-12:]
    for point in points if full else random.Random(4).sample(points, 3):
        if not survives(plan, reference, tmp_path / str(point), point):
            return
    pytest.fail("stock Lightning survived every kill: the chaos suite no longer detects torn checkpoints")


def survives(plan: Plan, reference: Account, store: Path, point: int) -> bool:
    """Whether a run that was killed at this point goes on from `last.ckpt` with the weights of its step."""
    hit = Plan(plan.corpus, store, plan.steps, plan.every, dropout=0.0)
    note = store / "operations"
    note.parent.mkdir(parents=True)
    Attempt(store / "logs", WORLD, with_crash, stock, hit.checkpoints, 0, point, note, hit, "hit", None).codes()
    later = Plan(plan.corpus, store, 5, plan.every, dropout=0.0)
    again = Attempt(store / "again", WORLD, stock, later, "again", hit.checkpoints / "last.ckpt")
    if again.codes() != [0] * WORLD:
        return False
    found = account(later, "again")
    return found.start is not None and found.start_weights == reference.weights.get(found.start)


def test_stock_lightning_hangs_or_ends_as_if_all_were_well_when_one_rank_is_told_to_stop(corpus, tmp_path) -> None:
    plan = Plan(corpus, tmp_path, steps=8, every=100, dropout=0.0)
    slow = Slow(tmp_path, "train")
    hit = Attempt(tmp_path / "logs", WORLD, stock, plan, "hit", None, (slow,))
    assert hit.wait_for(slow.mark.exists)
    hit.send(signal.SIGTERM, [1])
    try:
        codes: Any = hit.codes(15)
    except Stuck:
        codes = "stuck"
    saved = os.listdir(plan.checkpoints) if plan.checkpoints.exists() else []
    assert not (codes == [143] * WORLD and saved), "it stopped as it should: the control is no control any more"
