"""A checkpoint every so many optimizer steps, the newest few kept, and one of the last step.

`ModelCheckpoint` keyed to steps leaves out the end of a run unless the last step is a multiple, and its `save_last`
writes every checkpoint twice. How a checkpoint is written is the strategy's business, not decided here.
"""

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint


class StepCheckpoint(ModelCheckpoint):
    """`ModelCheckpoint` by optimizer step.

    Args:
        dirpath: folder of the checkpoints, each named `step-<N>`: a `=` in a name cannot be
            typed as a Hydra override. `None` = Lightning's choice, in the logger's folder.
        every_n_steps: optimizer steps between two checkpoints.
        keep: how many of the newest stay; -1 keeps all. 2, so that one is left if the newest turns out to be damaged.

    Raises:
        ValueError: for a number of steps below 1, or `keep` that is 0 or below -1.
    """

    def __init__(self, dirpath: str | None = None, every_n_steps: int = 1000, keep: int = 2) -> None:
        if every_n_steps < 1:
            raise ValueError(f"{every_n_steps=}: must be at least 1; to save nothing leave the callback out")
        if keep < -1 or keep == 0:
            raise ValueError(f"{keep=}: must be at least 1, or -1 to keep all")
        super().__init__(
            dirpath=dirpath,
            filename="step-{step}",
            auto_insert_metric_name=False,
            monitor="step",
            mode="max",
            save_top_k=keep,
            every_n_train_steps=every_n_steps,
        )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The step that a run begins at was saved by the run that made it."""
        super().on_train_start(trainer, pl_module)
        self._last_global_step_saved = trainer.global_step

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the last step if it was not one of those."""
        if not self._should_skip_saving_checkpoint(trainer):
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))
