"""A plain LightningModule for next-token prediction: what a user of the suite would write.

Nothing here knows of the suite: no base class, no import, no sharding, casting, kernel or checkpoint code. The plugins
must work on this module as it stands, and the tests hold them to it.

Shapes: B rows, T tokens, V vocabulary.
"""

from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class CausalLM(L.LightningModule):
    """Train `net` to predict the next token.

    Args:
        net: maps `input_ids`, int64 [B, T], to logits [B, T, V].
        optimizer: makes the optimizer from parameter groups, e.g. `functools.partial(torch.optim.AdamW, lr=3e-4)`.
        scheduler: makes a learning-rate scheduler from the optimizer; it is stepped once per optimizer step. `None` =
            constant rate.
        mask_documents: whether a token sees its own document only. `net` then gets `position_ids` and `document_ids` of the
            batch, int64 [B, T], as well. By default documents that share a row see each other, at the positions of the row.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[[Iterable[Any]], Optimizer],
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        mask_documents: bool = False,
    ) -> None:
        super().__init__()
        self.net, self.mask_documents = net, mask_documents
        self.make_optimizer, self.make_scheduler = optimizer, scheduler

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Logits [B, T, V]."""
        return self.net(input_ids, position_ids)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Mean cross-entropy in nats over the labels that are not -100, in fp32 whatever the logits are."""
        of_documents = (batch["position_ids"], batch["document_ids"]) if self.mask_documents else ()
        logits = self.net(batch["input_ids"], *of_documents)
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), batch["labels"].view(-1))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Loss of one micro-batch."""
        return self.loss(batch)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log `val_loss`, averaged over the validation set."""
        self.log("val_loss", self.loss(batch), sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> Any:
        """The optimizer and its scheduler, stepped every optimizer step.

        Only matrices decay: shrinking the gain of a norm moves the function without regularising it.
        """
        parameters = [p for p in self.parameters() if p.requires_grad]
        matrices = [p for p in parameters if p.ndim >= 2]
        vectors = [p for p in parameters if p.ndim < 2]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = self.make_optimizer([group for group in groups if group["params"]])
        if self.make_scheduler is None:
            return optimizer
        scheduler = self.make_scheduler(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
