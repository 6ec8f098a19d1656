"""`best_fit` puts whole documents into rows, loses none, and goes on from any row as if it had never stopped."""

import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fms.data import StreamLoader
from lightning_fms.data.cursor import LOOK_AHEAD, Columns
from lightning_fms.data.packing import IGNORE, BestFit, Concat, Rows, collate
from lightning_fms.data.stream import Stream
from tests.data.test_stream import EOS, Recorded, equal, fresh, recipe_of, rows_of, text, write

lengths = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 60)), min_size=1, max_size=25).filter(any)


def best_fit(sources: dict, streams: int = 1, seq_len: int = 10, **options: object) -> Recorded:
    recipe = recipe_of(sources, streams, seq_len, **options)
    recipe.packing = BestFit(seq_len)
    return recipe


def pieces(rows: list[Rows]) -> list[list[int]]:
    """The pieces of documents in the rows; one that goes on in another row does not end with EOS."""
    found = []
    for row in rows:
        filled = min(int(row.known[0]), row.tokens.shape[1] - 1)
        edges = sorted({0, *row.starts.tolist(), filled})
        found += [row.tokens[0, low:high].tolist() for low, high in pairwise(edges)]
    return found


def documents(rows: list[Rows]) -> list[bytes]:
    whole, begun = [], []
    for piece in pieces(rows):
        begun += piece
        if begun[-1] == EOS:
            whole.append(bytes(begun[:-1]))
            begun = []
    return whole


@settings(deadline=None, derandomize=True, max_examples=60)
@given(lengths, lengths, st.integers(2, 24), st.integers(1, 3))
def test_rows_hold_whole_documents_and_pieces_of_those_longer_than_a_row(
    first: list[int], second: list[int], seq_len: int, streams: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        recipe = best_fit(write(folder, a=first, b=second), streams, seq_len)
        rows = rows_of(fresh(recipe, streams - 1), 30)
        long = 0
        for piece in pieces(rows):
            if piece[-1] != EOS:
                assert len(piece) == seq_len, "only a document longer than a row is cut, and its piece fills the row"
                long += 1
        read = Counter(documents(rows))
        drawn = Counter(document.encode() for document in recipe.encoded if document)
        assert not read - drawn
        assert (drawn - read).total() <= LOOK_AHEAD
        assert long or all(len(d) < seq_len for d in read)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(lengths, lengths, st.integers(1, 16), st.integers(1, 3), st.integers(0, 9))
def test_any_state_row_makes_the_same_next_rows(
    first: list[int], second: list[int], seq_len: int, streams: int, saved_after: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sources = write(folder, a=first, b=second)
        history = [(0, {"a": 0.5, "b": 0.5}), (4 * streams, {"a": 0.1, "b": 0.9})]
        options = {"history": history, "max_epochs": {"a": 2}, "max_document_tokens": 40}
        stream = fresh(best_fit(sources, streams, seq_len, **options), streams - 1)
        rows_of(stream, saved_after)
        saved = stream.row.copy()
        rest = rows_of(stream, 6, saved_after)
        again = Stream(streams - 1, best_fit(sources, streams, seq_len, **options), saved)
        assert equal(rows_of(again, 6, saved_after), rest)
        assert np.array_equal(again.row, stream.row)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.data())
def test_each_document_once_an_epoch_through_every_change_of_packing_and_length(
    each: list[int], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sources = write(folder, a=each, rest=[5])
        row, taken, number = None, [], 0
        for _ in range(data.draw(st.integers(1, 6))):
            seq_len = data.draw(st.integers(2, 20))
            recipe = recipe_of(sources, 1, seq_len, max_epochs={"a": 1})
            recipe.packing = data.draw(st.sampled_from([BestFit, Concat]))(seq_len)
            stream = fresh(recipe) if row is None else Stream(0, recipe, row)
            count = data.draw(st.integers(0, 6))
            taken += rows_of(stream, count, number)
            number, row = number + count, stream.row.copy()
        recipe = best_fit(sources, 1, 8, max_epochs={"a": 1})
        stream = Stream(0, recipe, row)
        while stream.row[recipe.columns.epoch][0] < 1 or stream.row[recipe.columns.ahead] > 1 << LOOK_AHEAD:
            taken += rows_of(stream, 1, number)
            number += 1
        tokens = Counter(
            token for row in taken for token in row.tokens[0, : min(row.known[0], row.tokens.shape[1] - 1)]
        )
        letters = Counter(token for n, length in enumerate(each) for token in text("a", n, length).encode())
        only_a = set(letters) - set(text("rest", 0, 5).encode())
        assert {token: tokens[token] for token in only_a} == {token: letters[token] for token in only_a}


def test_no_label_crosses_documents_and_padding_is_no_target() -> None:
    row = Rows.row(np.array([1, 2, 3, 9, 4, 9, 0, 0, 0], dtype=np.int32), 6, [0, 4])
    batch = collate(row, 1, mask_first=True)
    x = IGNORE
    assert batch["labels"].tolist() == [[2, 3, 9, x, 9, x, x, x]]
    assert batch["document_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 2, 2]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 0, 1]]
    assert BestFit(8).targets(row) == int((batch["labels"] != x).sum()) == 4


def test_a_long_document_keeps_the_targets_where_it_is_cut(tmp_path: Path) -> None:
    recipe = best_fit(write(tmp_path, a=[25]), seq_len=10)
    rows = rows_of(fresh(recipe), 3)
    document = [*text("a", 0, 25).encode(), EOS]
    batch = collate(rows[0].concatenate(rows[1:]), 3, mask_first=True)
    inputs, labels = batch["input_ids"].numpy(), batch["labels"].numpy()
    assert inputs[:2].ravel().tolist() == document[:20]
    assert labels[:2].ravel().tolist() == document[1:21]
    assert inputs[2, :6].tolist() == document[20:]
    assert labels[2].tolist() == [*document[21:], *[IGNORE] * 5]
    counters = Columns(["a"])
    row = recipe.columns
    stream = fresh(best_fit(write(tmp_path, a=[25]), seq_len=10))
    rows_of(stream, 3)
    assert stream.row[row.split] == 16
    assert stream.row[counters.padding] == 4


def test_padding_is_little_for_documents_shorter_than_a_row(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    each = np.clip(rng.lognormal(3.5, 1.0, 2000), 1, 400).astype(int).tolist()
    sources = write(tmp_path, a=each)
    stream = fresh(best_fit(sources, seq_len=256))
    rows_of(stream, 200)
    assert stream.row[stream.recipe.columns.padding] / (200 * 256) < 0.02


def test_the_loader_counts_targets_of_best_fit_rows(tmp_path: Path) -> None:
    write(tmp_path, a=[5, 9, 30, 2, 14] * 8)
    loader = StreamLoader({"a": tmp_path}, 16, 4, 2, packing="best_fit")
    for _, micro in zip(range(12), loader.micro_batches(), strict=False):
        assert micro.targets == int((micro.batch["labels"] != IGNORE).sum())
        assert micro.batch["row_valid"].all()


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
def test_one_pass_reads_everything_once_and_then_shows_rows_that_count_nothing(tmp_path: Path, packing: str) -> None:
    write(tmp_path, a=[5, 9, 30, 2, 14] * 3, b=[7, 8])
    sources = {name: tmp_path / f"{name}.jsonl" for name in "ab"}
    tokens = sum(length + 1 for length in [5, 9, 30, 2, 14] * 3 + [7, 8])
    options = {"packing": packing, "one_pass": True, "world_size": 3, "num_streams": 4}
    loaders = [StreamLoader(sources, 16, 5, rank=rank, **options) for rank in range(3)]
    for loader in loaders:
        for step, micro in enumerate(loader.micro_batches()):
            loader.apply(micro.step)
            assert micro.rows == int(micro.batch["row_valid"].sum())
            assert (micro.batch["labels"] != IGNORE).any(), "a mean over no targets would be NaN"
            if step == 30:
                assert micro.rows == micro.targets == 0
                break
    assert sum(entry["tokens"] for loader in loaders for entry in loader.mix_report().values()) == tokens
