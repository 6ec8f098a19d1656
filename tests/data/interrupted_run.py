"""A training with worker processes that goes on until somebody ends it; `test_any_strategy` does.

Usage: python -m tests.data.interrupted_run FOLDER
"""

import sys

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lightning_fms.data import RescalableDataModule
from tests.data.fits import Bigram


class Ready(Callback):
    """Says when some steps are done."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        if trainer.global_step == 5:
            print("ready", flush=True)


def main(folder: str) -> None:
    trainer = pl.Trainer(
        max_steps=1_000_000, accelerator="cpu", callbacks=[Ready()], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = RescalableDataModule({"p": folder}, seq_len=24, global_batch_size=6, num_workers=2)
    trainer.fit(Bigram(), module)


if __name__ == "__main__":
    main(sys.argv[1])
