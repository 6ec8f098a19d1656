"""What counts as waiting for data."""

import io
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from callback_runs import RandomTokens, tiny_module, trainer
from lightning.pytorch.profilers import PassThroughProfiler
from torch.utils.data import DataLoader, Dataset

from lightning_fms.callbacks import GoodputLog, Progress, Straggler, data_clock
from lightning_fms.callbacks.data_clock import DataClock, data_wait_of

FETCHING, TRAINING, VALIDATING = 1.0, 10.0, 100.0


class Watch:
    """Time that only passes where a test says so."""

    now = 0.0

    def pass_(self, seconds: float) -> None:
        self.now += seconds


class Slow(Dataset):
    def __init__(self, watch: Watch, seconds: float) -> None:
        self.watch, self.seconds = watch, seconds

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        self.watch.pass_(self.seconds)
        return torch.ones(1)


class Module(L.LightningModule):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch, self.layer = watch, torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.watch.pass_(TRAINING)
        return self.layer(batch).sum()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.watch.pass_(VALIDATING)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.watch.pass_(TRAINING)  # a device that is behind lets the host wait here
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Reader(L.Callback):
    """Two readers, of which one asks at each step."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.each, self.all, self.steps = data_wait_of(trainer), data_wait_of(trainer), []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.steps.append(self.each.take())


def test_only_the_fetches_of_training_batches_count(monkeypatch) -> None:
    watch, reader = Watch(), Reader()
    monkeypatch.setattr(data_clock, "time", SimpleNamespace(monotonic=lambda: watch.now))
    run = L.Trainer(
        accelerator="cpu", max_epochs=2, callbacks=[reader], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    run.fit(Module(watch), DataLoader(Slow(watch, FETCHING)), DataLoader(Slow(watch, FETCHING)))
    assert reader.steps == [FETCHING] * 8
    assert reader.all.take() == 8 * FETCHING
    assert reader.all.take() == 0


class Listened(L.Callback):
    """Notes whether somebody listens in a step, and may fail there."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.in_step = fails, False

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.in_step = {"start", "stop"} <= set(vars(vars(trainer)["profiler"]))
        if self.fails:
            raise RuntimeError("told to fail")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", [GoodputLog, Progress, Straggler])
def test_behind_a_fit_nothing_listens_to_the_profiler(tmp_path: Path, kind: type[L.Callback], fails: bool) -> None:
    options: dict[str, Any] = {GoodputLog: {"dirpath": tmp_path}, Progress: {"stream": io.StringIO()}}.get(kind, {})
    listened = Listened(fails)
    run = trainer(tmp_path, kind(**options), listened, max_steps=1)
    with pytest.raises(RuntimeError, match="told to fail") if fails else nullcontext():
        run.fit(tiny_module(), datamodule=RandomTokens())
    assert listened.in_step
    assert not {"start", "stop"} & set(vars(vars(run)["profiler"]))


def test_listeners_of_others_stay() -> None:
    profiler: Any = PassThroughProfiler()
    profiler.start = theirs = lambda action_name: None
    clock = DataClock(profiler)
    clock.end()
    assert profiler.start is theirs
    clock, clocks = DataClock(profiler), profiler.start
    profiler.start = behind = lambda action_name: clocks(action_name)
    clock.end()
    assert profiler.start is behind
