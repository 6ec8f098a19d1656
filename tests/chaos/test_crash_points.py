"""F1: SIGKILL of any rank before any file operation during three saves; then the run goes on from what was reported."""

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_fms.distributed import latest_committed
from tests.chaos.attempts import Attempt
from tests.chaos.crash_points import with_crash
from tests.chaos.workload import Account, Plan, account, check, start, train, uninterrupted

WORLD, SAVES, SMOKE_POINTS = 2, 3, 2
ONLY = os.environ.get("FMS_CHAOS_POINT")  # "<rank>:<operation>" of a failed trial


@pytest.fixture(scope="module", params=[False, True], ids=["waiting", "background"])
def plan(corpus, tmp_path_factory, request) -> Plan:
    return Plan(corpus, tmp_path_factory.mktemp("crash"), steps=5, every=1, keep=2, asynchronous=request.param)


@pytest.fixture(scope="module")
def reference(plan) -> Account:
    return uninterrupted(plan, WORLD)


def crash(plan: Plan, store: Path, rank: int, fatal: int) -> tuple[Plan, list[int], list[int]]:
    """An attempt in which a rank dies; the codes, and how many operations each rank made."""
    trial = replace(plan, store=store, steps=SAVES)
    note = store / "operations"
    note.parent.mkdir(parents=True, exist_ok=True)
    hit = Attempt(store / "logs", WORLD, with_crash, train, trial.checkpoints, rank, fatal, note, trial, "hit", None)
    codes = hit.codes()
    counts = [
        len(file.read_text().splitlines()) if (file := note.with_name(f"operations.{r}")).exists() else -1
        for r in range(WORLD)
    ]
    return trial, codes, counts


def trial(plan: Plan, reference: Account, store: Path, rank: int, fatal: int) -> None:
    """Crash and resume; raises AssertionError with what went wrong."""
    hit, codes, _ = crash(plan, store, rank, fatal)
    assert codes[rank] == -9, f"codes {codes}"
    before = account(hit, "hit")
    reported = max(before.saved, default=0)
    found = latest_committed(hit.checkpoints)
    at = int(found.name.removeprefix("step-").removesuffix(".ckpt")) if found is not None else 0
    assert at >= reported, f"step {reported} was reported, {at} is there"
    assert 0 not in codes or at == SAVES, (
        f"a rank ended well before its last step, although another was killed: {codes}"
    )
    again = start(replace(hit, steps=plan.steps), "again", WORLD)
    codes = again.codes()
    assert codes == [0] * WORLD, again.output()
    after = account(hit, "again")
    check(after, reference, same_world=True, first=at, last=plan.steps)
    if at:
        assert after.start_weights == reference.weights[at], "it began with other weights than were saved"
    left = [path.name for path in hit.checkpoints.iterdir() if path.name.startswith(".")]
    assert not left, f"what the killed attempt left is still there: {left}"


def test_f1_a_kill_before_any_file_operation_of_any_rank_during_three_saves(plan, reference, full, tmp_path) -> None:
    _, codes, counts = crash(plan, tmp_path / "count", 0, -1)
    assert codes == [0] * WORLD
    assert min(counts) > 5, counts
    points = [(rank, point) for rank, count in enumerate(counts) for point in range(count)]
    if ONLY is not None:
        points = [tuple(map(int, ONLY.split(":")))]
    elif not full:
        points = random.Random(1).sample(points, SMOKE_POINTS)
    bad = []
    for rank, point in points:
        try:
            trial(plan, reference, tmp_path / f"{rank}-{point}", rank, point)
        except AssertionError as error:
            bad.append(f"FMS_CHAOS_POINT={rank}:{point}: {error}")
    assert not bad, f"{len(bad)} of {len(points)} points\n" + "\n".join(bad)
