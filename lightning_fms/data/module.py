"""The data module: the loader inside a Lightning `Trainer`, under any strategy.

It takes the data rank from the strategy, tells the trainer how many micro-batches make a step, puts a `LoaderLink` in front
of the callbacks, and keeps one state for all ranks in the checkpoint.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_fms.data.audit import loader_at
from lightning_fms.data.cursor import State, as_written_now, merge_states
from lightning_fms.data.feed import Feed, steps_of_one_pass
from lightning_fms.data.items import Reader
from lightning_fms.data.left_out import OnError
from lightning_fms.data.link import LoaderLink, LossWeight
from lightning_fms.data.loader import StreamLoader
from lightning_fms.data.report import describe, lost_documents, merged_mix
from lightning_fms.data.tokenizer import Tokenizer, open_tokenizer
from lightning_fms.data.whole_numbers import check_positive

_log = logging.getLogger(__name__)


class RescalableDataModule(pl.LightningDataModule):
    """Stateful streaming data that goes on with any number of ranks.

    The content of every global batch is the same on any number of ranks, workers and micro-batches. A checkpoint of one
    run resumes on another number of ranks through `Trainer.fit(ckpt_path=...)`: nothing is read twice, nothing skipped.

    Args:
        sources: Training sources; see `StreamLoader`, which takes the further `loader_options`.
        seq_len: T, tokens of a row, 2^24 at most; `None` where `packing` is `"none"`.
        global_batch_size: B, rows of a step over all ranks and micro-batches.
        micro_batch_size: Most rows that fit on a device at once; `None` takes all rows of a rank. The trainer's
            `accumulate_grad_batches` follows from it.
        tokenizer: `"bytes"`, a path, or a `Tokenizer`.
        val_sources: Validation sources, in the form of `sources`; `None` does not validate.
        val_steps: Global batches of a validation: the same rows every time, at one `global_batch_size` and `val_num_streams`.
            They are produced in this process, without workers.
        val_one_pass: Whether a validation reads every document of `val_sources` once instead. The ranks count their rows when the
            run starts, and those with fewer end with rows that count nothing, so that all take equal steps.
        val_num_streams: Logical streams of the validation; `None` is the run's `num_streams`. Where it is set, validations read
            the same line of rows whatever the `global_batch_size`, which then only says how much of it.
        val_every_n_steps: Optimizer steps between validations; `None` leaves the trainer's setting.
        steps_per_epoch: Optimizer steps of what Lightning calls an epoch; `None` is the trainer's `max_steps`.
        loss_weight: `"tokens"`: a micro-batch's gradient counts by its labels that are not -100, so that a step equals that
            of one process with the whole batch. `"rows"`: by its rows. `"none"`: the loss is left as it is.
        rank: Data rank, where no strategy says it.
        world_size: Number of data ranks, where no strategy says it.
        mixture, packing, seed, num_workers, num_streams, shuffle_window, eos, bos, mask_first, max_document_tokens,
            max_epochs, multiprocessing_context, reader, on_error, quarantine, listings: See `StreamLoader`.

    Raises:
        ValueError: If an argument is impossible, or does not agree with the trainer's.
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        seq_len: int | None,
        global_batch_size: int,
        micro_batch_size: int | None = None,
        tokenizer: Any = "bytes",
        mixture: Mapping | None = None,
        packing: Literal["concat", "best_fit", "none"] = "concat",
        seed: int = 0,
        num_workers: int = 0,
        num_streams: int | None = None,
        shuffle_window: int = 4096,
        eos: bool = True,
        bos: bool = False,
        mask_first: bool = False,
        max_document_tokens: int | None = None,
        max_epochs: Mapping[str, int] | None = None,
        multiprocessing_context: str | None = None,
        reader: Reader | None = None,
        on_error: OnError = "raise",
        quarantine: str | Path | None = None,
        listings: str | Path | None = None,
        val_sources: Mapping[str, Any] | None = None,
        val_steps: int = 8,
        val_one_pass: bool = False,
        val_num_streams: int | None = None,
        val_every_n_steps: int | None = None,
        steps_per_epoch: int | None = None,
        loss_weight: LossWeight = "tokens",
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__()
        check_positive(val_steps=val_steps, val_every_n_steps=val_every_n_steps, steps_per_epoch=steps_per_epoch)
        if val_sources is None and (val_one_pass or val_num_streams is not None):
            raise ValueError(f"{val_one_pass=} and {val_num_streams=} do nothing without val_sources; give them too")
        if loss_weight not in ("tokens", "rows", "none"):
            raise ValueError(f"loss_weight={loss_weight!r} must be 'tokens', 'rows' or 'none'")
        self.val_steps, self.val_every_n_steps, self.steps_per_epoch = val_steps, val_every_n_steps, steps_per_epoch
        self.loss_weight, self._val_sources, self.val_one_pass = loss_weight, val_sources, val_one_pass
        self._data_rank: dict[str, Any] = {"rank": rank, "world_size": world_size}
        self.tokenizer: Tokenizer = open_tokenizer(tokenizer)
        self._everywhere: dict[str, Any] = {
            "seq_len": seq_len, "global_batch_size": global_batch_size, "micro_batch_size": micro_batch_size,
            "tokenizer": self.tokenizer, "packing": packing, "seed": seed, "num_streams": num_streams,
            "shuffle_window": shuffle_window, "reader": reader, "on_error": on_error, "quarantine": quarantine,
            "eos": eos, "bos": bos, "mask_first": mask_first, "max_document_tokens": max_document_tokens,
        }  # fmt: skip
        self._training: dict[str, Any] = {
            "sources": sources, "mixture": mixture, "num_workers": num_workers,
            "max_epochs": max_epochs, "multiprocessing_context": multiprocessing_context, "listings": listings,
        }  # fmt: skip
        streams = {"num_streams": val_num_streams} if val_num_streams is not None else {}
        self._validation: dict[str, Any] = {**self._everywhere, **streams, "one_pass": val_one_pass}
        self.loader: StreamLoader | None = None
        self._feed: Feed | None = None
        self._val_feed: Feed | None = None
        self._link: LoaderLink | None = None
        self._served: pl.Trainer | None = None
        self._fitting = False

    # -- Lightning's hooks ---------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Build the loaders for the trainer's data rank, and tell the trainer what follows from them."""
        trainer = self.trainer
        if trainer is not None:
            kwargs = trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
            self._data_rank = {"rank": kwargs["rank"], "world_size": kwargs["num_replicas"]}
        if self._val_sources is not None:
            self._val_feed = self._make_val_feed(self._val_sources)
        elif trainer is not None and stage == "fit":
            trainer.limit_val_batches = 0
        goes_on = self._served is trainer and trainer is not None and trainer.global_step > 0
        if stage == "fit" and not (goes_on and self.loader is not None):
            self.loader = StreamLoader(**self._training, **self._data_rank, **self._everywhere)
        self._served, self._fitting = trainer, stage == "fit"
        if trainer is not None:
            self._join(trainer, stage)

    def _make_val_feed(self, sources: Mapping[str, Any]) -> Feed:
        try:
            loader = StreamLoader(sources, **self._data_rank, **self._validation)
            steps = self._steps_of_one_pass(sources, loader) if self.val_one_pass else self.val_steps
        except ValueError as error:
            raise ValueError(f"val_sources: {error}") from None
        return Feed(loader, steps * loader.slots.accumulate, rewind=True)

    def _steps_of_one_pass(self, sources: Mapping[str, Any], loader: StreamLoader) -> int:
        """Return the steps of the rank with most rows; collective where there are several ranks."""
        slots = loader.slots
        if slots.world > 1 and dist.is_initialized():
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, _steps_or_error(loader))
            if errors := [answer for answer in everyone if isinstance(answer, str)]:
                raise ValueError(errors[0])
            return max(everyone)
        mine = steps_of_one_pass(loader)
        others = [rank for rank in range(slots.world) if rank != slots.rank]  # nobody to ask: count for them
        loaders = (StreamLoader(sources, rank=r, world_size=slots.world, **self._validation) for r in others)
        return max([mine, *map(steps_of_one_pass, loaders)])

    def train_dataloader(self) -> Feed | StreamLoader:
        """Return the micro-batches of this rank.

        Without a trainer this is the loader itself, whose state counts a step as soon as its last micro-batch is taken.
        """
        if self.trainer is None and self.loader is not None:
            return self.loader
        assert self._feed is not None, "Lightning calls setup first"
        return self._feed

    @property
    def val_dataloader(self) -> Callable[[], Any]:
        """Return the validation micro-batches of this rank; the same ones every time.

        Without `val_sources`, Lightning would warn of a loader that a module without `validation_step` does not use, or of a step
        that gets no loader. Neither is a mistake, so there is a loader, with nothing in it, where the module has the step.
        """
        module = self.trainer.lightning_module if self.trainer is not None else None
        if self._val_sources is None and module is not None and not is_overridden("validation_step", module):
            return super().val_dataloader
        return self._val_batches

    def _val_batches(self) -> Feed | list:
        return self._val_feed if self._val_feed is not None else []

    def teardown(self, stage: str) -> None:
        """End the worker processes."""
        for feed in (self._feed, self._val_feed):
            if feed is not None:
                feed.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks as of the last trained step; collective where there are several ranks."""
        if self.loader is None:
            return {}
        mine = self.loader.state_dict()
        if self._link is not None and self._link.broken:
            return {**mine, "broken": True}
        if self.loader.slots.world == 1 or not dist.is_initialized():
            return mine
        everyone: list[State] = [mine] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return merge_states(everyone)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on behind the last trained step of a checkpoint, whatever number of ranks wrote it.

        Raises:
            ValueError: If the state is of another run or a newer release, or was saved after an exception on one of several ranks.
        """
        if self.loader is None or not self._fitting:
            return  # evaluation has no position in the training data
        state_dict = as_written_now(state_dict)
        if state_dict.get("broken") and len(state_dict["streams"]) < state_dict["header"]["num_streams"]:
            raise ValueError(
                "the checkpoint was written after an exception, when the ranks no longer agreed on a step, so its data "
                "position holds one rank only; resume from an earlier checkpoint"
            )
        self.loader.load_state_dict(state_dict)
        for line in lost_documents(self.loader):
            rank_zero_only(_log.warning)(line)
        if self._link is not None and self.trainer is not None:
            self._link.resumed_accumulate = state_dict["header"]["accumulate"]
            self._tell(self.trainer)  # the run's number of streams may make another number of micro-batches a step
            # `configure_optimizers` may have made Lightning ask for the loader, and its length, before the state was here.
            self.trainer.fit_loop._combined_loader = None

    # -- what others may ask -------------------------------------------------------------------------------------------

    @property
    def report(self) -> list[str]:
        """What is streamed, a line each."""
        if self.loader is None:
            return ["data: not set up yet"]
        return describe(self.loader)

    def mix_report(self) -> dict[str, dict[str, float]]:
        """Return, by source, its `share` of all tokens so far, its `target` share, `tokens`, and the epoch of the streams.

        `epoch` is the mean over all streams, `epoch_min` and `epoch_max` are those of the slowest and the fastest.

        Collective where there are several ranks: call it on all of them, and not at every step.
        """
        if self.loader is None:
            return {}
        mine = self.loader.mix_report()
        parts = self._from_data_ranks((len(self.loader.slots.owned()), mine))
        return merged_mix(parts) if len(parts) > 1 else mine

    def counters(self) -> dict[str, int]:
        """Return what all streams have counted since the run began.

        `padding`: tokens of padding. `split`: tokens in another row than their document's beginning (`best_fit`). `cut`: tokens cut
        off by `max_document_tokens`. `skipped`: documents given up. Collective, as `mix_report` is.
        """
        if self.loader is None:
            return {}
        parts = self._from_data_ranks(self.loader.counters())
        return {name: sum(part[name] for part in parts) for name in parts[0]}

    def _from_data_ranks(self, mine: Any) -> list[Any]:
        """Gather what each data rank has; ranks that share one count once."""
        assert self.loader is not None
        slots = self.loader.slots
        if slots.world == 1 or not dist.is_initialized():
            return [mine]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (slots.rank, mine))
        return list(dict(everyone).values())

    def loader_at(self, state: State | None = None) -> StreamLoader:
        """Return a loader of all streams in this process, at a state or at the start; for audits, see `audit.loader_at`."""
        return loader_at({**self._training, **self._everywhere}, state)

    # -- joining the trainer -------------------------------------------------------------------------------------------

    def _join(self, trainer: pl.Trainer, stage: str) -> None:
        callbacks = _callbacks(trainer)
        callbacks[:] = [callback for callback in callbacks if not isinstance(callback, LoaderLink)]
        previous, self._link = self._link, None
        loader = self.loader if stage == "fit" else (self._val_feed.loader if self._val_feed else None)
        if loader is None:
            return
        pin = trainer.strategy.root_device.type == "cuda"
        self._feed = Feed(loader, 0, pin=pin)
        self._link = LoaderLink(loader, self._feed, loader.slots.world, self.loss_weight)
        self._link.val_feed = self._val_feed
        if self._val_feed is not None:
            self._val_feed.pin = pin
        callbacks.insert(0, self._link)
        if stage == "fit":
            self._check_accumulation(trainer, loader.slots.accumulate, previous)
            self._tell(trainer)

    def _tell(self, trainer: pl.Trainer) -> None:
        """Express in micro-batches what the trainer counts in them."""
        assert self.loader is not None
        assert self._feed is not None
        accumulate = self.loader.slots.accumulate
        if accumulate > 1 and not trainer.lightning_module.automatic_optimization:
            raise ValueError(
                f"manual optimization gets a whole step at once, but a global batch makes {accumulate} micro-batches here; set "
                "micro_batch_size=None, or a smaller global_batch_size"
            )
        self._feed.length = self._epoch_steps(trainer) * accumulate
        trainer.accumulate_grad_batches = accumulate
        if self.val_every_n_steps is not None:
            trainer.val_check_interval = self.val_every_n_steps * accumulate
            trainer.check_val_every_n_epoch = None
        self._check_limits(trainer, accumulate)

    def _check_limits(self, trainer: Any, accumulate: int) -> None:
        """Refuse limits that would end an epoch inside a step."""
        if trainer.fast_dev_run:
            trainer.limit_train_batches = int(trainer.fast_dev_run) * accumulate
        limit = trainer.limit_train_batches
        whole = limit == 1.0 if isinstance(limit, float) else limit % accumulate == 0
        if trainer.overfit_batches or not whole:
            raise ValueError(
                f"Trainer(limit_train_batches={limit}, overfit_batches={trainer.overfit_batches}) would end an epoch inside a "
                f"step of {accumulate} micro-batch(es); limit the run by max_steps or steps_per_epoch"
            )

    def _epoch_steps(self, trainer: pl.Trainer) -> int:
        if self.steps_per_epoch is not None:
            return self.steps_per_epoch
        if trainer.max_steps < 1:
            raise ValueError(
                f"the data has no end, and neither Trainer(max_steps={trainer.max_steps}) nor steps_per_epoch says when an "
                "epoch ends; set one of them"
            )
        return trainer.max_steps

    def _check_accumulation(self, trainer: pl.Trainer, accumulate: int, previous: LoaderLink | None) -> None:
        ours = previous.loader.slots.accumulate if previous is not None else 1
        if trainer.accumulate_grad_batches not in (1, accumulate, ours):
            raise ValueError(
                f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) does not agree with the data: a global "
                f"batch makes {accumulate} micro-batch(es) here; leave it at 1 and set global_batch_size and micro_batch_size"
            )
        if any(isinstance(callback, GradientAccumulationScheduler) for callback in _callbacks(trainer)):
            raise ValueError(
                "GradientAccumulationScheduler changes what a step is, and the data module decides that; remove the callback "
                "and set global_batch_size and micro_batch_size"
            )


def _steps_or_error(loader: StreamLoader) -> int | str:
    """Return the steps of one pass, or what is wrong: the others wait for an answer."""
    try:
        return steps_of_one_pass(loader)
    except ValueError as error:
        return str(error)


def _callbacks(trainer: pl.Trainer) -> list[Callback]:
    """Return the trainer's own list of callbacks."""
    return vars(trainer)["callbacks"]
