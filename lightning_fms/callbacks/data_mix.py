"""What the run has really read: share of tokens and epochs, per source.

A mixture is a wish until it is counted. Shares are of the tokens trained on, not of those prefetched. Streams come to the end
of their part of a source one by one, so there is an epoch of the slowest stream, of the fastest, and a mean. Each rank knows
only its own, so adding them up may be a collective: every rank asks, at the same steps, and the first one logs.
"""

from typing import Any

import lightning as L

from lightning_fms.callbacks.cadence import StepClock, logging_due


class DataMix(L.Callback):
    """Log `data/<source>/share`, `target`, `tokens`, `epoch`, `epoch_min`, `epoch_max` from `trainer.datamodule.mix_report()`.

    Where the data module has `counters()`, these are logged too, as `data/padding`, `split`, `cut` and `skipped`.

    Both are called on all ranks on logging steps, and on no others, so they may communicate.

    Raises:
        ValueError: at the start of a fit whose data module has no `mix_report()`.
    """

    def __init__(self) -> None:
        self._clock = StepClock()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a run in which there would be nothing to log."""
        datamodule: Any = getattr(trainer, "datamodule", None)
        if stage == "fit" and not hasattr(datamodule, "mix_report"):
            raise ValueError(
                f"DataMix with the data module {type(datamodule).__name__}: it has no mix_report(); "
                "use RescalableDataModule, or leave the callback out"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin at the trainer's step."""
        self._clock.start(trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ask on every rank, log on the first, on logging steps."""
        if not (self._clock.ended_step(trainer) and logging_due(trainer)):
            return
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        for source, numbers in datamodule.mix_report().items():
            values = {f"data/{source}/{name}": float(number) for name, number in numbers.items()}
            pl_module.log_dict(values, on_step=True, on_epoch=False, rank_zero_only=True)
        if hasattr(datamodule, "counters"):
            counted = {f"data/{name}": float(number) for name, number in datamodule.counters().items()}
            pl_module.log_dict(counted, on_step=True, on_epoch=False, rank_zero_only=True)
