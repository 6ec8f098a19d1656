"""When `StepCheckpoint` saves, what stays, and what a failed save costs."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from callback_runs import RandomTokens, tiny_module, trainer
from lightning.pytorch.callbacks import EarlyStopping

from lightning_fms.callbacks import StepCheckpoint
from lightning_fms.callbacks.retention import Retention, Saved
from lightning_fms.callbacks.save_schedule import SaveSchedule
from lightning_fms.distributed import CheckpointError, FSDPCompileStrategy, latest_committed
from lightning_fms.distributed import checkpoint as files
from lightning_fms.models import CausalLM


def saved(*steps: int, hours: float = 1.0, scores: dict[int, float] | None = None) -> list[Saved]:
    return [Saved(Path(f"step-{s}"), s, 3600 * hours * i, (scores or {}).get(s)) for i, s in enumerate(steps)]


def kept(rule: Retention, found: list[Saved]) -> list[int]:
    gone = {one.step for one in rule.superfluous(found)}
    return [one.step for one in found if one.step not in gone]


def test_the_newest_one_every_so_many_hours_and_the_best_stay() -> None:
    steps = (10, 20, 30, 40, 50, 60)
    assert kept(Retention(2), saved(*steps)) == [50, 60]
    assert kept(Retention(-1), saved(*steps)) == list(steps)
    assert kept(Retention(1, keep_every_hours=2.0), saved(*steps)) == [10, 30, 50, 60]
    scores = {10: 3.0, 20: 1.0, 30: 2.0, 40: 1.0, 50: float("nan")}
    assert kept(Retention(1, keep_best=1), saved(*steps, scores=scores)) == [20, 60]
    assert kept(Retention(1, keep_best=2, mode="max"), saved(*steps, scores=scores)) == [10, 30, 60]


def test_what_stays_over_time_is_one_an_hour_however_often_it_is_tidied() -> None:
    rule, found = Retention(1, keep_every_hours=1.0), []
    for number in range(50):
        found.append(Saved(Path(str(number)), number, 600.0 * number))  # every ten minutes
        gone = rule.superfluous(found)
        found = [one for one in found if one not in gone]
    assert [one.step for one in found] == [0, 6, 12, 18, 24, 30, 36, 42, 48, 49]


def test_the_interval_follows_from_save_time_and_failures() -> None:
    schedule = SaveSchedule(10_000, mean_hours_to_failure=24)
    schedule.start(100)
    assert next(step for step in range(100, 115) if schedule.due(step)) == 110
    schedule.began(110, save_seconds=4.0, step_seconds=0.5)
    assert schedule.interval == round((2 * 4 * 24 * 3600) ** 0.5 / 0.5)
    assert not schedule.due(110 + schedule.interval - 1)
    assert schedule.due(110 + schedule.interval)
    schedule.began(2000, save_seconds=4000.0, step_seconds=0.5)
    assert schedule.interval == 10_000, "at most every_n_steps"


def test_a_failing_save_is_tried_again_after_1_2_4_steps_and_at_most_an_interval() -> None:
    schedule = SaveSchedule(10)
    schedule.start(0)
    at, tries = 10, []
    for _ in range(6):
        assert schedule.due(at)
        tries.append(schedule.failed(at))
        assert not schedule.due(at)
        at += tries[-1]
    assert tries == [1, 2, 4, 8, 10, 10]
    schedule.began(at, 1.0, 1.0)
    assert [step for step in range(46, 65) if schedule.due(step)] == [50, 60]


class Disk:
    """Storage that is full for a while: `checkpoint.save` fails the first `failures` times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
        self.left, self.real = failures, files.save
        monkeypatch.setattr(files, "save", self)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self.left:
            self.left -= 1
            raise CheckpointError("No space left on device")
        self.real(*args, **kwargs)


class WaitsForSaves(L.Callback):
    """Makes a save in the background end before the next step does."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        pending = trainer.checkpoint_callback._pending
        if pending is not None:
            assert pending[1].wait(60)


def test_f8_saves_in_the_background_that_keep_failing_are_tried_again_after_1_2_4_steps(tmp_path, monkeypatch) -> None:
    disk = Disk(monkeypatch, failures=3)
    checkpoint = StepCheckpoint(tmp_path / "c", every_n_steps=10, keep=-1, asynchronous=True)
    with pytest.warns(UserWarning, match="saving step") as warned:
        fit(tmp_path, checkpoint, 24, WaitsForSaves())
    # Known two steps after each began, at 12, 15 and 19.
    said = [str(w.message).split(":")[0] for w in warned if "saving step" in str(w.message)]
    tries = [(10, 1), (13, 2), (17, 4)]
    assert said == [f"saving step {step} failed, training goes on, next try in {n} step(s)" for step, n in tries]
    assert disk.left == 0
    assert {path.name for path in (tmp_path / "c").iterdir()} == {"step-23.ckpt", "step-24.ckpt"}


class TwoOptimizers(CausalLM):
    """Steps two optimizers a batch, so that `global_step` grows by two."""

    def __init__(self, module: CausalLM) -> None:
        super().__init__(module.net, module.make_optimizer)
        self.automatic_optimization = False

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        parameters = list(self.parameters())
        return [torch.optim.SGD(parameters[:1], 0.1), torch.optim.SGD(parameters[1:], 0.1)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


class Commits(L.Callback):
    """Notes by batch the step that is committed."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.steps.append(trainer.checkpoint_callback.last_committed_step)


def test_the_end_of_a_save_is_seen_two_batches_later_also_if_a_batch_has_two_steps(tmp_path) -> None:
    checkpoint, commits = StepCheckpoint(tmp_path / "c", every_n_steps=4, asynchronous=True), Commits()
    run = trainer(
        tmp_path, checkpoint, WaitsForSaves(), commits, enable_checkpointing=True, max_steps=12,
        strategy=FSDPCompileStrategy(),
    )  # fmt: skip
    run.fit(TwoOptimizers(tiny_module()), datamodule=RandomTokens())
    assert commits.steps == [-1, -1, -1, -1, 4, 4]  # saved behind the second batch, read behind the fourth


def fit(
    tmp_path: Path,
    checkpoint: StepCheckpoint,
    max_steps: int = 8,
    *others: L.Callback,
    ckpt_path: Path | None = None,
    **changes: Any,
) -> L.Trainer:
    run = trainer(
        tmp_path,
        checkpoint,
        *others,
        enable_checkpointing=True,
        max_steps=max_steps,
        strategy=FSDPCompileStrategy(),
        **changes,
    )
    run.fit(tiny_module(), datamodule=RandomTokens(), ckpt_path=ckpt_path)
    return run


@pytest.mark.parametrize("asynchronous", [False, True])
def test_f8_a_failed_save_warns_is_tried_again_and_never_ends_training(tmp_path, monkeypatch, asynchronous) -> None:
    Disk(monkeypatch, failures=2)
    checkpoint = StepCheckpoint(tmp_path / "c", every_n_steps=3, keep=-1, asynchronous=asynchronous)
    with pytest.warns(UserWarning, match="saving step|not saved yet") as warned:
        run = fit(tmp_path, checkpoint)
    assert any("saving step 3 failed, training goes on, next try in 1" in str(w.message) for w in warned)
    assert run.global_step == 8
    assert latest_committed(tmp_path / "c").name == "step-8.ckpt"
    if not asynchronous:
        assert {path.name for path in (tmp_path / "c").iterdir()} == {"step-6.ckpt", "step-8.ckpt"}


def test_f8_a_last_save_that_keeps_failing_ends_the_run_with_its_error(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("lightning_fms.callbacks.checkpoint._LAST_WAIT_S", 0.0)
    Disk(monkeypatch, failures=100)
    with (
        pytest.warns(UserWarning, match="saving step|not saved yet") as warned,
        pytest.raises(CheckpointError, match="No space"),
    ):
        fit(tmp_path, StepCheckpoint(tmp_path / "c", every_n_steps=100), max_steps=2)
    assert sum("saving step 2 failed" in str(w.message) for w in warned) == 3


@pytest.mark.filterwarnings("ignore:step .* is not saved yet")  # such small steps are faster than any disk
def test_asynchronous_saves_are_those_of_their_steps(tmp_path) -> None:
    fit(tmp_path, StepCheckpoint(tmp_path / "all", every_n_steps=1, keep=-1), max_steps=9)
    checkpoint = StepCheckpoint(tmp_path / "some", every_n_steps=2, keep=-1, asynchronous=True)
    fit(tmp_path, checkpoint, max_steps=9)
    assert checkpoint.last_committed_step == 9
    found = sorted(path.name for path in (tmp_path / "some").iterdir())
    assert "step-2.ckpt" in found
    assert len(found) >= 2
    for name in found:
        assert tensors_of(tmp_path / "some" / name) == tensors_of(tmp_path / "all" / name)


def tensors_of(folder: Path) -> dict[str, list[float]]:
    files.verify(folder)
    found = {n: torch.empty(entry.size) for n, entry in files.read_metadata(folder).items()}
    files.load_tensors(folder, found)
    return {name: tensor.tolist() for name, tensor in found.items()}


def test_the_best_by_a_validation_metric_stays_with_its_score(tmp_path) -> None:
    checkpoint = StepCheckpoint(tmp_path / "c", every_n_steps=2, keep=1, monitor="val_loss")
    fit(tmp_path, checkpoint, max_steps=6, limit_val_batches=1, val_check_interval=2, check_val_every_n_epoch=None)
    assert "scores.json" in {path.name for path in (tmp_path / "c").iterdir()}
    assert "step-6.ckpt" in {path.name for path in (tmp_path / "c").iterdir()}
    assert len(list((tmp_path / "c").glob("step-*"))) <= 2


def test_state_that_could_not_be_read_back_is_refused_before_the_first_step(tmp_path) -> None:
    class Odd(L.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"where": Path("x")}

    run = trainer(
        tmp_path, Odd(), StepCheckpoint(tmp_path / "c"), enable_checkpointing=True, strategy=FSDPCompileStrategy()
    )
    with pytest.raises(ValueError, match=r"'where'\] is a PosixPath"):
        run.fit(tiny_module(), datamodule=RandomTokens())
    assert run.global_step == 0


def test_a_strategy_that_writes_one_plain_file_gathers_nothing_before_the_first_save(tmp_path, monkeypatch) -> None:
    strategy, asked = FSDPCompileStrategy(checkpoint_format="consolidated"), []
    real = strategy.lightning_module_state_dict
    monkeypatch.setattr(strategy, "lightning_module_state_dict", lambda: asked.append(run.global_step) or real())
    run = trainer(tmp_path, StepCheckpoint(tmp_path / "c"), enable_checkpointing=True, max_steps=2, strategy=strategy)
    run.fit(tiny_module(), datamodule=RandomTokens())
    assert set(asked) == {2}


class StopAt(L.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step >= self.step


class Written:
    """Names of the checkpoints that were written, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names, self.real = list[str](), files.save
        monkeypatch.setattr(files, "save", self)

    def __call__(self, path: Path, *args: Any, **kwargs: Any) -> None:
        self.real(path, *args, **kwargs)
        self.names.append(path.name)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("stop", [4, 5])
def test_the_last_step_of_a_run_that_stops_early_is_committed_once(tmp_path, monkeypatch, stop, asynchronous) -> None:
    written = Written(monkeypatch)
    checkpoint = StepCheckpoint(tmp_path / "c", every_n_steps=4, keep=-1, asynchronous=asynchronous)
    run = fit(tmp_path, checkpoint, 8, StopAt(stop), WaitsForSaves())
    assert run.global_step == checkpoint.last_committed_step == stop
    assert written.names == [f"step-{step}.ckpt" for step in sorted({4, stop})]
    files.verify(tmp_path / "c" / f"step-{stop}.ckpt")


@pytest.mark.parametrize("every", [2, 100])
def test_the_step_at_which_early_stopping_stops_is_committed_once(tmp_path, monkeypatch, every) -> None:
    written = Written(monkeypatch)
    checkpoint = StepCheckpoint(tmp_path / "c", every_n_steps=every, monitor="val_loss")
    good_enough = EarlyStopping("val_loss", stopping_threshold=1e9, verbose=False)
    validated = {"limit_val_batches": 1, "val_check_interval": 2, "check_val_every_n_epoch": None}
    run = fit(tmp_path, checkpoint, 8, good_enough, **validated)
    assert run.global_step == 2
    assert written.names == ["step-2.ckpt"]
    assert list(json.loads((tmp_path / "c" / "scores.json").read_text())) == ["step-2.ckpt"]


class Harms(L.Callback):
    """Damages the seal of a checkpoint at a later step, as a failing disk does."""

    def __init__(self, folder: Path, harm: Callable[[Path], object], at: dict[int, int]) -> None:
        self.folder, self.harm, self.at = folder, harm, at

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step in self.at:
            self.harm(self.folder / f"step-{self.at[trainer.global_step]}.ckpt" / "COMMIT")


SEALS: dict[str, Callable[[Path], object]] = {
    "torn": lambda seal: os.truncate(seal, 5),
    "empty": lambda seal: os.truncate(seal, 0),
    "changed": lambda seal: seal.write_text(seal.read_text().replace('"step": ', '"step": 1')),
}


@pytest.mark.filterwarnings("ignore:.*your dataloader is not resumable")
@pytest.mark.parametrize("damage", SEALS)
def test_f2_a_seal_damaged_during_a_run_counts_for_nothing_and_is_resumed_from_by_nobody(
    tmp_path, capsys, damage
) -> None:
    folder, harm = tmp_path / "c", SEALS[damage]
    fit(tmp_path, StepCheckpoint(folder, every_n_steps=2, keep=2), 8, Harms(folder, harm, {7: 6}))
    assert {path.name for path in folder.iterdir()} == {"step-4.ckpt", "step-6.ckpt", "step-8.ckpt"}
    harm(folder / "step-8.ckpt" / "COMMIT")
    found = latest_committed(folder)
    assert found == folder / "step-4.ckpt"
    assert capsys.readouterr().out.count("passing over") == 2
    fit(tmp_path, StepCheckpoint(folder, every_n_steps=2, keep=2), 8, ckpt_path=found)
    assert latest_committed(folder) == folder / "step-8.ckpt"
    assert {path.name for path in folder.iterdir()} == {"step-6.ckpt", "step-8.ckpt"}


@pytest.mark.parametrize(
    "arguments",
    [{"keep_every_hours": 0.0}, {"monitor": "x", "keep_best": -1}, {"mode": "best"}, {"mean_hours_to_failure": 0.0}],
)
def test_settings_that_make_no_sense_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=list(arguments)[-1]):
        StepCheckpoint(**arguments)
