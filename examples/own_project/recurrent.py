"""A module that nobody else has: it imports nothing of the suite."""

import lightning as L
import torch.nn.functional as F
from torch import nn


class Recurrent(L.LightningModule):
    """Letters through a recurrent network.

    `optimizer` and `scheduler` are functions, of the parameters and of the optimizer: that is what `_partial_: true` makes.
    """

    def __init__(self, width: int, layers: int, vocab_size: int, optimizer, scheduler) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)
        self.net = nn.GRU(width, width, layers, batch_first=True)
        self.make_optimizer, self.make_scheduler = optimizer, scheduler

    def loss(self, batch):
        logits = self.head(self.net(self.embed(batch["input_ids"]))[0])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)  # over all ranks, not the first alone

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        scheduler = {"scheduler": self.make_scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class LossTarget(L.Callback):
    """Stop when the loss is low enough."""

    def __init__(self, loss: float) -> None:
        self.loss = loss

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop |= trainer.callback_metrics.get("loss", self.loss + 1) < self.loss
