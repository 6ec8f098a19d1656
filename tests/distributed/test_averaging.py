"""Lightning's `WeightAveraging`, unchanged, on shards: the average of one process, in checkpoints, on another number of ranks."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from gloo_world import once, run_world
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
from safetensors.torch import load_file
from tiny import ROWS, Recorder, Rows, Run, T, Tiny, V, fit, trainer, whole_weights
from torch import Tensor

from lightning_fms.callbacks import StepCheckpoint
from lightning_fms.commands.checkpoint import contents
from lightning_fms.distributed import FSDPCompileStrategy
from lightning_fms.distributed.export import export

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*treespec.*",
    "ignore:Be aware that when using `ckpt_path`, callbacks",
    "ignore:You're using the WeightAveraging callback, but loading a checkpoint outside",
)
SIZES = (1, 2, 3)
STEPS, VALIDATED_AT, SAVED_AT = 4, 3, 2


class OneBlock(Tiny):
    """Each block costs time in every run here, and shows nothing that the first does not."""

    def __init__(self, **options: Any) -> None:
        super().__init__(n_layers=1, **options)


class Counting(OneBlock):
    """Tied weights, a buffer that each step moves, dropout, and a name that no parameter has everywhere."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3, tied=True)
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.steps += 1
        return super().training_step(batch, batch_idx)

    def get_extra_state(self) -> Any:
        return torch.ones(2)

    def set_extra_state(self, state: Any) -> None:
        assert torch.equal(state, torch.ones(2))


class SaveAt(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == SAVED_AT:
            trainer.save_checkpoint(self.path)


class SaveInBackground(SaveAt):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == SAVED_AT:
            state = trainer._checkpoint_connector.dump_checkpoint(False)
            self.pending = trainer.strategy.save_in_background(state, self.path)  # type: ignore[attr-defined]

    def on_train_end(self, *_: Any) -> None:
        self.pending.result()


def averaged(path: Path | None = None, background: bool = False, **options: Any) -> Run:
    """Four steps, and a validation before the last one; the recorder behind the average sees the end weights."""
    saver = [] if path is None else [(SaveInBackground if background else SaveAt)(path)]
    callbacks = [EMAWeightAveraging(decay=0.7), *saver]
    strategy = options.pop("strategy", None)
    return fit(
        options.pop("make", OneBlock),
        callbacks=callbacks,
        max_steps=STEPS,
        val_check_interval=VALIDATED_AT,
        strategy=strategy,
        **options,
    )


def mesh() -> dict[str, Any]:
    return {"replicate": 2, "shard": 1} if os.environ.get("WORLD_SIZE") == "2" else {}


def on_tensor_ranks(folder: Path) -> Run:
    """Two tensor ranks, which read the same rows, save, and go on."""
    plan = {"embedding": "embedding_rowwise", "layers.*.up": "colwise", "layers.*.down": "rowwise"}
    rows = [Rows(8), Rows(2, seed=1)]
    for one, seed in zip(rows, (0, 1), strict=True):
        one._rows = torch.randint(0, V, (len(one), ROWS, T + 1), generator=torch.Generator().manual_seed(seed))
    recorder = Recorder()
    for steps, path in ((SAVED_AT, None), (STEPS, folder / "tensor")):
        pl.seed_everything(7, verbose=False)
        callbacks: list[pl.Callback] = [EMAWeightAveraging(decay=0.7), SaveAt(folder / "tensor")]
        strategy = FSDPCompileStrategy(tensor=2, tensor_plan=plan)
        t = trainer(recorder, strategy, callbacks=callbacks, max_steps=steps, val_check_interval=VALIDATED_AT)
        t.fit(OneBlock(), *rows, ckpt_path=path)
    return recorder.run


def runs_of(folder: Path) -> dict[str, Run]:
    size = os.environ.get("WORLD_SIZE", "1")
    form = FSDPCompileStrategy(checkpoint_format="consolidated")
    return {
        "fp32": averaged(folder / size),
        "dropout": averaged(folder / f"{size}-dropout", background=True, make=Counting, precision="bf16-mixed"),
        "file": averaged(folder / f"{size}-file", strategy=form),
        "replicated": averaged(strategy=FSDPCompileStrategy(**mesh())),
    }


def resumed(folder: Path) -> dict[str, Run]:
    """On this number of ranks from each number's checkpoint, and from this one's with everything that can drift."""
    size = os.environ.get("WORLD_SIZE", "1")
    return {
        **{f"{other}": averaged(ckpt_path=folder / f"{other}") for other in SIZES},
        **{f"{other}-file": averaged(ckpt_path=folder / f"{other}-file") for other in SIZES},
        "dropout": averaged(ckpt_path=folder / f"{size}-dropout", make=Counting, precision="bf16-mixed"),
    }


def in_worlds(folder: Path) -> dict[str, Any]:
    options: dict[str, Any] = {"strategy": "auto"}
    saved = {1: runs_of(folder)}
    saved |= {size: run_world(size, runs_of, folder / f"w{size}", folder)[0] for size in SIZES[1:]}
    again = {1: resumed(folder)}
    again |= {size: run_world(size, resumed, folder / f"r{size}", folder)[0] for size in SIZES[1:]}
    return {"stock": averaged(**options), "saved": saved, "resumed": again, "folder": folder}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return once(tmp_path_factory, "averaging", in_worlds)


def same(run: Run, other: Run, steps: int, tolerance: float = 1e-6) -> bool:
    """Whether the last steps' losses, the last validation (on the average), and the end weights (the average) are the same."""
    torch.testing.assert_close(run.losses[-steps:], other.losses[-steps:], rtol=0, atol=tolerance)
    torch.testing.assert_close(run.val_losses[-1], other.val_losses[-1], rtol=0, atol=tolerance)
    torch.testing.assert_close(run.weights, other.weights, rtol=0, atol=tolerance)
    return True


@pytest.mark.parametrize("size", SIZES)
def test_the_average_of_shards_is_stock_lightnings_on_one_process(worlds: dict[str, Any], size: int) -> None:
    for name in ("fp32", "file", "replicated"):
        assert same(worlds["saved"][size][name], worlds["stock"], STEPS), name
    assert worlds["stock"].losses[-1] != pytest.approx(worlds["stock"].val_losses[-1], abs=1e-4)


def test_the_average_of_matrices_split_between_tensor_ranks(worlds: dict[str, Any], tmp_path: Path) -> None:
    assert same(run_world(2, on_tensor_ranks, tmp_path, tmp_path)[0], worlds["stock"], STEPS)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("before", SIZES)
def test_average_and_weights_go_on_on_any_number_of_ranks(worlds: dict[str, Any], before: int, size: int) -> None:
    for name in (f"{before}", f"{before}-file"):
        assert same(worlds["resumed"][size][name], worlds["stock"], STEPS - SAVED_AT), name


@pytest.mark.parametrize("size", SIZES)
def test_a_resume_on_as_many_ranks_is_the_uninterrupted_run_to_the_bit(worlds: dict[str, Any], size: int) -> None:
    run, whole = worlds["resumed"][size]["dropout"], worlds["saved"][size]["dropout"]
    assert run.losses == whole.losses[SAVED_AT:]
    assert run.val_losses[-1] == whole.val_losses[-1]
    assert all(torch.equal(run.weights[name], tensor) for name, tensor in whole.weights.items() if tensor.ndim)


def test_whoever_reads_weights_gets_the_average(worlds: dict[str, Any], tmp_path: Path) -> None:
    path = worlds["folder"] / "3"
    module, stopped = OneBlock(), fit(OneBlock, callbacks=[EMAWeightAveraging(decay=0.7)], max_steps=SAVED_AT)
    trained = fit(OneBlock, max_steps=SAVED_AT)
    assert not torch.allclose(stopped.weights["head.weight"], trained.weights["head.weight"], atol=1e-4)
    trainer().validate(module, Rows(2, seed=1), ckpt_path=path, verbose=False)
    torch.testing.assert_close(whole_weights(module), stopped.weights, rtol=0, atol=1e-6)
    export(path, tmp_path / "out")
    torch.testing.assert_close(load_file(tmp_path / "out" / "model.safetensors"), stopped.weights, rtol=0, atol=1e-6)
    assert contents(path)["averaged"] == SAVED_AT


def test_a_run_without_an_average_goes_on_with_one(tmp_path: Path) -> None:
    fit(OneBlock, save=tmp_path / "x", max_steps=1)
    with pytest.warns(UserWarning, match="not created with WeightAveraging"):
        run = averaged(ckpt_path=tmp_path / "x")
    assert len(run.losses) == STEPS - 1


@pytest.mark.parametrize("form", ["sharded", "consolidated"])
def test_without_the_callback_a_run_goes_on_from_the_weights_of_training(tmp_path: Path, form: Any) -> None:
    averaged(tmp_path / "x", strategy=FSDPCompileStrategy(checkpoint_format=form), make=Counting)
    plain = fit(Counting, max_steps=STEPS)
    again = fit(Counting, max_steps=STEPS, ckpt_path=tmp_path / "x")
    assert again.losses == plain.losses[SAVED_AT:]
    assert all(torch.equal(again.weights[name], weight) for name, weight in plain.weights.items())


class Late(OneBlock):
    """Built on no device, which Lightning's callback alone cannot copy."""

    def __init__(self) -> None:
        with torch.device("meta"):
            super().__init__()
        self.scale = torch.ones(1)


def test_a_module_without_memory_and_a_second_use_of_the_callback() -> None:
    callback = EMAWeightAveraging(decay=0.5)
    t = trainer(callbacks=[callback], max_steps=2)
    module = Late()
    t.fit(module, Rows(2), Rows(1))
    assert "setup" not in vars(callback)
    t.validate(module, Rows(1), verbose=False)
    assert callback._average_model is None, "the average of a fit that is over"


def test_what_cannot_be_averaged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="EMAWeightAveraging and WeightAveraging both average weights"):
        fit(callbacks=[EMAWeightAveraging(), WeightAveraging()])
    assert run_world(2, elsewhere, tmp_path) == [True, True]


def elsewhere() -> bool:
    with pytest.raises(ValueError, match=r"the weights are sharded on cpu.*leave device out"):
        fit(callbacks=[EMAWeightAveraging(device="meta")])
    return True


class StopAt(pl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == self.step


def test_a_run_that_is_made_longer_goes_on_from_its_weights_and_not_from_the_average(tmp_path: Path) -> None:
    def run(steps: int, folder: Path, stop: int = -1, **options: Any) -> Run:
        callbacks = [EMAWeightAveraging(decay=0.7), StopAt(stop), StepCheckpoint(folder, every_n_steps=100)]
        return fit(callbacks=callbacks, max_steps=steps, enable_checkpointing=True, **options)

    whole = run(4, tmp_path / "whole")
    for limit in ({"steps": 2}, {"steps": 4, "stop": 2}, {"steps": -1, "max_epochs": 1, "limit_train_batches": 2}):
        folder = tmp_path / str(len(limit))
        run(folder=folder, **limit)
        longer = run(4, folder, ckpt_path=folder / "step-2.ckpt")
        assert longer.losses[0] == whole.losses[2], limit
