"""What the ranks agree upon in a fit ends with it, well or not."""

from typing import Any

import lightning as L
import pytest
from callback_runs import RandomTokens, tiny_module, trainer

from lightning_fms.callbacks import Resilience, StepCheckpoint
from lightning_fms.callbacks.agreement import Agreement, agreement_of


class FailsOnce(L.Callback):
    """Raises in the first fit, and keeps the agreement of each."""

    def __init__(self) -> None:
        self.seen: list[Agreement] = []

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        agreement = agreement_of(trainer)
        if agreement not in self.seen:
            self.seen.append(agreement)
        if len(self.seen) == 1 and trainer.global_step == 2:
            raise RuntimeError("told to fail")


def test_a_fit_after_one_that_failed_begins_with_an_agreement_of_its_own(tmp_path) -> None:
    fails = FailsOnce()
    run = trainer(tmp_path, fails, StepCheckpoint(tmp_path / "c"), Resilience(), enable_checkpointing=True)
    module, data = tiny_module(), RandomTokens()
    with pytest.raises(RuntimeError, match="told to fail"):
        run.fit(module, datamodule=data)
    run.fit(module, datamodule=data)
    assert len(fails.seen) == 2
    assert run.global_step == 6
