"""F5: saving never changes a run, also before its first step."""

from dataclasses import replace

from tests.chaos.workload import Plan, account, check, start, uninterrupted


def test_f5_a_run_that_saves_at_step_0_and_at_every_step_is_the_one_that_never_saves(corpus, tmp_path) -> None:
    plan = Plan(corpus, tmp_path / "x", steps=4, every=1, keep=-1, step_zero=True)
    reference = uninterrupted(plan_of_calm(plan), 2)
    saving = start(plan, "saving", 2)
    assert saving.codes() == [0, 0], saving.output()
    check(account(plan, "saving"), reference, same_world=True, first=0, last=plan.steps)
    assert (plan.checkpoints / "step-0.ckpt" / "COMMIT").exists()
    for number in (1, 2, 3, 4):  # and the one of step 0 begins the same run
        (plan.checkpoints / f"step-{number}.ckpt").rename(tmp_path / f"step-{number}")
    again = start(replace(plan, step_zero=False), "again", 2)
    assert again.codes() == [0, 0], again.output()
    check(account(plan, "again"), reference, same_world=True, first=0, last=plan.steps)


def plan_of_calm(plan: Plan) -> Plan:
    return replace(plan, step_zero=False)
