"""What ties the loader to Lightning's loops, whatever the strategy.

Three things cannot be seen from a data loader. *How much a micro-batch counts*: ranks and micro-batches hold different
numbers of targets, and the mean of means is not the mean; so each micro-batch's gradient is scaled by
`s = R * A * n / N` (R replicas, A micro-batches a step, n its targets, N the step's over all ranks), which makes the step
that of one process with the whole batch. Lightning has divided the loss by A before `on_before_backward`, strategies divide
the gradients by R, and a hook on the loss scales what flows back without touching what the user logs. *When a batch has
been trained*: the state moves on when the optimizer step is done, so prefetched batches and half-done accumulations are read
again after a resume. *What the loops count*: they count micro-batches, whose number a step changes with the number of ranks.

This callback stands at the front of `trainer.callbacks`, so that checkpoint callbacks save a state that includes the
step they follow.
"""

from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_fms.data.ahead import Pace
from lightning_fms.data.feed import Feed
from lightning_fms.data.loader import MicroBatch, StreamLoader
from lightning_fms.data.target_count import TargetCount

LossWeight = Literal["tokens", "rows", "none"]


class LoaderLink(Callback):
    """Put by `RescalableDataModule` at the front of `trainer.callbacks`; nothing to configure.

    Logs `loss`, the mean over all targets of the global batch (`loss_weight="rows"`: over all rows of the rows' losses), when
    Lightning's logging is due, and at the end. The user's loss must be a mean over the labels that are not -100.

    Args:
        loader: The rank's loader.
        feed: What Lightning iterates for training.
        replicas: R, number of data ranks.
        loss_weight: What a micro-batch's gradient counts for: its targets, its rows, or nothing (plain mean of means).
    """

    def __init__(self, loader: StreamLoader, feed: Feed, replicas: int, loss_weight: LossWeight) -> None:
        self.loader, self.feed, self.replicas, self.loss_weight = loader, feed, replicas, loss_weight
        self.broken = False
        self.resumed_accumulate: int | None = None
        self.val_feed: Feed | None = None
        self._micro: MicroBatch | None = None
        self._pace = Pace() if feed.pin else None
        self._counts: TargetCount | None = None
        self._total: int | None = None
        self._loss: Tensor | None = None

    # -- training ------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Make ready to count targets; after a resume, express the loops' counters in micro-batches of this number of ranks."""
        if self.loss_weight == "tokens" and not self.loader.packing.full and self.replicas > 1:
            self._counts = TargetCount(copies=trainer.world_size // self.replicas)
        if self.resumed_accumulate is None:
            return
        epoch_loop = trainer.fit_loop.epoch_loop
        # A save inside `on_train_batch_end` has its batch not yet completed, which Lightning makes up for; one after an
        # exception may have begun a batch that will come again.
        back = 1 if epoch_loop.restarted_on_train_batch_end else 0
        for counts in (epoch_loop.batch_progress.current, epoch_loop.batch_progress.total):
            ready = counts.ready // self.resumed_accumulate * self.loader.slots.accumulate
            vars(counts).update(ready=ready, started=ready, processed=ready, completed=ready - back)
        self.resumed_accumulate = None

    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Find out what the micro-batch counts for."""
        if self._pace is not None:
            self._pace.begin()
        first = self._micro is None or self._micro.last
        self._micro = self.feed.delivered.popleft()
        if first:
            self._send_count(self._micro)
            self._total = self._loss = None

    def on_before_backward(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", loss: Tensor) -> None:
        """Scale the gradient of the micro-batch, and add its part to the logged loss."""
        assert self._micro is not None
        accumulate = self.loader.slots.accumulate if pl_module.automatic_optimization else 1
        share = self._share(self._micro)
        scaler = getattr(trainer.precision_plugin, "scaler", None)  # fp16: the loss arrives multiplied
        part = loss.detach() * (accumulate / (scaler.get_scale() if scaler is not None else 1.0)) * share
        self._loss = part if self._loss is None else self._loss + part
        if loss.requires_grad:
            scale = self.replicas * accumulate * share
            loss.register_hook(lambda gradient: gradient * scale)
        self._look_ahead(trainer)  # the device has the forward pass to do, and then the backward pass

    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the step as trained once its last micro-batch is done, and log its loss when that is due."""
        assert self._micro is not None
        if not self._micro.last:
            return
        self._look_ahead(trainer)  # where manual optimization made no backward pass
        self.loader.apply(self._micro.step)
        # The last step's loss is what a run came to, whether or not it is one of those that are logged.
        due = trainer._logger_connector.should_update_logs or trainer.global_step == trainer.max_steps
        if self._loss is not None and due:
            pl_module.log("loss", self._sum_over_ranks(trainer, self._loss), prog_bar=True)

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Drop the count of the step that will not come."""
        if self._counts is not None:
            self._counts.close()
            self._counts = None

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """From here on ranks may be at different steps, so the state can no longer be gathered; both feeds end."""
        self.broken = True
        for feed in (self.feed, self.val_feed):
            if feed is not None:
                feed.close()  # Lightning calls no `teardown` now

    # -- validation ----------------------------------------------------------------------------------------------------

    def on_validation_batch_start(
        self,
        trainer: "pl.Trainer",
        pl_module: "pl.LightningModule",
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Weigh what the user logs by the micro-batch's targets, so that its epoch mean is the mean over tokens."""
        if self.val_feed is not None and self.val_feed.delivered:
            results = trainer._results
            assert results is not None
            # Lightning averages the counts over ranks in whole numbers: times R, nothing is cut off.
            results.batch_size = self.val_feed.delivered.popleft().targets * self.replicas

    # -- counting ------------------------------------------------------------------------------------------------------

    def _share(self, micro: MicroBatch) -> float | Tensor:
        """Return n / N, the part of the step's loss that a micro-batch makes."""
        if self.loss_weight == "none":  # a mean of means; but a row that is only shown, and comes again, counts nothing
            return 1 / (self.replicas * self.loader.slots.accumulate) if micro.rows else 0.0
        if self._total is None:
            self._total = self._count_step(micro)
        return (micro.rows if self.loss_weight == "rows" else micro.targets) / self._total

    def _count_step(self, micro: MicroBatch) -> int:
        """Return N: known from row counts where every row is full, otherwise summed over the ranks, once a step."""
        if self.loss_weight == "rows":
            return self.loader.slots.batch
        if self.loader.packing.full and self.loader.seq_len is not None:
            return self.loader.slots.batch * self.loader.seq_len
        if self._counts is None:
            return max(1, self.loader.packing.targets(micro.step.rows))
        return max(1, self._counts.wait(micro.step.first_row))

    def _send_count(self, micro: MicroBatch | None) -> None:
        if self._counts is not None and micro is not None:
            self._counts.start(micro.step.first_row, self.loader.packing.targets(micro.step.rows))

    def _look_ahead(self, trainer: "pl.Trainer") -> None:
        """During a step's last micro-batch, load the next one and send off its step's count."""
        if self._counts is not None and self._micro is not None and self._micro.last:
            # Named as Lightning names its own fetch.
            with vars(trainer)["profiler"].profile(f"[{type(self).__name__}].train_dataloader_next"):
                ahead = self.feed.look_ahead()
            self._send_count(ahead)

    def _sum_over_ranks(self, trainer: "pl.Trainer", value: Tensor) -> Tensor:
        if self.replicas == 1:
            return value
        total = trainer.strategy.reduce(value.clone(), reduce_op="sum")
        assert isinstance(total, Tensor)
        return total / (trainer.world_size // self.replicas)  # ranks that share a data rank count once
