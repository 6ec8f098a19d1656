"""`packing="none"`: one item a row, made by the user's reader, under the same guarantees as rows of tokens."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from lightning_fms.callbacks import DataMix, DataTrail, Progress, Summary, Throughput
from lightning_fms.data import RescalableDataModule, State, StreamLoader, merge_states
from lightning_fms.data.audit import readings
from lightning_fms.data.sources import DocumentError
from lightning_fms.data.tokenizer import ByteTokenizer
from tests.data.chains import Phase, through_disk
from tests.data.fits import fit
from tests.data.test_trainer import STEPS, check, pytestmark  # noqa: F401
from tests.worlds import run_world

LENGTH = 6


def write_records(folder: Path, name: str, count: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"source": name, "n": n, "text": name * (n % 4 + 1)}) + "\n" for n in range(count)]
    (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


def write_files(folder: Path, count: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(count):
        (folder / f"{n:03d}.dat").write_bytes(bytes([n] * (n % 5 + 1)))
    return folder


def reader(item: Any) -> dict[str, Any]:
    """A prompt of which nothing is a target, and an answer of 1 to 4 tokens; of a record or of a file."""
    number, source = (item["n"], 1) if isinstance(item, dict) else (item[0], 2)
    ids = [source, number, *[number + 3] * (number % 4 + 1)]
    rows = np.zeros((2, LENGTH), dtype=np.int64)
    rows[1] = -100
    rows[0, : len(ids)], rows[1, 1 : len(ids) - 1] = ids, ids[2:]
    return {
        "input_ids": torch.from_numpy(rows[0]), "labels": rows[1], "position_ids": list(range(LENGTH)), "number": number,
    }  # fmt: skip


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("items")
    sources = {"records": write_records(root / "r", "a", 41), "files": write_files(root / "f", 23)}
    return {
        "sources": sources,
        "mixture": {"records": 2, "files": 1},
        "packing": "none",
        "reader": reader,
        "seq_len": None,
    }


def of_records(folder: Path, reader: Callable, count: int = 12, batch: int = 4, **options: Any) -> StreamLoader:
    return StreamLoader({"a": write_records(folder, "a", count)}, None, batch, packing="none", reader=reader, **options)


# -- what a reader may return ------------------------------------------------------------------------------------------


def test_arrays_tensors_lists_and_numbers_become_tensors(tmp_path: Path) -> None:
    def reader(record: dict) -> dict[str, Any]:
        return {
            "image": np.full((3, 2, 2), record["n"], np.uint8), "tensor": torch.full((2,), record["n"], dtype=torch.float16),
            "list": [record["n"], 2], "label": record["n"], "weight": 0.5, "big": np.array([record["n"]], ">i2"),
            "learned": torch.ones(1, requires_grad=True),
        }  # fmt: skip

    batch = next(iter(of_records(tmp_path, reader)))
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in batch.items()} == {
        "image": (torch.uint8, (4, 3, 2, 2)), "tensor": (torch.float16, (4, 2)), "list": (torch.int64, (4, 2)),
        "label": (torch.int64, (4,)), "weight": (torch.float64, (4,)), "big": (torch.int16, (4, 1)),
        "learned": (torch.float32, (4, 1)), "row_valid": (torch.bool, (4,)),
    }  # fmt: skip
    for name in ("image", "tensor", "big"):
        assert batch[name].flatten(1)[:, 0].tolist() == batch["label"].tolist()
    assert batch["row_valid"].all()


def test_none_leaves_an_item_out(tmp_path: Path) -> None:
    loader = of_records(tmp_path, lambda record: {"n": record["n"]} if record["n"] % 3 else None)
    taken = Counter(n for _, batch in zip(range(8), loader, strict=False) for n in batch["n"].tolist())
    assert set(taken) == {n for n in range(12) if n % 3}
    assert max(taken.values()) - min(taken.values()) <= 4  # streams end their epochs at different rows
    assert loader.counters() == {"padding": 0, "split": 0, "cut": 0, "skipped": 0}


def test_text_and_tokens_come_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.bin").write_bytes(np.arange(5, dtype=np.uint16).tobytes())
    found = []

    def reader(item: Any) -> dict[str, int]:
        found.append(item if isinstance(item, str) else item.tolist())
        return {"x": 1}

    sources = {"text": {"path": tmp_path / "a.txt", "split": "line"}, "tokens": tmp_path / "b.bin"}
    next(iter(StreamLoader(sources, None, 6, packing="none", reader=reader, mixture={"text": 1, "tokens": 1})))
    assert {str(item) for item in found} == {"one", "two", "[0, 1, 2, 3, 4]"}


def test_no_tokenizer_is_asked_for_anything(tmp_path: Path) -> None:
    class Bare(ByteTokenizer):
        eos_id = None

        def encode(self, text: str) -> np.ndarray:
            raise AssertionError(text)

    assert next(iter(of_records(tmp_path, reader, tokenizer=Bare())))["row_valid"].all()


# -- errors ------------------------------------------------------------------------------------------------------------


def fails(record: dict) -> dict[str, Any]:
    return {"x": record["answer"]}


@pytest.mark.parametrize(
    ("reader", "words"),
    [
        (fails, rf"the reader fails at {__file__}:{fails.__code__.co_firstlineno + 1} \(KeyError: 'answer'\)"),
        (lambda record: {"x": object()}, "'x' as object; a batch holds numbers only"),
        (lambda record: {"x": "text"}, "'x' as <U4; a batch holds numbers only"),
        (lambda record: {"x": [[1], [1, 2]]}, "'x', which is no array"),
        (lambda record: {"x": torch.ones(2, dtype=torch.bfloat16)}, "'x', which is no array"),
        (lambda record: {"labels": np.uint8(3)}, "'labels' as uint8, which has no -100"),
        (lambda record: {"row_valid": True}, "a field 'row_valid'"),
        (lambda record: {3: 1}, "a field 3; use text"),
        (lambda record: [1, 2], "returned list; it must return a dict of arrays, or None"),
        (lambda record: {}, "returned dict; it must return a dict of arrays, or None"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_one_clear_error_that_names_source_and_file(tmp_path: Path, reader: Callable, words: str, workers: int) -> None:
    loader = of_records(
        tmp_path, reader, count=1, num_workers=workers, multiprocessing_context="fork" if workers else None
    )
    with pytest.raises(DocumentError, match=rf"^source 'a': {tmp_path}/a.jsonl: at 0: .*{words}"):
        next(iter(loader))
    loader.close()


@pytest.mark.parametrize(
    ("reader", "words"),
    [
        (
            lambda record: {"x": [0] * (record["n"] % 2 + 1)},
            r"'x' as int64 \[[12]\] and as int64 \[[12]\]; .* pad or crop",
        ),
        (lambda record: {"x": (1, 1.5)[record["n"] % 2]}, r"'x' as (int64|float64) \[\] and as (int64|float64) \[\]"),
        (lambda record: {"x": 1, "y": 1} if record["n"] % 2 else {"x": 1}, "every item needs the same fields"),
    ],
)
def test_items_that_do_not_fit_together(tmp_path: Path, reader: Callable, words: str) -> None:
    with pytest.raises(DocumentError, match=words):
        next(iter(of_records(tmp_path, reader, batch=8)))


def test_skip_counts_what_a_reader_cannot_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def reader(record: dict) -> dict[str, int]:
        return {"n": record["n"], "inverse": 1 // (record["n"] % 4)}

    loader = of_records(tmp_path, reader, on_error="skip", batch=1)
    batches = [batch for _, batch in zip(range(9), loader, strict=False)]
    assert sorted(int(batch["n"]) for batch in batches) == [n for n in range(12) if n % 4]
    next(iter(loader))  # an epoch ends behind the row that begins the next
    assert loader.counters()["skipped"] >= 3
    told = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(f"left out: source 'a': {tmp_path}/a.jsonl: at ")
    assert told[0].endswith("; further ones of this file are only counted")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seq_len": 8}, r"seq_len=8 is for rows of tokens, and packing='none' has items; leave it out \(null\)"),
        ({"bos": True}, "bos=True is for rows of tokens"),
        ({"mask_first": True}, "mask_first=True is for rows of tokens"),
        ({"max_document_tokens": 9}, "max_document_tokens=9 is for rows of tokens"),
        ({"reader": None}, "packing='none' with reader=None"),
        ({"packing": "concat", "seq_len": 8}, "packing='concat' with reader="),
        ({"packing": "concat", "reader": None}, "seq_len=None with packing='concat': give the number"),
        ({"packing": "best_fit", "reader": None}, "seq_len=None with packing='best_fit': give the number"),
    ],
)
def test_options_that_would_have_no_effect(options: dict, change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StreamLoader(**{**options, **change}, global_batch_size=4)


def test_a_text_key_has_nothing_to_choose(tmp_path: Path) -> None:
    source = {"path": write_records(tmp_path, "a", 3), "text_key": "text"}
    with pytest.raises(ValueError, match="source 'a': text_key='text' does not apply to whole records; remove it"):
        StreamLoader({"a": source}, None, 4, packing="none", reader=reader)


# -- guarantees --------------------------------------------------------------------------------------------------------


def run(options: dict, phase: Phase, state: State | None, first_row: int) -> tuple[dict[int, tuple], State]:
    """Run all ranks of a phase in this process; return its rows by number, and the merged state."""
    rows: dict[int, tuple] = {}
    states = []
    for rank in range(phase.world):
        loader = StreamLoader(
            **options, global_batch_size=phase.batch, micro_batch_size=phase.micro, rank=rank, world_size=phase.world,
            num_workers=phase.workers, multiprocessing_context=phase.context if phase.workers else None, state=state,
        )  # fmt: skip
        streams, steps, batches = loader.slots.streams, phase.steps * phase.batch, iter(loader)
        expected = [row for row in range(first_row, first_row + steps) if row % streams % phase.world == rank]
        for batch in (next(batches) for _ in range(phase.steps * loader.slots.accumulate)):
            for index in np.flatnonzero(batch["row_valid"].numpy()):
                rows[expected.pop(0)] = tuple(batch[name][index].numpy().tobytes() for name in sorted(batch))
        assert not expected
        states.append(loader.state_dict())
        loader.close()
    return rows, merge_states(states)


CHAIN = [
    Phase(1, 6, None, 3),
    Phase(3, 6, 1, 4, workers=2),
    Phase(2, 4, 3, 5),
    Phase(5, 7, 1, 3),
    Phase(2, 6, 2, 9, workers=1),
]


def test_d2_the_same_rows_through_every_change_of_ranks_workers_and_batch(options: dict) -> None:
    rows, state = {}, None
    for phase in CHAIN:
        more, state = run({**options, "num_streams": 6}, phase, state and through_disk(state), len(rows))
        rows |= more
    whole, at_once = run({**options, "num_streams": 6}, Phase(1, len(rows), None, 1), None, 0)
    assert rows == whole
    assert torch.equal(state["rows"], at_once["rows"])


def test_d1_each_item_is_in_one_row_of_an_epoch(options: dict) -> None:
    loader = StreamLoader(**options, global_batch_size=6)
    taken = list(readings(loader, 0, 240))
    assert [reading.row for reading in taken] == list(range(240))
    places = Counter((r.source, r.epoch, r.file, r.start) for r in taken)
    assert set(places.values()) == {1}
    for source, items in (("records", 41), ("files", 23)):
        assert sum(place[:2] == (source, 0) for place in places) == items, "the first epoch is over, and complete"


def places(loader: StreamLoader, first_row: int, stop_row: int) -> set[int]:
    """Where the documents of the first epoch are that rows are made of."""
    return {reading.start for reading in readings(loader, first_row, stop_row) if reading.epoch == 0}


@pytest.mark.parametrize(("seq_len", "begun"), [(5, 0), (7, 1)])
def test_rows_go_on_from_packed_text_and_back(tmp_path: Path, seq_len: int, begun: int) -> None:
    """A document that was begun as text has no rest as an item; whatever is unread is read once."""
    common = {"sources": {"a": write_records(tmp_path, "a", 30)}, "global_batch_size": 1}
    text = StreamLoader(**common, seq_len=seq_len)
    as_text = places(text, 0, 4)
    for _ in zip(range(4), text, strict=False):
        pass
    items = StreamLoader(**common, seq_len=None, packing="none", reader=reader, state=text.state_dict())
    assert items.skipped_documents == begun
    as_items = places(items, 4, 16)
    for _ in zip(range(12), items, strict=False):
        pass
    again = StreamLoader(**common, seq_len=seq_len, state=items.state_dict())
    assert again.skipped_documents == 0
    as_text_again = places(again, 16, 60)
    assert len(as_items) == 12
    assert len(as_text) + len(as_items) + len(as_text_again) == len(as_text | as_items | as_text_again) == 30


def test_labels_that_are_not_ignored_are_the_targets(options: dict) -> None:
    loader = StreamLoader(**options, global_batch_size=5, micro_batch_size=2, world_size=2, rank=1)
    for _, micro in zip(range(20), loader.micro_batches(), strict=False):
        counted = micro.batch["labels"][micro.batch["row_valid"]]
        assert micro.targets == int((counted != -100).sum())
        assert micro.rows == int(micro.batch["row_valid"].sum())


def test_without_labels_an_item_is_a_target(tmp_path: Path) -> None:
    loader = of_records(tmp_path, lambda record: {"x": record["n"]}, batch=5, micro_batch_size=2)
    sizes = [micro.targets for _, micro in zip(range(6), loader.micro_batches(), strict=False)]
    assert sizes == [1, 2, 2] * 2


@pytest.mark.parametrize("world", [1, 2, 5])
def test_one_pass_shows_every_item_once_and_ends_on_all_ranks_together(options: dict, world: int) -> None:
    val = {"few": options["sources"]["records"]}
    shapes, lengths, numbers = set(), set(), []
    for rank in range(world):
        data = RescalableDataModule(
            **options, global_batch_size=32, micro_batch_size=3, val_sources=val, val_one_pass=True, rank=rank, world_size=world,
        )  # fmt: skip
        data.setup("fit")
        batches = list(data.val_dataloader())
        lengths.add(len(batches))
        for batch in batches:
            shapes.add(tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sorted(batch.items())))
            numbers += batch["number"][batch["row_valid"]].tolist()
            assert (batch["labels"] != -100).any(), "a mean over no targets would be NaN"
    assert sorted(numbers) == list(range(41))
    assert len(shapes) == len(lengths) == 1


def test_one_pass_over_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no item in the sources \['a'\]: all were left out"):
        next(iter(of_records(tmp_path, lambda record: None, one_pass=True)))


def test_d4_losses_and_gradients_are_those_of_one_process(options: dict) -> None:
    """Rows hold 1 to 4 targets, so a mean of means would not be the mean."""
    val = {"val_sources": {"few": options["sources"]["files"]}, "val_one_pass": True, "val_every_n_steps": 2}
    data = {**options, **val, "global_batch_size": 6}
    alone = fit(data, "one device", STEPS)
    check(run_world(fit, 2, {**data, "micro_batch_size": 2}, "ddp", STEPS), alone)
    check(run_world(fit, 3, {**data, "micro_batch_size": 1}, "fsdp", STEPS), alone)


def test_the_report_counts_items(options: dict) -> None:
    data = RescalableDataModule(**options, global_batch_size=4)
    data.setup("fit")
    assert data.report[0].startswith("data: 4 items a step, 4 streams")
    assert "66.7% of the items, epoch" in data.report[1] + data.report[2]


class Mean(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: dict, batch_idx: int) -> torch.Tensor:
        return self.layer(batch["x"]).square().mean()

    def validation_step(self, batch: dict, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_what_counts_tokens_does_without_them(tmp_path: Path) -> None:
    measured = [Throughput(), DataMix(), DataTrail(str(tmp_path / "trail"), 2), Summary(), Progress(2)]
    data = RescalableDataModule(
        {"a": write_records(tmp_path, "a", 9)}, None, 4, packing="none",
        reader=lambda record: {"x": np.float32([record["n"]]), "input_ids": 3},
    )  # fmt: skip
    trainer = pl.Trainer(
        max_steps=4, accelerator="cpu", callbacks=measured, logger=False, enable_checkpointing=False, log_every_n_steps=1,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Mean(), data)
    assert trainer.callback_metrics["data/a/tokens"] == 16
    assert trainer.callback_metrics["step_seconds"] > 0
    assert "tokens_per_second" not in trainer.callback_metrics
