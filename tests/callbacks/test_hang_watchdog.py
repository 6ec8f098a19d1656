"""What `HangWatchdog` watches: training and validation, and nothing else."""

import threading
from typing import Any

import pytest
import torch
from callback_runs import RandomTokens, tiny_module, trainer

from lightning_fms.callbacks import HangWatchdog
from lightning_fms.models import CausalLM


class Looks(CausalLM):
    """Notes in every step whether the watchdog's thread is there."""

    def _look(self) -> None:
        self.seen.add(any(thread.name == "hang-watchdog" for thread in threading.enumerate()))

    def training_step(self, *args: Any) -> Any:
        self._look()
        return super().training_step(*args)

    def validation_step(self, *args: Any) -> Any:
        self._look()
        return super().validation_step(*args)

    def test_step(self, *_: Any) -> torch.Tensor:
        self._look()
        return torch.zeros(1)

    predict_step = test_step


@pytest.mark.parametrize(("what", "watched"), [("fit", True), ("validate", True), ("test", False), ("predict", False)])
def test_only_training_and_validation_are_watched(tmp_path, what: str, watched: bool) -> None:
    module, data = tiny_module(), RandomTokens()
    module.__class__, module.seen = Looks, set()
    run = trainer(tmp_path, HangWatchdog(600.0), max_steps=1, limit_val_batches=1, num_sanity_val_steps=0)
    loaders = data.train_dataloader() if what in ("test", "predict") else None
    getattr(run, what)(module, loaders) if loaders is not None else getattr(run, what)(module, datamodule=data)
    assert module.seen == {watched}
    assert not any(thread.name == "hang-watchdog" for thread in threading.enumerate())
