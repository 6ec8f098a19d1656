"""The position in the data, every so many steps: what makes it cheap to ask later which documents a step has seen.

Checkpoints hold the same state but are few, because they are large. This one is kilobytes.
"""

import os
from typing import Any

import lightning as L
import torch

from lightning_fms.callbacks.cadence import StepClock
from lightning_fms.local_paths import local_path


class DataTrail(L.Callback):
    """Write the data module's state to `dirpath/step-<N>.pt` every `every_n_steps` optimizer steps, the first one included.

    The state is gathered on all ranks at these steps; rank 0 writes it, aside and renamed, so that a file is whole or not there.

    Args:
        dirpath: folder of the files.
        every_n_steps: optimizer steps between two of them: an audit makes the rows of at most as many steps again.

    Raises:
        ValueError: for a number of steps below 1; at the start of a fit whose data module has no state.
    """

    def __init__(self, dirpath: str, every_n_steps: int = 100) -> None:
        if every_n_steps < 1:
            raise ValueError(f"{every_n_steps=}: must be at least 1")
        self.folder, self.every_n_steps = local_path(dirpath, "DataTrail"), every_n_steps
        self._clock = StepClock()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep the state that the run begins with."""
        datamodule: Any = getattr(trainer, "datamodule", None)
        if not hasattr(datamodule, "mix_report"):
            raise ValueError(
                f"DataTrail with the data module {type(datamodule).__name__}: it has no position to keep; "
                "use RescalableDataModule, or leave the callback out"
            )
        self._clock.start(trainer)
        self._keep(trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the state of a due step."""
        if self._clock.ended_step(trainer) and trainer.global_step % self.every_n_steps == 0:
            self._keep(trainer)

    def _keep(self, trainer: L.Trainer) -> None:
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        state = datamodule.state_dict()
        if not trainer.is_global_zero:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        aside = self.folder / f".step-{trainer.global_step}.{os.getpid()}"
        torch.save(state, aside)
        aside.rename(self.folder / f"step-{trainer.global_step}.pt")
