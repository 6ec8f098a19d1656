"""Rows that come from worker processes are those made in this one, whatever way they travel."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_fms.data import StreamLoader, workers
from lightning_fms.data.workers import steps
from tests.data.chains import write_jsonl

SEQ_LEN = 12

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(scope="module")
def loader(tmp_path_factory):
    root = tmp_path_factory.mktemp("workers")
    write_jsonl(root / "p", "p", 60)
    return StreamLoader(**loader_options(root / "p"))


def loader_options(folder):
    return {
        "sources": {"p": folder}, "seq_len": SEQ_LEN, "global_batch_size": 7, "num_streams": 10, "rank": 1, "world_size": 2
    }  # fmt: skip


def rows_of(loader, count, number_of_workers):
    stream = steps(loader._recipe, loader.slots, 0, loader._rows.copy(), number_of_workers, None)
    taken = [next(stream) for _ in range(count)]  # all are kept: none may lie in memory that is written again
    stream.close()
    return taken


def same(one, other):
    return all(
        a.first_row == b.first_row
        and all(np.array_equal(x, y) for x, y in zip(a.rows.arrays().values(), b.rows.arrays().values(), strict=True))
        and np.array_equal(a.states, b.states)
        and np.array_equal(a.streams, b.streams)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("number_of_workers", [1, 2, 3])
def test_steps_stay_what_they_are_while_the_ring_goes_round(loader, monkeypatch, number_of_workers):
    monkeypatch.setattr(workers, "_MESSAGE_STEPS", 2)
    assert same(rows_of(loader, 41, number_of_workers), rows_of(loader, 41, 0))


def test_portions_that_do_not_fit_go_with_the_message(loader, monkeypatch):
    expected = rows_of(loader, 9, 0)
    monkeypatch.setattr(workers, "_RING_TOKENS", 0)
    assert same(rows_of(loader, 9, 2), expected)


def test_more_workers_than_streams_are_not_started(loader):
    assert same(rows_of(loader, 5, 50), rows_of(loader, 5, 0))


def test_blocks_are_the_rows_of_the_batches(loader):
    batches = [
        batch for _, batch in zip(range(6), StreamLoader(**loader_options(loader.listings["p"].root)), strict=False)
    ]
    other = StreamLoader(**loader_options(loader.listings["p"].root), num_workers=1)
    for batch, block in zip(batches, other.blocks(), strict=False):
        valid = batch["row_valid"]
        assert torch.equal(batch["input_ids"][valid], block[:, :-1].long())
        assert torch.equal(batch["labels"][valid], block[:, 1:].long())
    assert other.state_dict()["header"]["row"] >= 6 * 7
    other.close()


def test_blocks_of_rows_that_are_not_full_are_refused(loader):
    other = StreamLoader(**loader_options(loader.listings["p"].root), packing="best_fit")
    with pytest.raises(ValueError, match="packing='best_fit'"):
        other.blocks()


def test_workers_are_silent_about_loaders_from_before(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 400)
    script = f"""
import gc
from lightning_fms.data import StreamLoader
kept = []
for _ in range(3):
    batches = iter(StreamLoader({{"a": {str(tmp_path / "a.txt")!r}}}, 32, 4, tokenizer="bytes", num_workers=1))
    next(batches)
    kept.append(batches)
kept[0] = kept[1] = None
gc.collect()
next(kept[2])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr


class Nosy:
    """A tokenizer that lets one see the environment it works in: a token, 1 where the library may start threads."""

    vocab_size, eos_id, bos_id, fingerprint = 3, 2, None, "nosy"

    def encode(self, text: str) -> np.ndarray:
        return np.array([int(os.environ.get("TOKENIZERS_PARALLELISM") != "false")])

    def decode(self, ids: object) -> str:
        return ""


def test_a_worker_tokenizes_with_one_thread_and_leaves_the_run_alone(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    write_jsonl(tmp_path / "p", "p", 60)
    options = {**loader_options(tmp_path / "p"), "tokenizer": Nosy()}
    ids = {n: next(iter(StreamLoader(**options, num_workers=n)))["input_ids"] for n in (1, 0)}
    assert 1 not in ids[1]
    assert 1 in ids[0]
