"""Checkpoints through the Trainer: saved on W processes, loaded on W', and bitwise the uninterrupted run at the same W."""

import os
import pathlib
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from gloo_world import once, run_world
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import Recorder, Rows, Run, Tiny, fit, trainer, whole_weights
from torch import nn

from lightning_fms.distributed import CheckpointError, FSDPCompileStrategy, latest_committed

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*treespec.*",
    "ignore:Be aware that when using `ckpt_path`, callbacks",
    "ignore:Checkpoint directory .* exists",
    "ignore:The .grad attribute of a Tensor that is not a leaf",
)
SIZES = (1, 2, 3)
STEPS, SAVED_AT = 4, 2


class SaveAt(pl.Callback):
    """Saves after optimizer step `step`, where an accumulation window is complete."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)


class Unused(Tiny):
    """Has a parameter that never gets a gradient, dropout, and the compute of two precisions."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.unused = nn.Linear(3, 3)


def save_runs(folder: Path) -> dict[str, Run]:
    """Uninterrupted runs that save in the middle."""
    fp32 = fit(Unused, callbacks=[SaveAt(SAVED_AT, folder / "fp32")], max_steps=STEPS)
    plain = fit(Tiny, callbacks=[SaveAt(SAVED_AT, folder / "plain")], max_steps=STEPS)
    bf16 = fit(Unused, callbacks=[SaveAt(SAVED_AT, folder / "bf16")], max_steps=STEPS, precision="bf16-mixed")
    one_file = FSDPCompileStrategy(checkpoint_format="consolidated")
    file = fit(Tiny, callbacks=[SaveAt(SAVED_AT, folder / "file")], max_steps=STEPS, strategy=one_file)
    return {"fp32": fp32, "plain": plain, "bf16": bf16, "file": file}


def resume_runs(folder: Path, names: tuple[str, ...], compiled: bool = False) -> dict[str, Run]:
    """The rest of each run, set up differently (recomputation, compilation): names do not depend on it."""
    makes = {"fp32": Unused, "plain": Tiny, "bf16": Unused, "file": Tiny}
    return {
        name: fit(
            makes[name],
            ckpt_path=folder / name,
            max_steps=STEPS,
            precision="bf16-mixed" if name == "bf16" else "32-true",
            strategy=FSDPCompileStrategy(
                activation_checkpointing="full",
                compile=compiled and name == "plain",
                compile_options={"backend": "aot_eager"},
            ),
        )
        for name in names
    }


def save_and_resume(base: Path) -> dict[str, Any]:
    size = int(os.environ.get("WORLD_SIZE", "1"))
    saved = save_runs(base / str(size))
    return {"saved": saved, "same": resume_runs(base / str(size), ("fp32", "bf16"))}


def resume_others(base: Path) -> dict[int, dict[str, Run]]:
    few = int(os.environ.get("WORLD_SIZE", "1")) < 3  # compilation takes seconds, and more where ranks share a core
    return {size: resume_runs(base / str(size), ("plain", "file"), compiled=few and size == 2) for size in SIZES}


def all_runs(folder: Path) -> dict[str, Any]:
    """Save and resume on each number of processes, then resume each one's checkpoint on each other number."""
    runs = {1: save_and_resume(folder)}
    for size in (2, 3):
        runs[size] = run_world(size, save_and_resume, folder / f"world{size}", folder)[0]
    crossed = {1: resume_others(folder)}
    for size in (2, 3):
        crossed[size] = run_world(size, resume_others, folder / f"others{size}", folder)[0]
    return {"folder": folder, "runs": runs, "crossed": crossed}


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return once(tmp_path_factory, "resume", all_runs)


@pytest.fixture(scope="module")
def base(everything: dict[str, Any]) -> Path:
    return everything["folder"]


@pytest.fixture(scope="module")
def runs(everything: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return everything["runs"]


@pytest.fixture(scope="module")
def crossed(everything: dict[str, Any]) -> dict[int, dict[int, dict[str, Run]]]:
    return everything["crossed"]


@pytest.mark.parametrize("name", ["fp32", "bf16"])
@pytest.mark.parametrize("size", SIZES)
def test_f5_resumed_at_the_same_number_is_bitwise_the_uninterrupted_run_with_dropout(
    runs, size: int, name: str
) -> None:
    whole_run, resumed = runs[size]["saved"][name], runs[size]["same"][name]
    assert resumed.losses == whole_run.losses[SAVED_AT:]
    assert all(torch.equal(resumed.weights[n], w) for n, w in whole_run.weights.items())


@pytest.mark.parametrize("new", SIZES)
@pytest.mark.parametrize("old", SIZES)
def test_f3_loads_on_any_number_of_processes(runs, crossed, old: int, new: int) -> None:
    whole_run = runs[old]["saved"]["plain"]
    for name in ("plain", "file"):  # the sharded folder and the one plain file
        resumed = crossed[new][old][name]
        torch.testing.assert_close(resumed.losses, whole_run.losses[SAVED_AT:], rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(resumed.weights, whole_run.weights, rtol=1e-4, atol=1e-4)


def test_the_plain_file_is_a_stock_lightning_checkpoint(runs, base: Path) -> None:
    whole_run = runs[2]["saved"]["file"]
    resumed = fit(Tiny, ckpt_path=base / "2" / "file", max_steps=STEPS, strategy="auto")
    torch.testing.assert_close(resumed.weights, whole_run.weights, rtol=1e-4, atol=1e-4)
    stock = Tiny.load_from_checkpoint(base / "2" / "file", weights_only=True)
    assert stock.head.weight.shape == (29, 12)


def test_every_rank_wrote_its_shards_and_names_are_plain(runs, base: Path) -> None:
    for size in SIZES:
        names = {p.name for p in (base / str(size) / "fp32").iterdir()}
        assert {f"__{rank}_0.distcp" for rank in range(size)} <= names
        assert {"COMMIT", "manifest.json", "state.pt", ".metadata"} <= names


# ---- one process is enough from here on


def test_saving_never_changes_the_trajectory_also_at_step_0(tmp_path: Path) -> None:
    class SaveAlways(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "0")

        def on_before_zero_grad(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "mid")

    saved, plain = fit(callbacks=[SaveAlways()], precision="bf16-mixed"), fit(precision="bf16-mixed")
    assert saved.losses == plain.losses
    assert all(torch.equal(saved.weights[n], w) for n, w in plain.weights.items())
    resumed = fit(ckpt_path=tmp_path / "0", precision="bf16-mixed")
    assert resumed.losses == plain.losses


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: Tiny(width=31), r"embedding.weight: \(29, 12\) saved, \(31, 12\) here"),
        (lambda: Tiny(n_layers=4), r"layers.3.norm.weight: only in the model"),
        (lambda: Tiny(n_layers=2), r"layers.2.norm.weight: only in the checkpoint"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_naming_the_first_differing_tensors(tmp_path, other, message) -> None:
    fit(save=tmp_path / "x", max_steps=1)
    with pytest.raises(CheckpointError, match=message):
        fit(other, ckpt_path=tmp_path / "x")


def test_a_damaged_checkpoint_is_refused_before_a_weight_is_touched(tmp_path: Path) -> None:
    fit(save=tmp_path / "x", max_steps=1)
    file = tmp_path / "x" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    pl.seed_everything(7)
    module = Tiny()
    before = whole_weights(module)
    with pytest.raises(CheckpointError, match="changed since it was saved"):
        trainer().fit(module, Rows(2), Rows(1), ckpt_path=tmp_path / "x")
    assert all(torch.equal(before[n], w) for n, w in whole_weights(module).items())


def test_weights_only_of_fit_is_honoured(tmp_path: Path) -> None:
    class WithPath(Tiny):
        def __init__(self, root: Any = None) -> None:
            super().__init__()
            self.save_hyperparameters()

    def make() -> Tiny:
        return WithPath(pathlib.PurePosixPath("/data"))

    t = trainer(max_steps=1)
    t.fit(make(), Rows(2), Rows(1))
    with pytest.raises(ValueError, match="hyper_parameters"):
        t.save_checkpoint(tmp_path / "x")
    t = trainer(max_steps=1, strategy=FSDPCompileStrategy(allow_pickle=True))
    t.fit(make(), Rows(2), Rows(1))
    t.save_checkpoint(tmp_path / "x")
    with pytest.raises(CheckpointError, match="weights_only=False"):
        trainer().fit(make(), Rows(4), Rows(1), ckpt_path=tmp_path / "x")
    t = trainer()
    t.fit(make(), Rows(4), Rows(1), ckpt_path=tmp_path / "x", weights_only=False)
    assert t.global_step == 4


def test_model_checkpoint_keeps_the_best_and_the_last_and_removes_the_rest(tmp_path: Path) -> None:
    callback = ModelCheckpoint(
        tmp_path, save_top_k=2, save_last=True, every_n_train_steps=1, monitor="step", mode="max"
    )
    fit(callbacks=[callback], max_steps=5)
    assert {p.name for p in tmp_path.iterdir()} == {"epoch=0-step=4.ckpt", "epoch=0-step=5.ckpt", "last.ckpt"}
    found = latest_committed(tmp_path)
    assert found is not None
    assert torch.load(found / "state.pt")["global_step"] == 5
    resumed = fit(ckpt_path=tmp_path / "last.ckpt", max_steps=6)
    assert len(resumed.losses) == 1


def test_fit_then_validate_and_predict_with_the_same_trainer(tmp_path: Path) -> None:
    pl.seed_everything(7)
    module, recorder = Tiny(), Recorder()
    t = trainer(recorder, precision="bf16-mixed")
    t.fit(module, Rows(4), Rows(2, seed=1))
    t.save_checkpoint(tmp_path / "x")
    (metrics,) = t.validate(module, Rows(2, seed=1), ckpt_path=tmp_path / "x", verbose=False)
    assert metrics["val_loss"] == pytest.approx(recorder.run.val_losses[-1], abs=1e-6)
    predictions = t.predict(module, Rows(1), ckpt_path=tmp_path / "x")
    assert predictions[0].shape == (6, 6)
    fresh = trainer(precision="bf16-mixed")
    (metrics,) = fresh.validate(Tiny(), Rows(2, seed=1), ckpt_path=tmp_path / "x", verbose=False)
    assert metrics["val_loss"] == pytest.approx(recorder.run.val_losses[-1], abs=1e-6)


def test_a_missing_checkpoint_and_storage_options_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        fit(ckpt_path=tmp_path / "nowhere")
    t = trainer(max_steps=1)
    t.fit(Tiny(), Rows(1), Rows(1))
    with pytest.raises(ValueError, match="storage_options"):
        t.save_checkpoint(tmp_path / "x", storage_options={"a": 1})


def test_names_do_not_depend_on_a_compiled_submodule(tmp_path: Path) -> None:
    class Compiled(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.compile(self.norm, backend="eager")

    whole_run = fit(Compiled, save=tmp_path / "x", max_steps=2)
    assert any("_orig_mod" in name for name in whole_run.weights)
    resumed = fit(Tiny, ckpt_path=tmp_path / "x", max_steps=4)
    torch.testing.assert_close(resumed.losses, fit(Tiny).losses[2:])
    assert len(fit(Compiled, ckpt_path=tmp_path / "x", max_steps=4).losses) == 2
