"""`fms-train`: a run and what it leaves, resuming it, and mistakes that leave nothing."""

import os
import re
import signal
from pathlib import Path
from shutil import rmtree

import pytest
from app_runs import SHORT, WITH_THIS, Interrupting, call, start
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_fms.distributed import latest_committed
from lightning_fms.launch.result import read_result
from lightning_fms.run_folder import attempts

pytestmark = pytest.mark.filterwarnings("ignore")  # The app decides what a user sees; a test of its own looks at that.


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def scalars(run: str, tag: str) -> dict[int, float]:
    events = EventAccumulator(f"{run}/tensorboard").Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def test_a_run_trains_shows_and_keeps_everything(monkeypatch, capsys) -> None:
    assert call(monkeypatch, *SHORT) == 0
    out = capsys.readouterr().out
    for shown in (
        "source prose",
        "grad norm",
        "val_loss",
        "def ",
        "Next:",
        "        1   ",
        "fms-train resume=auto paths.run=runs/quickstart/001 trainer.devices=2",
        "tensorboard --logdir runs",
    ):
        assert shown in out
    run = Path("runs/quickstart/001")
    assert {path.name for path in run.iterdir()} >= {"run.yaml", "config.yaml", "checkpoints", "tensorboard"}
    assert latest_committed(run / "checkpoints").name.startswith("step-4")
    assert len(scalars(str(run), "loss")) == 4
    for tag in ("val_loss", "grad_norm", "memory_gib", "data/code/share", "tokens_per_second"):
        assert scalars(str(run), tag)
    assert [path.name for path in Path().iterdir()] == ["runs"]


def test_a_second_run_gets_a_folder_of_its_own_and_the_same_losses_to_the_bit(monkeypatch) -> None:
    for _ in range(2):
        assert call(monkeypatch, *SHORT) == 0
    first, second = (scalars(f"runs/quickstart/00{n}", "loss") for n in (1, 2))
    assert first == second
    assert call(monkeypatch, *SHORT, "seed=1") == 0
    assert scalars("runs/quickstart/003", "loss") != first


def test_resume_auto_goes_on_in_the_same_folder_with_the_settings_of_the_run(monkeypatch, capsys) -> None:
    assert call(monkeypatch, *SHORT) == 0
    assert call(monkeypatch, "resume=auto", "trainer.max_steps=6") == 0
    out = capsys.readouterr().out
    assert "goes on from runs/quickstart/001/checkpoints/step-4" in out
    assert [path.name for path in Path("runs/quickstart").iterdir()] == ["001"]
    assert set(scalars("runs/quickstart/001", "loss")) == set(range(6))
    assert latest_committed(Path("runs/quickstart/001/checkpoints")).name.startswith("step-6")


def test_what_a_run_chose_need_not_be_chosen_again(monkeypatch, capsys) -> None:
    Path("texts.jsonl").write_text('{"text": "some words"}\n' * 200)
    own = ("data=text", "data.sources={web: texts.jsonl}", "data.tokenizer=bytes", "precision=fp32", "name=mine")
    short = [o for o in SHORT if not o.startswith(("experiment", "callbacks.sample", "data.val"))]
    assert call(monkeypatch, *own, *short, "trainer.accelerator=cpu") == 0
    # None of these keys is in the default data config, or takes this value there.
    changed = ("data.packing=best_fit", "data.sources.web={path: texts.jsonl}", "trainer.max_steps=6")
    assert call(monkeypatch, "resume=auto", *changed) == 0
    assert "goes on from runs/mine/001/checkpoints/step-4" in capsys.readouterr().out
    assert call(monkeypatch, "resume=auto", "data.packin=none") == 2
    assert "did you mean data.packing?" in capsys.readouterr().err
    assert attempts(Path("runs/mine/001"))[-1]["overrides"][-1] == "paths.run=runs/mine/001"
    Path("runs/mine/001").rename("runs/mine/007")
    assert call(monkeypatch, "resume=auto", "trainer.max_steps=8") == 0
    assert "goes on from runs/mine/007/checkpoints/step-6" in capsys.readouterr().out


def test_a_path_is_enough_to_train_on_own_text(monkeypatch, capsys) -> None:
    Path("texts.jsonl").write_text('{"text": "some words"}\n' * 200)
    short = [o for o in SHORT if not o.startswith(("experiment", "callbacks.sample", "data.val", "scheduler"))]
    assert call(monkeypatch, "data.sources.mine=texts.jsonl", "trainer.accelerator=cpu", *short) == 0
    out = capsys.readouterr().out
    assert "trains on mine alone: data=text data.tokenizer=bytes" in out
    assert "source mine: 1 files" in out
    assert call(monkeypatch, "resume=auto", "data.sources.mine=texts.jsonl", "trainer.max_steps=5") == 0
    assert "goes on from runs/train/001/checkpoints/step-4" in capsys.readouterr().out


def test_a_run_leaves_what_it_came_to(monkeypatch, capsys) -> None:
    assert call(monkeypatch, *SHORT) == 0
    result = read_result(Path("runs/quickstart/001"))
    assert result is not None
    assert (result.objective, result.steps) == ("val_loss", 4)
    assert result.value == scalars("runs/quickstart/001", "val_loss")[3]
    assert result.metrics["loss"] == scalars("runs/quickstart/001", "loss")[3]
    assert call(monkeypatch, *SHORT, "objective=accuracy") == 2
    assert "objective=accuracy: the run logged no such metric; it logged" in capsys.readouterr().err
    other = read_result(Path("runs/quickstart/002"))
    assert other is not None
    assert (other.objective, other.metrics.keys()) == (None, result.metrics.keys())


def test_resume_auto_with_an_experiment_that_never_ran_starts_it(monkeypatch, capsys) -> None:
    assert call(monkeypatch, *SHORT, "resume=auto") == 0
    assert "starts at step 0" in capsys.readouterr().out
    assert Path("runs/quickstart/001/run.yaml").is_file()


def test_resume_from_a_path_makes_a_new_run(monkeypatch) -> None:
    assert call(monkeypatch, *SHORT) == 0
    assert call(monkeypatch, *SHORT, "resume=runs/quickstart/001", "trainer.max_steps=5") == 0
    assert set(scalars("runs/quickstart/002", "loss")) == {4}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+trainer.max_stepz=1"], "did you mean 'max_steps'"),
        (["trainer.foo=1"], "trainer.foo"),
        (["experiment=quickstar"], "quickstar"),
        (["data.tokenizer=missing.json"], "missing.json"),
        (["data.sources.code={path: nowhere}"], "nowhere"),
        (["resume=true"], "resume=True: give auto, null, or the path"),
        (["resume=runs/none"], "resume=runs/none: does not exist"),
        (["model.net.vocab_size=100"], "the tokenizer has 257 ids"),
        (["model.net.n_heads=5"], "n_heads=5"),
        (["data.seq_len=0"], "data.seq_len=0: give a whole number of at least 1"),
        (["trainer.devices=2", "hydra/launcher=basic", "hydra.mode=MULTIRUN"], "leave out hydra/launcher=basic"),
        (["objective_mode=most"], "objective_mode=most: give min, or max"),
        (["trainer.devices=[7]"], "trainer.devices=[7]: a CPU has no indices"),
        (["trainer.gradient_clip_val=-1"], "trainer.gradient_clip_val=-1: give a norm"),
        (["seed=-1"], "seed=-1: give a whole number from 0"),
        (["paths.root=/proc/x"], "paths.root=/proc/x: no folder can be made there"),
        (["resume=/dev/null"], "resume=/dev/null: "),
        (["optimizer.lr=-1"], "optimizer.lr=-1: Invalid learning rate"),
        (["optimizer.betas=[0.9,2]"], "optimizer.betas=[0.9, 2]: Invalid beta"),
        (["scheduler.warmup_steps=9"], "scheduler.warmup_steps=9: warmup_steps=9 is not below total_steps=4"),
        (["+trainer.limit_train_batches=0"], "trainer.limit_train_batches=0: would train nothing"),
        (["+logger@logger2=csv"], "nothing reads this key, so it would do nothing; did you mean logger?"),
        (["trainer.max_steps=0"], "trainer.max_steps=0: give the number of optimizer steps"),
        (["trainer.max_steps=1e3"], "trainer.max_steps=1000.0: Trainer wants a whole number; write 1000"),
        (["trainer.max_steps"], "trainer.max_steps: no value; give <key>=<value>"),
        (["quickstart"], "quickstart: no value; give <key>=<value>, e.g. experiment=quickstart"),
        (["trainer.log_every_n_steps=-3"], "trainer.log_every_n_steps=-3: give a number of steps, or 0"),
        (["trainer.accelerator=tpu"], "trainer: Requirement 'torch_xla"),
        (["name=a/b"], "name=a/b: it becomes a folder"),
        (["+callbacks.x=5"], "callbacks.x=5: names no class"),
        (["+callbacks.x._target_=torch.nn.Identity"], "callbacks.x: Identity is no Callback of Lightning"),
        (["strategy=ddp", "meta_init=true"], "meta_init=true with DDP: it copies whole weights"),
        (["callbacks=none"], "names no class, so it would do nothing"),
        (["data=text"], "give data.sources.<name>='<files"),
        (["data=text", "data.sources.web=."], "give data.tokenizer=<tokenizer.json>, or data.tokenizer=bytes"),
    ],
)
def test_a_mistake_is_one_line_exit_code_2_and_leaves_nothing(overrides, message, monkeypatch, capsys) -> None:
    first = (
        []
        if overrides[0].startswith("experiment")
        else [o for o in SHORT if not o.startswith(overrides[0].split("=")[0])]
    )
    assert call(monkeypatch, *first, *overrides) == 2
    err = capsys.readouterr().err
    line = next(line for line in err.splitlines() if line.startswith("fms-train: error: "))
    assert message in line
    assert "Traceback" not in err
    assert not list(Path().glob("runs/*/[0-9]*"))


def test_an_override_may_refer_to_the_runs_folder_and_a_run_may_log_nowhere(monkeypatch) -> None:
    bad_steps = ("+callbacks.bad_steps._target_=lightning_fms.callbacks.BadSteps", "logger=none")
    assert call(monkeypatch, *SHORT, *bad_steps, "+callbacks.bad_steps.path=${paths.run}/bad_steps.jsonl") == 0
    assert (
        "+callbacks.bad_steps.path=${paths.run}/bad_steps.jsonl"
        in attempts(Path("runs/quickstart/001"))[0]["overrides"]
    )
    assert call(monkeypatch, "resume=auto", "trainer.max_steps=5") == 0


def test_flags_may_stand_between_overrides(monkeypatch, capsys) -> None:
    words = [*SHORT, "-m", "optimizer.lr=-1,-2", "hydra/launcher=basic"]
    assert call(monkeypatch, *words) == 2
    assert "optimizer.lr=-1: Invalid learning rate" in capsys.readouterr().err


def test_resume_auto_without_any_run_says_so(monkeypatch, capsys) -> None:
    assert call(monkeypatch, "resume=auto") == 2
    assert "no run under runs/ has a checkpoint" in capsys.readouterr().err


def test_debug_shows_where_a_mistake_was_noticed(monkeypatch, capsys) -> None:
    assert call(monkeypatch, *SHORT, "debug=trace", "model.net.n_heads=5") == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_mistake_in_a_users_folder_costs_nothing(monkeypatch, capsys) -> None:
    Path("thesis").mkdir()
    Path("thesis/chapter.tex").write_text("years of work")
    for place in (".", "thesis"):
        assert call(monkeypatch, *SHORT, f"paths.run={place}", "model.net.n_heads=5") == 2
        assert "exists and is no run; give a new or empty folder" in capsys.readouterr().err
    Path("thesis/empty").mkdir()
    assert call(monkeypatch, *SHORT, "paths.run=thesis/empty", "model.net.n_heads=5") == 2
    assert call(monkeypatch, *SHORT, "paths.run=thesis/new/run", "model.net.n_heads=5") == 2
    assert sorted(str(path) for path in Path().rglob("*")) == ["thesis", "thesis/chapter.tex", "thesis/empty"]


def test_a_given_folder_is_resumed_also_if_the_run_ended_before_its_first_checkpoint(monkeypatch, capsys) -> None:
    again = (*SHORT, "paths.run=mine", "resume=auto", "trainer.max_steps=2")
    assert call(monkeypatch, *again) == 0
    out = capsys.readouterr().out
    assert "fms-train resume=auto paths.run=mine trainer.devices=2 trainer.max_steps=4 " in out
    rmtree("mine/checkpoints")
    assert call(monkeypatch, *again) == 0
    assert "no checkpoint in mine/, so this run starts at step 0" in capsys.readouterr().out
    assert latest_committed(Path("mine/checkpoints")).name.startswith("step-2")
    assert call(monkeypatch, *SHORT, "paths.run=mine") == 2
    assert "holds a run already" in capsys.readouterr().err


def test_the_closing_commands_go_on_with_this_run(monkeypatch, capsys) -> None:
    endless = [o for o in SHORT if not o.startswith("trainer.max_steps")]
    endless += ["trainer.max_steps=-1", "+trainer.max_epochs=1", "+data.steps_per_epoch=2", "scheduler.total_steps=10"]
    assert call(monkeypatch, *endless, "paths.root=elsewhere") == 0
    out = capsys.readouterr().out
    assert "fms-train resume=auto paths.run=elsewhere/quickstart/001 trainer.devices=2 ++trainer.max_epochs=2 " in out
    assert "tensorboard --logdir elsewhere" in out
    assert "fms-train -m experiment=quickstart " in out
    assert "paths.root=elsewhere optimizer.lr=1e-3,3e-3" in out
    assert call(monkeypatch, "resume=auto", "paths.root=elsewhere", "++trainer.max_epochs=2") == 0
    assert "elsewhere/quickstart/001/checkpoints/step-4" in capsys.readouterr().out


def test_a_run_that_ended_before_its_first_checkpoint_starts_again_where_it_started(monkeypatch, capsys) -> None:
    assert call(monkeypatch, *SHORT) == 0
    more = ("resume=runs/quickstart/001", "trainer.max_steps=6")
    assert call(monkeypatch, *SHORT, *more, "paths.run=mine") == 0
    rmtree("mine/checkpoints")
    capsys.readouterr()
    assert call(monkeypatch, "resume=auto", "paths.run=mine") == 0
    assert "goes on from runs/quickstart/001/checkpoints/step-4" in capsys.readouterr().out


def interrupting(step: int) -> tuple[str, ...]:
    return ("+callbacks.own._target_=app_runs.Interrupting", f"+callbacks.own.step={step}")


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (3, "interrupted at step 3; go on from step 2 with: fms-train resume=auto paths.run=runs/quickstart/001"),
        (
            1,
            "interrupted at step 1; go on from the start (no checkpoint was due yet) with: "
            "fms-train resume=auto paths.run=runs/quickstart/001",
        ),
        (0, "interrupted before the first step"),
    ],
)
def test_a_ctrl_c_says_how_to_go_on(step: int, said: str, monkeypatch, capsys) -> None:
    former = signal.getsignal(signal.SIGINT)
    try:
        assert call(monkeypatch, *SHORT, *interrupting(step)) == 130
    finally:
        signal.signal(signal.SIGINT, former)  # Lightning has it ignored from now on.
    err = capsys.readouterr().err
    assert err.splitlines()[-1] == f"fms-train: {said}"
    assert "Traceback" not in err
    assert Path("runs").exists() == (step > 0)


def test_a_ctrl_c_on_two_processes_is_said_once(tmp_path: Path) -> None:
    two = start(
        tmp_path, "-m", "lightning_fms.train", *SHORT, *interrupting(3), "trainer.devices=2", PYTHONPATH=WITH_THIS
    )
    assert two.returncode == 130
    assert two.stderr.count("interrupted at step 3; go on from step 2 with: fms-train resume=auto") == 1
    assert "Traceback" not in two.stderr


def test_a_stop_by_a_signal_says_how_to_go_on(tmp_path: Path) -> None:
    terminating = ("+callbacks.own._target_=app_runs.Terminating", "+callbacks.own.step=2", "trainer.max_steps=50")
    run = start(tmp_path, "-m", "lightning_fms.train", *SHORT, *terminating, PYTHONPATH=WITH_THIS)
    assert run.returncode == 143, run.stderr
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("fms-train: ")]
    found = re.fullmatch(r"fms-train: stopped at step (\d+); go on from step (\d+) with: fms-train resume=auto.*", line)
    assert found is not None, line
    assert found[1] == found[2]


class Killing(Interrupting):
    """The kernel, when memory is short."""

    def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
        if trainer.global_step == self.step and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_is_named_with_the_way_to_go_on_and_no_traceback(tmp_path: Path) -> None:
    killing = ("+callbacks.own._target_=test_train.Killing", "+callbacks.own.step=3", "trainer.devices=2")
    two = start(tmp_path, "-m", "lightning_fms.train", *SHORT, *killing, PYTHONPATH=WITH_THIS)
    assert two.returncode == 1
    assert two.stderr.splitlines() == [
        "fms-train: rank 1 was killed by SIGKILL (out of host memory?) at step 3; go on from step 2 with: "
        "fms-train resume=auto paths.run=runs/quickstart/001"
    ]


class Refusing(Callback):
    """Somebody's code that fails with the kind of error that we use for bad values."""

    def on_train_batch_start(self, *_: object) -> None:
        int("seven")


class Calling(Callback):
    """Somebody's code that Lightning refuses."""

    def on_train_batch_start(self, trainer: object, module: LightningModule, *_: object) -> None:
        module.log("x", "no number")


@pytest.mark.parametrize("kind", [Refusing, Calling])
def test_an_error_in_the_users_code_shows_where(kind: type, monkeypatch, capsys) -> None:
    assert call(monkeypatch, *SHORT, f"+callbacks.own._target_={__name__}.{kind.__name__}") == 1
    err = capsys.readouterr().err
    assert err.count("Traceback (most recent call last)") == 1
    assert "in on_train_batch_start" in err


class Broken(Callback):
    """Fails as only our own mistakes do."""

    def on_train_start(self, *_: object) -> None:
        raise RuntimeError("an error that nobody foresaw")


def test_an_error_of_ours_shows_where_and_leaves_no_run(monkeypatch, capsys) -> None:
    assert call(monkeypatch, *SHORT, f"+callbacks.broken._target_={__name__}.Broken") == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "nobody foresaw" in err
    assert not Path("runs").exists()


def test_a_process_of_its_own_shows_no_noise_and_lightnings_launcher_shares_one_run(
    tmp_path: Path, monkeypatch
) -> None:
    # Nothing of the tests on its path: it loads what a user's process loads.
    two = start(tmp_path, "-m", "lightning_fms.train", *SHORT, "trainer.devices=2", PYTHONPATH="")
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("Next:") == 1
    assert two.stderr == ""
    assert [path.name for path in (tmp_path / "runs/quickstart").iterdir()] == ["001"]
    assert call(monkeypatch, "resume=auto", "trainer.devices=1", "trainer.max_steps=6") == 0
    assert call(monkeypatch, *SHORT, "trainer.max_steps=6") == 0
    resumed, whole = (scalars(f"runs/quickstart/00{n}", "loss") for n in (1, 2))
    assert set(resumed) == set(whole) == set(range(6))
    assert [resumed[step] for step in range(3)] == pytest.approx([whole[step] for step in range(3)], rel=1e-4)


def test_under_torchrun_all_ranks_share_one_run_on_the_devices_that_it_started(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    run = start(tmp_path, *torchrun, "-m", "lightning_fms.train", *SHORT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("Next:") == 1
    assert "on 2 x CPU" in run.stdout
    assert [path.name for path in (tmp_path / "runs/quickstart").iterdir()] == ["001"]


def test_a_run_begins_with_weights_from_elsewhere(monkeypatch, capsys) -> None:
    assert call(monkeypatch, *SHORT, "weights=none/there") == 2
    assert "weights=none/there: nothing there" in capsys.readouterr().err
    assert call(monkeypatch, *SHORT) == 0
    assert (
        call(
            monkeypatch,
            *SHORT,
            "name=tuned",
            "weights=runs/quickstart/001/checkpoints/step-4.ckpt",
            "optimizer.lr=1e-9",
        )
        == 0
    )
    former, tuned = scalars("runs/quickstart/001", "loss"), scalars("runs/tuned/001", "loss")
    assert set(tuned) == set(range(4))  # its own steps, from 0
    assert tuned[0] < former[0]
