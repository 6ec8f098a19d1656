"""Plain LightningModules around encoders: masked tokens, and classes of images.

As `CausalLM`, whose optimizers they share, they know nothing of the suite. `example_batch` is for whoever has to run a step without
data, as `fms-plan` does.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_fms.models.causal_lm import CausalLM


class MaskedLM(CausalLM):
    """Train `net` to predict tokens that it does not see (BERT, arXiv:1810.04805).

    Of the tokens that are chosen, 8 in 10 are masked, 1 is another token, and 1 is left. They are drawn anew for each micro-batch.

    Args:
        net: maps `input_ids`, int64 [B, T], to logits [B, T, V].
        optimizer, scheduler: as in `CausalLM`.
        share: of the tokens that are predicted, above 0 and at most 1; 0.15 as in BERT.
        mask_id: stands for a masked token; None is the last id of the vocabulary.

    Raises:
        ValueError: for another share.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[[Iterable[Any]], Optimizer],
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        share: float = 0.15,
        mask_id: int | None = None,
    ) -> None:
        super().__init__(net, optimizer, scheduler)
        if not 0 < share <= 1:
            raise ValueError(f"{share=}: give the share of tokens to predict, above 0 and at most 1")
        self.share, self.mask_id = share, mask_id

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Mean cross-entropy in nats over the chosen tokens of `input_ids`, in fp32; padding is none. 0 where none is chosen."""
        ids = batch["input_ids"]
        embedding = self.net.get_submodule("embedding")
        assert isinstance(embedding, nn.Embedding)
        vocabulary = embedding.num_embeddings
        mask_id = vocabulary - 1 if self.mask_id is None else self.mask_id
        draw = torch.rand(ids.shape, device=ids.device) / self.share  # below 1: chosen
        if "labels" in batch:  # of the next token; what has none ends a document, is padding, or fills up a batch
            draw = draw.masked_fill(batch["labels"] == -100, 1.0)
        seen = torch.where(draw < 0.8, mask_id, ids)
        seen = torch.where((draw >= 0.8) & (draw < 0.9), torch.randint_like(ids, vocabulary), seen)
        logits = self.net(seen)
        labels = torch.where(draw < 1, ids, -100)
        total = F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1), reduction="sum")
        return total / (draw < 1).sum().clamp(min=1)  # a mean over none would be NaN, and a batch may have few tokens


class ImageClassifier(CausalLM):
    """Train `net` to tell the class of an image.

    Batches are `{"image": float [B, 3, S, S], "label": int64 [B]}`.

    Args:
        net: maps images to logits [B, C]; its `image_size` is S, in pixels.
        optimizer, scheduler: as in `CausalLM`.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[[Iterable[Any]], Optimizer],
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    ) -> None:
        super().__init__(net, optimizer, scheduler)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Mean cross-entropy in nats, in fp32."""
        return F.cross_entropy(self.net(batch["image"]).float(), batch["label"])

    def example_batch(self, rows: int) -> dict[str, Tensor]:
        """A batch of black images."""
        size = self.net.image_size
        assert isinstance(size, int)
        return {"image": torch.zeros(rows, 3, size, size), "label": torch.zeros(rows, dtype=torch.int64)}
