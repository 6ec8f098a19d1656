"""Tensors of a micro-batch equal what a slow loop over tokens makes of them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fms.data.packing import IGNORE, Concat, Rows, collate


@st.composite
def packed(draw: st.DrawFn, max_rows: int = 5) -> Rows:
    seq_len, count = draw(st.integers(1, 12)), draw(st.integers(0, max_rows))
    tokens = draw(st.lists(st.lists(st.integers(0, 300), min_size=seq_len + 1, max_size=seq_len + 1),
                           min_size=count, max_size=count))  # fmt: skip
    starts = [sorted(draw(st.sets(st.integers(0, seq_len)))) for _ in range(count)]
    return make(tokens, starts, seq_len)


def make(tokens: list[list[int]], starts: list[list[int]], seq_len: int) -> Rows:
    return Rows(
        np.array(tokens, dtype=np.int32).reshape(len(tokens), seq_len + 1),
        np.full(len(tokens), seq_len + 1, dtype=np.int32),
        np.array([place for row in starts for place in row], dtype=np.int32),
        np.array([len(row) for row in starts], dtype=np.int32),
    )


def by_hand(tokens: list[int], starts: set[int], mask_first: bool) -> dict[str, list[int]]:
    out: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": [], "document_ids": []}
    position, document = -1, 0
    for place in range(len(tokens) - 1):
        position += 1
        if place in starts and place > 0:
            position, document = 0, document + 1
        out["input_ids"].append(tokens[place])
        out["labels"].append(IGNORE if mask_first and place + 1 in starts else tokens[place + 1])
        out["position_ids"].append(position)
        out["document_ids"].append(document)
    return out


@settings(deadline=None, derandomize=True, max_examples=150)
@given(packed(), st.integers(0, 3), st.booleans())
def test_collate_equals_a_loop_over_tokens(rows: Rows, missing: int, mask_first: bool) -> None:
    count, seq_len = rows.tokens.shape[0], rows.tokens.shape[1] - 1
    batch = collate(rows, count + missing, mask_first)
    assert all(batch[name].dtype == torch.int64 for name in ("input_ids", "labels", "position_ids", "document_ids"))
    assert all(batch[name].shape == (count + missing, seq_len) for name in batch if name != "row_valid")
    ends = np.cumsum(rows.counts)
    for r in range(count):
        starts = set(rows.starts[ends[r] - rows.counts[r] : ends[r]].tolist())
        expected = by_hand(rows.tokens[r].tolist(), starts, mask_first)
        assert {name: batch[name][r].tolist() for name in expected} == expected
    assert batch["row_valid"].tolist() == [True] * count + [False] * missing
    assert torch.all(batch["labels"][count:] == IGNORE)
    assert torch.all(batch["input_ids"][count:] == 0)
    assert torch.all(batch["position_ids"][count:] == torch.arange(seq_len))
    assert torch.all(batch["document_ids"][count:] == 0)
    assert Concat(seq_len, mask_first).targets(rows) == int((batch["labels"] != IGNORE).sum())


@settings(deadline=None, derandomize=True, max_examples=100)
@given(packed(), st.data())
def test_taking_rows_keeps_each_with_its_starts(rows: Rows, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6)) if len(rows) else []
    taken = rows.take(np.array(chosen, dtype=np.int64))
    whole, part = collate(rows, len(rows), True), collate(taken, len(chosen), True)
    for name in whole:
        assert torch.equal(part[name], whole[name][chosen])


@settings(deadline=None, derandomize=True, max_examples=50)
@given(packed(), st.data())
def test_concatenating_parts_gives_the_whole(rows: Rows, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(rows)))
    again = rows.between(0, cut).concatenate([rows.take(np.arange(cut, len(rows)))])
    for name in ("tokens", "known", "starts", "counts"):
        assert np.array_equal(getattr(again, name), getattr(rows, name))


@pytest.mark.parametrize("mask_first", [False, True])
def test_two_documents_in_a_row_and_a_third_that_starts_with_the_last_label(mask_first: bool) -> None:
    batch = collate(make([[5, 6, 7, 8, 9]], [[2, 4]], 4), 1, mask_first)
    first = IGNORE if mask_first else 7
    last = IGNORE if mask_first else 9
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8]]
    assert batch["labels"].tolist() == [[6, first, 8, last]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1]]
    assert batch["document_ids"].tolist() == [[0, 0, 1, 1]]


def test_a_batch_shares_no_memory_with_the_rows() -> None:
    rows = make([[1, 2, 3]], [[0]], 2)
    batch = collate(rows, 1)
    rows.tokens[:] = 9
    batch["labels"][:] = 7
    assert batch["input_ids"].tolist() == [[1, 2]]
