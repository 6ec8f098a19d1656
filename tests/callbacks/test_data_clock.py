"""What counts as waiting for data."""

from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_fms.callbacks import data_clock
from lightning_fms.callbacks.data_clock import data_wait_of

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec", "ignore:.*does not have many workers")

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
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=2, callbacks=[reader], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(watch), DataLoader(Slow(watch, FETCHING)), DataLoader(Slow(watch, FETCHING)))
    assert reader.steps == [FETCHING] * 8
    assert reader.all.take() == 8 * FETCHING
    assert reader.all.take() == 0
