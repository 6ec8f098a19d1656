"""Short trainings through Lightning's Trainer that write down what they saw."""

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.strategies import DDPStrategy

from lightning_fms.data import RescalableDataModule
from lightning_fms.distributed import FSDPCompileStrategy


class Bigram(pl.LightningModule):
    """The plainest user module: float64, so that summation order does not hide a wrong weight."""

    def __init__(self, ask_for_steps: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = torch.nn.Embedding(257, 8, dtype=torch.float64)
        self.head = torch.nn.Linear(8, 257, dtype=torch.float64)
        self.ask_for_steps = ask_for_steps

    def loss(self, batch):
        return F.cross_entropy(self.head(self.embed(batch["input_ids"])).flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        if self.ask_for_steps:
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@dataclass
class Record:
    """What one rank saw: rows, loss and gradient of every step, validation loss by the steps before it."""

    rows: dict[int, list[str]] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    gradients: dict[int, np.ndarray] = field(default_factory=dict)
    val_losses: dict[int, float] = field(default_factory=dict)


class Ledger(Callback):
    """Fills a record; raises `error` before micro-batch `fail_at`."""

    def __init__(self, fail_at: int | None = None, error: BaseException | None = None) -> None:
        self.record = Record()
        self.fail_at, self.error = fail_at, error or RuntimeError("told to fail")
        self.micro_batches = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.micro_batches == self.fail_at:
            raise self.error
        self.micro_batches += 1
        rows = self.record.rows.setdefault(trainer.global_step, [])
        for index in torch.nonzero(batch["row_valid"]).flatten().tolist():
            content = b"".join(batch[name][index].numpy().tobytes() for name in ("input_ids", "labels", "position_ids"))
            rows.append(hashlib.blake2b(content, digest_size=8).hexdigest())

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        gradients = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in pl_module.parameters()]
        self.record.gradients[trainer.global_step] = torch.cat([g.flatten() for g in gradients]).numpy().copy()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if "loss" in trainer.callback_metrics and not trainer.fit_loop._should_accumulate():
            self.record.losses[trainer.global_step - 1] = float(trainer.callback_metrics["loss"])

    def on_validation_end(self, trainer, pl_module):
        self.record.val_losses[trainer.global_step] = float(trainer.callback_metrics["val_loss"])


def fit(
    data: dict, strategy: str, max_steps: int, resume: Path | None = None, save: Path | None = None,
    callbacks: tuple = (), ledger: Ledger | None = None, **module_options: Any,
) -> Record:  # fmt: skip
    """Train on every rank of the surrounding world, save at the end, and return the rank's record."""
    ledger = ledger or Ledger()
    strategies = {"one device": "auto", "ddp": DDPStrategy(process_group_backend="gloo"), "fsdp": FSDPCompileStrategy()}
    trainer = pl.Trainer(
        max_steps=max_steps, accelerator="cpu", strategy=strategies[strategy], callbacks=[ledger, *callbacks],
        devices=1 if strategy == "one device" else dist_size(), log_every_n_steps=1, num_sanity_val_steps=0, logger=False,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Bigram(**module_options), RescalableDataModule(**data), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    if dist.is_initialized():
        dist.destroy_process_group()
    return ledger.record


def dist_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def merged(records: list[Record]) -> dict[int, list[str]]:
    """Return the rows of every step over all ranks, sorted."""
    steps = sorted({step for record in records for step in record.rows})
    return {step: sorted(row for record in records for row in record.rows.get(step, [])) for step in steps}
