"""F1, F3: SIGKILL of random ranks at random moments, one attempt after the other on other numbers of ranks."""

import os
import random
import signal
import time
from collections import Counter
from dataclasses import replace

from lightning_fms.distributed import latest_committed
from tests.chaos.attempts import Stuck
from tests.chaos.workload import Account, Plan, account, start, uninterrupted

WORLDS = (2, 1, 3, 2, 5)
SEED = int(os.environ.get("FMS_CHAOS_SEED", "1"))
STEPS_A_FAULT = 6
HOURS = (
    float(os.environ.get("FMS_CHAOS", "0h").removesuffix("h")) if os.environ.get("FMS_CHAOS", "").endswith("h") else 0.0
)


def newest_step(plan: Plan) -> int:
    found = latest_committed(plan.checkpoints)
    return int(found.name.removeprefix("step-").removesuffix(".ckpt")) if found is not None else 0


def judge(found: Account, reference: Account, at: int, hashes: dict[int, str]) -> None:
    """Hold an attempt's books, killed or not, against the reference's rows and the weights that were saved."""
    if found.start is None:
        return  # it was killed before it began
    assert found.start == at, f"began behind step {found.start}, but {at} is the newest that was committed"
    if at:
        assert found.start_weights == hashes[at], f"began with other weights than those of step {at}"
    for step, rows in found.rows.items():
        if step in reference.rows:
            assert Counter(rows) <= Counter(reference.rows[step]), f"step {step} trained other rows"


def test_f1_f3_a_chain_of_kills_on_changing_numbers_of_ranks(corpus, tmp_path, full) -> None:
    faults = 100 if full else 4
    chance = random.Random(SEED)
    plan = Plan(corpus, tmp_path, steps=100_000, every=2, keep=2, dropout=0.0)
    reference = uninterrupted(replace(plan, steps=(STEPS_A_FAULT * faults if full else 40)), 1)
    hashes: dict[int, str] = {}
    reported, fault, until = 0, 0, time.monotonic() + 3600 * HOURS
    while fault < faults or time.monotonic() < until:
        world, at = WORLDS[fault % len(WORLDS)], newest_step(plan)
        where = f"FMS_CHAOS_SEED={SEED}, fault {fault}, {world} ranks, from step {at}"
        assert at >= reported, f"{where}: step {reported} was reported"
        name = f"{fault:04}"
        hit = start(plan, name, world)
        after = chance.randrange(STEPS_A_FAULT)
        hit.wait_for(lambda after=after, name=name: len(account(plan, name).weights) >= after or not after)
        time.sleep(chance.random() * (0.5 if after == 0 else 0.1))
        victims = chance.sample(range(world), chance.randint(1, world))
        hit.send(signal.SIGKILL, victims)
        if account(plan, name).start is None:
            hit.kill()  # ranks that wait for others to meet, for half an hour, are their launcher's to end
        try:
            codes = hit.codes()
        except Stuck as error:
            raise AssertionError(f"{where}: ranks {victims} were killed: {error}") from error
        assert 0 not in codes, f"{where}: {codes}\n{hit.output()}"
        found = account(plan, name)
        try:
            judge(found, reference, at, hashes)
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}\n{hit.output()}") from error
        hashes |= found.weights
        reported = max([reported, *found.saved])
        fault += 1
    at = newest_step(plan)
    calm = start(replace(plan, steps=at + 3), "end", 2)
    assert calm.codes() == [0, 0], calm.output()
    found = account(plan, "end")
    judge(found, reference, at, hashes)
    assert sorted(found.weights) == [at + 1, at + 2, at + 3]
    for step in found.weights:
        assert step not in reference.rows or found.rows[step] == reference.rows[step]
