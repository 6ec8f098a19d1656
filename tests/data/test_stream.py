"""A stream's rows are its documents in one line, without a loss, and any row of state makes the same next rows."""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fms.data.cursor import Columns, give_up_begun
from lightning_fms.data.mixture import History, normalise, parse
from lightning_fms.data.packing import Concat, Rows
from lightning_fms.data.sources import JsonLines
from lightning_fms.data.stream import Recipe, Stream, produce
from lightning_fms.data.tokenizer import ByteTokenizer

EOS, BOS = 256, 257


class Bytes(ByteTokenizer):
    """Bytes with a BOS."""

    vocab_size, bos_id, fingerprint = 258, BOS, "bytes with BOS"


def text(source: str, number: int, length: int) -> str:
    """A document of `length` characters that says which one it is, as far as it is long enough."""
    return (f"{source}{number}:" + "abcdefgh" * (length // 8 + 1))[:length]


def write(folder: Path | str, **lengths: list[int]) -> dict[str, JsonLines]:
    for name, each in lengths.items():
        records = [json.dumps({"text": text(name, number, length)}) + "\n" for number, length in enumerate(each)]
        Path(folder, f"{name}.jsonl").write_text("".join(records))
    return {name: JsonLines(Path(folder, f"{name}.jsonl")) for name in lengths}


class Recorded(Recipe):
    """A recipe that notes which documents it was asked to encode."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.encoded: list[str] = []

    def encode(self, document: str | np.ndarray) -> np.ndarray:
        self.encoded.append(str(document))
        return super().encode(document)


def recipe_of(sources: dict[str, JsonLines], streams: int = 3, seq_len: int = 10, **options: object) -> Recorded:
    names = list(options.pop("columns", sources))  # type: ignore[call-overload]
    history = options.pop("history", None) or parse(dict.fromkeys(sources, 1), dict.fromkeys(sources, 1))
    tokenizer = options.pop("tokenizer", Bytes())
    return Recorded(
        sources, Columns(names), tokenizer, history, Concat(seq_len), 3, streams, **{"shuffle_window": 4, **options}
    )


def fresh(recipe: Recipe, index: int = 0) -> Stream:
    return Stream(index, recipe, recipe.columns.fresh(recipe.streams, recipe.shuffle_window)[index])


def rows_of(stream: Stream, count: int, first: int = 0) -> list[Rows]:
    """The stream's rows number `first`, `first + 1`, ... of its own."""
    numbers = [(first + i) * stream.recipe.streams + stream.index for i in range(count)]
    return [stream.next_row(number) for number in numbers]


def line_of(rows: list[Rows]) -> list[int]:
    return np.concatenate([row.tokens[0, :-1] for row in rows]).tolist()


def equal(one: list[Rows], other: list[Rows]) -> bool:
    fields = ("tokens", "known", "starts", "counts")
    return len(one) == len(other) and all(
        np.array_equal(getattr(a, name), getattr(b, name)) for a, b in zip(one, other, strict=True) for name in fields
    )


lengths = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 60)), min_size=1, max_size=25).filter(any)


@settings(deadline=None, derandomize=True, max_examples=50)
@given(
    lengths, lengths, st.integers(1, 24), st.integers(1, 4), st.booleans(), st.booleans(), st.sampled_from([None, 1, 7])
)
def test_the_line_is_the_drawn_documents_one_after_another(
    first: list[int], second: list[int], seq_len: int, streams: int, eos: bool, bos: bool, cut: int | None
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_of(
            write(folder, a=first, b=second), streams, seq_len, eos=eos, bos=bos, max_document_tokens=cut
        )
        stream = fresh(recipe, streams - 1)
        rows = rows_of(stream, 12)
        expected: list[int] = []
        starts = set()
        for document in filter(None, recipe.encoded):
            starts.add(len(expected))
            expected += [BOS] * bos + list(document.encode())[:cut] + [EOS] * eos
        line = line_of(rows)
        assert line == expected[: len(line)]
        assert [int(row.tokens[0, -1]) for row in rows] == expected[seq_len : len(line) + 1 : seq_len]
        for i, row in enumerate(rows):
            places = {start - i * seq_len for start in starts if 0 <= start - i * seq_len <= seq_len}
            assert row.starts.tolist() == sorted(places)
        assert stream.row[recipe.columns.tokens].sum() == len(line)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(lengths, lengths, st.integers(1, 16), st.integers(1, 4), st.integers(0, 9))
def test_any_state_row_makes_the_same_next_rows(
    first: list[int], second: list[int], seq_len: int, streams: int, saved_after: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sources = write(folder, a=first, b=second)
        history: History = [(0, {"a": 0.5, "b": 0.5}), (4 * streams, {"a": 0.1, "b": 0.9})]
        stream = fresh(recipe_of(sources, streams, seq_len, history=history), streams - 1)
        rows_of(stream, saved_after)
        saved = stream.row.copy()
        rest = rows_of(stream, 6, saved_after)
        again = Stream(streams - 1, recipe_of(sources, streams, seq_len, history=history), saved)
        assert equal(rows_of(again, 6, saved_after), rest)
        assert np.array_equal(again.row, stream.row)
        assert len(again.recipe.encoded) <= len(stream.recipe.encoded) + 1  # one document is read again, at most


@settings(deadline=None, derandomize=True, max_examples=25)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(any), st.integers(1, 4), st.integers(4, 12))
def test_each_document_is_read_once_an_epoch_by_one_stream(each: list[int], streams: int, seq_len: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sources = write(folder, a=each, rest=[5])
        recipe = recipe_of(sources, streams, seq_len, max_epochs={"a": 2}, eos=False)
        read: Counter = Counter()
        for index in range(streams):
            stream, row = fresh(recipe, index), 0
            while stream.row[recipe.columns.epoch][0] < 2:
                recipe.encoded.clear()
                rows_of(stream, 1, row)
                read.update(document for document in recipe.encoded if not document.startswith("rest"))
                row += 1
        assert read == {
            document: 2 * count for document, count in Counter(text("a", n, c) for n, c in enumerate(each)).items()
        }


def test_one_document_for_many_streams_is_read_by_one_of_them_each_epoch(tmp_path: Path) -> None:
    recipe = recipe_of(write(tmp_path, a=[30]), streams=8, seq_len=4)
    stream = fresh(recipe, 5)
    rows = rows_of(stream, 40)
    document = [*text("a", 0, 30).encode(), EOS]
    assert line_of(rows) == (document * 6)[:160]
    epochs = stream.row[recipe.columns.epoch][0]
    assert epochs > 6  # the epochs in which other streams have the document count as well


def test_a_document_longer_than_many_rows(tmp_path: Path) -> None:
    recipe = recipe_of(write(tmp_path, a=[5000]), streams=1, seq_len=16)
    rows = rows_of(fresh(recipe), 312)
    assert line_of(rows) == list(text("a", 0, 5000).encode())[: 312 * 16]
    assert len(recipe.encoded) == 1
    assert [len(row.starts) for row in rows] == [1] + [0] * 311


def test_documents_of_one_token_and_none(tmp_path: Path) -> None:
    recipe = recipe_of(write(tmp_path, a=[0, 1, 0, 0, 1, 1, 0]), streams=1, seq_len=4, eos=False)
    rows = rows_of(fresh(recipe), 6)
    assert line_of(rows) == [ord("a")] * 24
    assert all(row.starts.tolist() == [0, 1, 2, 3, 4] for row in rows)


def test_eos_and_bos_are_not_doubled() -> None:
    recipe = recipe_of({}, history=[(0, {})], bos=True)
    assert recipe.mark(np.array([5, 6], dtype=np.uint16)).tolist() == [BOS, 5, 6, EOS]
    assert recipe.mark(np.array([BOS, 5, EOS])).tolist() == [BOS, 5, EOS]
    assert recipe.mark(np.array([], dtype=np.int64)).tolist() == []
    assert recipe.prepare("")[1] == 0
    assert recipe.mark(np.array([5, 6])).dtype == np.int32


# -- mixing ---------------------------------------------------------------------------------------------------------------


@contextmanager
def two_sources(longest: int = 40) -> Iterator[dict[str, JsonLines]]:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        yield write(folder, a=rng.integers(1, longest, 200).tolist(), b=rng.integers(1, longest // 4, 200).tolist())


@settings(deadline=None, derandomize=True, max_examples=15)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(2, 12), st.integers(0, 3))
def test_from_a_change_on_every_share_is_within_two_documents(
    before: int, after: int, change_at: int, index: int
) -> None:
    longest, streams = 41, 4
    with two_sources(longest - 1) as sources:
        weights = [normalise({"a": w, "b": 10 - w}, ["a", "b"]) for w in (before, after)]
        recipe = recipe_of(sources, streams, 8, history=[(0, weights[0]), (change_at * streams, weights[1])])
        stream = fresh(recipe, index)
        drawn = np.zeros(2)
        for row in range(60):
            if row == change_at:
                drawn[:] = 0
            recipe.encoded.clear()
            rows_of(stream, 1, row)
            for document in recipe.encoded:
                drawn["ab".index(document[0])] += len(document) + 1
                share = np.array(list(weights[row >= change_at].values()))
                assert np.all(np.abs(drawn - share * drawn.sum()) <= 2 * longest)


def test_the_first_batch_is_mixed_and_so_is_the_first_after_a_change() -> None:
    streams = 20
    with two_sources() as sources:
        history = [(0, {"a": 0.25, "b": 0.75}), (5 * streams, {"a": 0.75, "b": 0.25})]
        recipe = recipe_of(sources, streams, 8, history=history)
        firsts, changed = [], []
        for index in range(streams):
            recipe.encoded.clear()
            stream = fresh(recipe, index)
            rows_of(stream, 5)
            firsts.append(recipe.encoded[0][0])
            recipe.encoded.clear()
            for row in range(5, 30):
                rows_of(stream, 1, row)
            changed.append(recipe.encoded[0][0])
    assert firsts.count("a") == 5
    assert changed.count("a") == 15


def test_sources_of_single_tokens_do_not_starve_the_others(tmp_path: Path) -> None:
    weights = normalise({"a": 4, "b": 1, "c": 1}, ["a", "b", "c"])
    recipe = recipe_of(write(tmp_path, a=[1] * 9, b=[1] * 9, c=[1] * 9), 6, 8, history=[(0, weights)], eos=False)
    for index in range(6):
        counts = Counter(map(chr, line_of(rows_of(fresh(recipe, index), 12))))
        assert {name: pytest.approx(96 * weight, abs=2) for name, weight in weights.items()} == counts


def test_a_source_at_its_max_epochs_leaves_the_mix(tmp_path: Path) -> None:
    recipe = recipe_of(write(tmp_path, a=[5, 6], b=[7]), streams=1, seq_len=8, max_epochs={"a": 3})
    stream = fresh(recipe)
    rows_of(stream, 40)
    counts = Counter(document[0] for document in recipe.encoded)
    assert counts["a"] == 6
    assert counts["b"] > 30
    assert stream.row[recipe.columns.epoch][0] == 3
    resumed = Stream(0, recipe_of(recipe.sources, 1, 8, max_epochs={"a": 3}), stream.row)
    rows_of(resumed, 5, 40)
    assert not any(document.startswith("a") for document in resumed.recipe.encoded)


def test_no_source_left_is_an_error(tmp_path: Path) -> None:
    sources = write(tmp_path, a=[5, 6], b=[7])
    recipe = recipe_of(sources, streams=1, seq_len=8, max_epochs={"a": 1}, history=[(0, {"a": 1.0, "b": 0.0})])
    with pytest.raises(ValueError, match=r"every source with a weight has reached its max_epochs=\{'a': 1\}"):
        rows_of(fresh(recipe), 40)


# -- what may change at resume ----------------------------------------------------------------------------------------------


def test_a_source_taken_out_ends_its_document_in_flight(tmp_path: Path) -> None:
    sources = write(tmp_path, a=[50] * 5, b=[50] * 5)
    recipe = recipe_of(sources, streams=1, seq_len=8)
    stream = fresh(recipe)
    rows_of(stream, 3)
    [(begun, _)] = recipe.columns.read_ahead(stream.row)
    name = recipe.columns.sources[begun]
    other = "b" if name == "a" else "a"
    history = [(0, {"a": 0.5, "b": 0.5}), (3, {other: 1.0})]
    left = recipe_of({other: sources[other]}, 1, 8, history=history, columns=["a", "b"])
    row = stream.row.copy()
    assert give_up_begun(row[None], recipe.columns, absent=[name]) == 1
    kept = Stream(0, left, row)
    line = line_of(rows_of(kept, 20, 3))
    assert {document[0] for document in left.encoded} == {other}
    assert line[:3] == list(f"{other}{left.encoded[0][1]}:".encode())
    place = recipe.columns.sources.index(name)
    for column in ("epoch", "position", "tokens"):
        assert kept.row[getattr(recipe.columns, column)][place] == stream.row[getattr(recipe.columns, column)][place]


def test_a_source_added_is_drawn_at_once(tmp_path: Path) -> None:
    sources = write(tmp_path, a=[9] * 20, b=[9] * 20)
    alone = recipe_of({"a": sources["a"]}, streams=1, seq_len=8)
    stream = fresh(alone)
    rows_of(stream, 10)
    history = [(0, {"a": 1.0}), (10, {"a": 0.5, "b": 0.5})]
    both = recipe_of(sources, 1, 8, history=history)
    row = both.columns.adopt(stream.row[None], ["a"], 4)[0]
    line_of(rows_of(Stream(0, both, row), 20, 10))
    counts = Counter(document[0] for document in both.encoded)
    assert abs(counts["a"] - counts["b"]) <= 2
    assert not set(both.encoded[1:8]) & set(alone.encoded)  # what was read is not read again in this epoch


def test_columns_go_by_name(tmp_path: Path) -> None:
    sources = write(tmp_path, a=[9] * 20, b=[5] * 20)
    history = [(0, normalise({"a": 1, "b": 2**0.5}, ["a", "b"]))]  # no ties
    recipe = recipe_of(sources, streams=1, seq_len=8, history=history)
    stream = fresh(recipe)
    rows_of(stream, 7)
    swapped = recipe_of({"b": sources["b"], "a": sources["a"]}, 1, 8, history=history)
    row = swapped.columns.adopt(stream.row[None], ["a", "b"], 4)[0]
    assert equal(rows_of(Stream(0, swapped, row), 9, 7), rows_of(stream, 9, 7))


def test_another_tokenizer_skips_the_rest_of_documents_that_were_begun(tmp_path: Path) -> None:
    sources = write(tmp_path, a=[50] * 9)
    recipe = recipe_of(sources, streams=2, seq_len=17)
    streams = [fresh(recipe, index) for index in (0, 1)]
    rows_of(streams[0], 1)
    rows_of(streams[1], 3)  # 51 tokens: the next document is in flight, and nothing of it has been an input
    rows = np.stack([stream.row for stream in streams])
    next_document = recipe.encoded[-1]
    assert give_up_begun(rows, recipe.columns, changed=recipe.columns.sources) == 1
    recipe.encoded.clear()
    begun, untouched = (rows_of(Stream(index, recipe, rows[index]), 3, 3) for index in (0, 1))
    assert line_of(untouched)[:50] == list(next_document.encode())
    assert begun[0].starts[0] == 0
    assert line_of(begun)[:50] == list(recipe.encoded[0 if recipe.encoded[0] != next_document else 1].encode())


@pytest.mark.parametrize("change", [{"max_document_tokens": 5}, {"eos": False}])
def test_a_document_in_flight_that_became_shorter_ends(tmp_path: Path, change: dict) -> None:
    sources = write(tmp_path, a=[29] * 9)
    stream = fresh(recipe_of(sources, streams=1, seq_len=29))
    rows_of(stream, 1)  # only EOS is left of the document
    changed = recipe_of(sources, 1, 29, **change)
    rows = rows_of(Stream(0, changed, stream.row), 5, 1)
    first = changed.encoded[1].encode()[: change.get("max_document_tokens")]
    assert line_of(rows)[: len(first)] == list(first)
    assert rows[0].starts[0] == 0


def test_a_changed_shuffle_window_waits_for_the_next_epoch(tmp_path: Path) -> None:
    sources = write(tmp_path, a=[9] * 12)
    recipe = recipe_of(sources, streams=1, seq_len=10, eos=True, shuffle_window=100)
    stream = fresh(recipe)
    rows_of(stream, 5)
    saved = stream.row.copy()
    changed = recipe_of(sources, 1, 10, shuffle_window=1)
    again = Stream(0, changed, saved)
    assert equal(rows_of(again, 6, 5), rows_of(stream, 6, 5))
    rows_of(again, 13, 11)
    second = [int(document[1 : document.index(":")]) for document in changed.encoded[-13:-1]]
    assert second == sorted(second)
    assert again.row[recipe.columns.window][0] & 0xFFFFFFFF == 1


def test_a_document_in_flight_that_is_no_longer_there_is_an_error(tmp_path: Path) -> None:
    sources = write(tmp_path, a=[50] * 3)
    stream = fresh(recipe_of(sources, streams=1, seq_len=8))
    rows_of(stream, 1)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n" * path.stat().st_size)
    with pytest.raises(ValueError, match="source 'a': no document with a token in"):
        rows_of(Stream(0, recipe_of(sources, streams=1, seq_len=8), stream.row), 1, 1)


def test_produce_gives_each_row_with_the_state_behind_it(tmp_path: Path) -> None:
    sources = write(tmp_path, a=[3, 9, 27, 1, 0, 14])
    recipe = recipe_of(sources, streams=3, seq_len=8)
    which = np.array([0, 1, 2, 0, 1])
    rows, states = produce([fresh(recipe, index) for index in range(3)], np.arange(5), which)
    assert rows.tokens.shape == (5, 9)
    for place, (index, count) in enumerate([(0, 1), (1, 1), (2, 1), (0, 2), (1, 2)]):
        alone = fresh(recipe, index)
        assert np.array_equal(rows_of(alone, count)[-1].tokens, rows.tokens[place : place + 1])
        assert np.array_equal(alone.row, states[place])


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=8).filter(any), st.integers(1, 9), st.integers(1, 30))
def test_rows_made_together_are_those_made_one_by_one(each: list[int], seq_len: int, change_at: int) -> None:
    streams = 3
    with tempfile.TemporaryDirectory() as folder:
        history: History = [(0, {"a": 0.5, "b": 0.5}), (change_at, {"a": 0.2, "b": 0.8})]
        recipe = recipe_of(write(folder, a=each, b=[100, 3]), streams, seq_len, history=history)
        numbers = np.arange(60)
        rows, states = produce([fresh(recipe, index) for index in range(streams)], numbers, numbers % streams)
        for index in range(streams):
            alone = fresh(recipe, index)
            for number in range(index, 60, streams):
                row = alone.next_row(number)
                assert equal([row], [rows.between(number, number + 1)])
                assert np.array_equal(alone.row, states[number])
