"""The loader of one data rank: endless micro-batches, and a state that any number of ranks can go on from.

Usable without Lightning: one process a rank, or, for tests and audits, many ranks in one process. Nothing is communicated:
every rank computes its own rows, and all ranks yield the same number of micro-batches by construction.
"""

from collections import deque
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fms.data.arguments import (
    check_shuffle_window,
    check_supply,
    checked_caps,
    open_packing,
)
from lightning_fms.data.cursor import COUNTERS, VERSION, State, as_written_now, make_state
from lightning_fms.data.items import Items, Reader
from lightning_fms.data.left_out import LeftOut, OnError
from lightning_fms.data.mixture import parse, segment
from lightning_fms.data.packing import IGNORE, Batch, Concat
from lightning_fms.data.resume import Settings, go_on, start
from lightning_fms.data.slots import Slots
from lightning_fms.data.sources import Document, Listing, Source, open_sources
from lightning_fms.data.stream import Recipe, Stream
from lightning_fms.data.tokenizer import open_tokenizer
from lightning_fms.data.whole_numbers import check_positive, check_whole
from lightning_fms.data.workers import Step, steps

LONGEST_ROW = 2**24


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch and what a training loop needs to know about it.

    batch: the tensors. targets: labels that count in it, 0 where it only repeats a row. rows: its real rows, likewise.
    step: the step it belongs to. last: whether it is the step's last.
    """

    batch: Batch
    targets: int
    rows: int
    step: Step = field(repr=False)
    last: bool = False


class StreamLoader:
    """Stream documents as packed micro-batches of one data rank.

    Args:
        sources: `{name: path, glob, folder or list}`, or `{name: {"path": ..., "weight": ..., "text_key": ..., "split": ...}}`;
            a path may also be an object that implements `Source`.
        seq_len: T, tokens of a row, 2^24 at most; `None` where `packing` is `"none"`.
        global_batch_size: B, rows of a global batch over all ranks; may change at resume.
        micro_batch_size: Most rows that fit on a device at once; `None` takes all rows of the rank.
        tokenizer: `"bytes"`, a path to a `tokenizers` JSON file or folder, or an object that implements `Tokenizer`.
        mixture: Shares of tokens, `{source: weight}` or `{first row: {source: weight}}`; `None` shares by bytes.
        packing: `"concat"`: documents in one line, cut every T tokens. `"best_fit"`: whole documents in a row, the longest that
            fits first; only documents longer than T are cut, into pieces. `"none"`: one item a row, made by `reader`.
        seed: Seed of every order; the run's, fixed.
        rank: This data rank.
        world_size: W, number of data ranks; may change at resume.
        num_workers: Worker processes of this rank; 0 produces in this process; may change at resume.
        num_streams: S, logical streams, fixed when the run starts; `None` is the global batch size of the start. The most
            ranks that the run can ever use.
        shuffle_window: Documents permuted together; a change takes effect where a stream starts its next epoch.
        eos: Whether a document ends with EOS.
        bos: Whether a document begins with BOS.
        mask_first: Whether the first token of a document is no target; with `"best_fit"` it never is.
        max_document_tokens: Longer documents are cut; `None` never cuts.
        max_epochs: `{source: epochs}` after which it is no longer drawn; at least one source has no entry.
        multiprocessing_context: Start method of the workers; `None` is the platform's default.
        reader: For `packing="none"`: makes a row of an item (see `Reader`).
        on_error: `"raise"` ends the run at a document that cannot be read; `"skip"` counts it and goes on; `"quarantine"` also
            writes it down.
        quarantine: Folder for that: a file of JSON lines a process (see `Where`); needed with `on_error="quarantine"`.
        one_pass: Whether every document is read once, and rows are empty from then on (validation).
        listings: Folder that keeps, with the run, which files its sources had at the start. A run that goes on reads these: what
            is gone is a hole, new files are refused. `None`: any change of a source's files is refused at resume.
        state: A merged state to go on from (see `merge_states`).

    Raises:
        ValueError: If an argument is impossible, a source cannot be opened, or the state is of another run.
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
        rank: int = 0,
        world_size: int = 1,
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
        one_pass: bool = False,
        listings: str | Path | None = None,
        state: State | None = None,
    ) -> None:
        check_positive(seq_len=seq_len, max_document_tokens=max_document_tokens)
        if seq_len is not None and seq_len > LONGEST_ROW:
            raise ValueError(
                f"{seq_len=}: rows have {LONGEST_ROW:,} tokens at most; a longer one takes minutes to read. Give the number of "
                "tokens that the model sees at once, e.g. 4096"
            )
        check_shuffle_window(shuffle_window)
        self._left_out = LeftOut(on_error, quarantine, rank)
        of_tokens = {"bos": bos, "mask_first": mask_first, "max_document_tokens": max_document_tokens}
        self.packing = open_packing(packing, seq_len, reader, of_tokens)
        check_whole(0, num_workers=num_workers)
        check_whole(seed=seed)
        self.tokenizer = open_tokenizer(tokenizer)
        if bos and self.tokenizer.bos_id is None:
            raise ValueError("bos=true needs a tokenizer with a BOS token, and this one has none; set bos=false")
        if eos and reader is None and self.tokenizer.eos_id is None:
            raise ValueError("eos=true needs a tokenizer with an EOS token, and this one has none; set eos=false")
        self._sources, weights = open_sources(
            sources, listings=None if listings is None else Path(listings), records=reader is not None
        )
        if weights and mixture is not None:
            raise ValueError("weights are given both in sources and in mixture; give them in one place")
        sizes = {name: source.listing.total_bytes for name, source in self._sources.items()}
        self._wanted = parse(mixture if mixture is not None else (weights or None), sizes)
        caps = dict.fromkeys(self._sources, 1) if one_pass else dict(max_epochs or {})
        self._max_epochs = checked_caps(caps, list(self._sources))
        self._asked_streams = num_streams
        self.seq_len, self.seed, self._one_pass = seq_len, seed, one_pass
        self._documents: dict[str, Any] = {
            "shuffle_window": shuffle_window,
            "eos": eos,
            "bos": bos,
            "max_document_tokens": max_document_tokens,
        }
        self.num_workers, self._context = num_workers, multiprocessing_context
        self._rank: dict[str, Any] = {
            "batch": global_batch_size,
            "world": world_size,
            "rank": rank,
            "micro": micro_batch_size,
        }
        self._running: Generator[Any, None, None] | None = None
        self._begin(state)

    # -- state ---------------------------------------------------------------------------------------------------------

    def _begin(self, state: State | None) -> None:
        state = as_written_now(state) if state else None
        saved = state["header"] if state else None
        streams = saved["num_streams"] if saved else self._rank["batch"]
        if self._asked_streams is not None:
            streams = self._asked_streams
        self.slots = Slots(streams=streams, **self._rank)
        settings = Settings(
            self.seed, streams, self._listings(), self._wanted, self.tokenizer.fingerprint, self._documents["bos"],
            isinstance(self.packing, Items), self._max_epochs, self._documents["shuffle_window"],
        )  # fmt: skip
        begin = start(settings) if state is None else go_on(state, settings)
        self._first_row, self._columns, history = begin.row, begin.columns, begin.history
        self.skipped_documents, self._past_listings = begin.lost, begin.listings
        if not self._one_pass:
            check_supply(history[segment(history, self._first_row) :], self._max_epochs)
        self._recipe = Recipe(
            self._sources, self._columns, self.tokenizer, history, self.packing, self.seed, streams,
            max_epochs=self._max_epochs, left_out=self._left_out, one_pass=self._one_pass, **self._documents,
        )  # fmt: skip
        self._owned = self.slots.owned()
        self._rows = begin.rows[self._owned]

    def _listings(self) -> dict[str, dict[str, Any]]:
        return {
            name: {
                "digest": source.listing.digest,
                "files": len(source.listing.names),
                "bytes": source.listing.total_bytes,
                "cut": dict(getattr(source, "cut", {})),
                "text_key": getattr(source, "text_key", None),
            }
            for name, source in self._sources.items()
        }

    def _header(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "row": self._first_row,
            "seed": self.seed,
            "num_streams": self.slots.streams,
            "accumulate": self.slots.accumulate,
            "seq_len": self.seq_len,
            "sources": list(self._columns.sources),
            "listings": {**self._past_listings, **self._listings()},  # a source that comes back must be the same
            "mixture": [[first, dict(weights)] for first, weights in self._recipe.history],
            "tokenizer": self.tokenizer.fingerprint,
            "packing": self.packing.name,
            "max_epochs": dict(self._max_epochs),
            **self._documents,
        }

    def state_dict(self) -> State:
        """Return this rank's part of the state, as of the last global batch all of whose micro-batches were taken."""
        return make_state(self._header(), self._owned, self._rows)

    def load_state_dict(self, state: State) -> None:
        """Go on from a merged state.

        Raises:
            ValueError: If the state is of another run, or lacks streams.
            RuntimeError: If this loader is being iterated: the batches on their way would be lost.
        """
        if self._running is not None:
            raise RuntimeError(
                "load_state_dict on a loader that is being iterated; load the state first, or call close()"
            )
        self._begin(state)

    def apply(self, step: Step) -> None:
        """Count a step as taken."""
        self._first_row = step.first_row + self.slots.batch
        self._rows[(step.streams - self.slots.rank) // self.slots.world] = step.states

    def streams(self) -> list[Stream]:
        """Return this rank's streams where the loader is; moving them on does not move the loader."""
        return [Stream(int(index), self._recipe, row) for index, row in zip(self._owned, self._rows, strict=True)]

    @property
    def source_names(self) -> list[str]:
        """Names of the sources by number, those that the run used to have included."""
        return self._columns.sources

    @property
    def sources(self) -> dict[str, Source]:
        """Where the documents of each source are, by name."""
        return self._sources

    def measure(self, document: Document) -> int:
        """Return the tokens that rows get of a document, special ones included; of an item 1, of an empty document 0."""
        return self._recipe.prepare(document)[1]

    @property
    def listings(self) -> dict[str, Listing]:
        """Files of each source, by name."""
        return {name: source.listing for name, source in self._sources.items()}

    def mix_report(self) -> dict[str, dict[str, float]]:
        """Return, by source, this rank's `share` of tokens so far, its `target` share, `tokens`, and the epoch of its streams.

        `epoch` is the mean over the streams, `epoch_min` that of the slowest and `epoch_max` that of the fastest.
        """
        columns, report = self._columns, {}
        tokens = self._rows[:, columns.tokens].sum(axis=0)
        target = self._recipe.weights(self._first_row)
        epochs = self._rows[:, columns.epoch]
        for i, name in enumerate(columns.sources):
            share = float(tokens[i] / max(1, tokens.sum()))
            report[name] = {
                "share": share, "target": float(target[i]), "tokens": float(tokens[i]), "epoch": float(epochs[:, i].mean()),
                "epoch_min": float(epochs[:, i].min()), "epoch_max": float(epochs[:, i].max()),
            }  # fmt: skip
        return report

    def counters(self) -> dict[str, int]:
        """Return what this rank's streams have counted since the run began, by the names of `COUNTERS`."""
        return dict(zip(COUNTERS, self._rows[:, self._columns.counters].sum(axis=0).tolist(), strict=True))

    # -- batches -------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """Yield micro-batches without end; a new iteration goes on behind the last global batch taken.

        A rank may have fewer rows than micro-batches. A micro-batch without any shows the rank's next row, which will come
        again: its `row_valid` is all false, and its loss must count nothing.
        """
        for micro in self.micro_batches():
            if micro.last:
                self.apply(micro.step)
            yield micro.batch

    def blocks(self) -> Iterator[Tensor]:
        """Yield this rank's rows of each global batch as they were packed, int32 `[rows, T + 1]`: inputs and one label more.

        For loops that derive the rest themselves. Rows are those of `__iter__`, without filler.

        Raises:
            ValueError: If rows are not full of tokens, so that more than these would be needed.
        """
        if not isinstance(self.packing, Concat) or self._one_pass:
            raise ValueError(
                f"blocks() gives rows full of tokens, and packing={self.packing.name!r}, one_pass={self._one_pass} has others; "
                "iterate the loader"
            )
        self.close()
        self._running = running = self._blocks()
        return running

    def micro_batches(self) -> Generator[MicroBatch, None, None]:
        """Yield micro-batches with what belongs to them; the caller counts steps by `apply`."""
        self.close()
        self._running = running = self._micro_batches()
        return running

    def close(self) -> None:
        """End the iteration and its workers; what was not taken will be read again."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def _steps(self) -> Iterator[Step]:
        return steps(self._recipe, self.slots, self._first_row, self._rows.copy(), self.num_workers, self._context)

    def _blocks(self) -> Generator[Tensor, None, None]:
        for step in self._steps():
            self.apply(step)
            yield torch.from_numpy(step.rows.tokens)

    def _micro_batches(self) -> Generator[MicroBatch, None, None]:
        arriving = self._steps()
        ahead: deque[Step] = deque()
        size = self.slots.micro_rows
        while True:
            step = ahead.popleft() if ahead else next(arriving)
            parts = self.slots.split(len(step.rows))
            for k, part in enumerate(parts):
                rows = step.rows.between(part.start, part.stop)
                targets, valid = self.packing.targets(rows), int(self.packing.valid(rows).sum())
                shown = rows  # with nothing to learn from, the device still needs a row: show another, marked invalid
                if self._one_pass and isinstance(self.packing, Items) and not valid:
                    shown = self._an_item
                elif not len(rows) and not self._one_pass:
                    shown = _peek(ahead, arriving)
                batch = self.packing.collate(shown, size)
                batch["row_valid"][len(rows) :] = False
                if not targets:
                    _show_a_target(batch)
                yield MicroBatch(batch, targets, valid, step, last=k == len(parts) - 1)

    @cached_property
    def _an_item(self) -> Any:
        """A row of any stream: what the batches of a rank without items look like."""
        for index, state in enumerate(self._columns.fresh(self.slots.streams, self._documents["shuffle_window"])):
            row = Stream(index, self._recipe, state).next_row(index)
            if self.packing.valid(row).any():
                return row
        raise ValueError(f"no item in the sources {list(self._sources)}: all were left out")


def _peek(ahead: deque[Step], arriving: Iterator[Step]) -> Any:
    """Return the rank's next real row without consuming it."""
    while not any(len(step.rows) for step in ahead):
        ahead.append(next(arriving))
    return next(step.rows for step in ahead if len(step.rows)).between(0, 1)


def _show_a_target(batch: Batch) -> None:
    """Mark a micro-batch as one that counts nothing, with one label at least: the mean over none would be NaN."""
    batch["row_valid"][:] = False
    if "labels" in batch and (batch["labels"] == IGNORE).all():
        batch["labels"].view(-1)[0] = 0
