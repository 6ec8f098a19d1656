"""Resumes where others lose their place: late epochs, the last row of one, sources of unequal size, new weights; odd sizes."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from lightning_fms.data import State, StreamLoader
from lightning_fms.data.audit import readings
from lightning_fms.data.cursor import Columns
from lightning_fms.data.packing import BestFit, Concat
from lightning_fms.data.segments import WINDOW_BYTES, SourceOrder
from lightning_fms.data.stream import Recipe, Stream
from lightning_fms.data.tokenizer import ByteTokenizer
from tests.data import corpora
from tests.data.chains import Phase, through_disk
from tests.data.ledger import Ledger
from tests.data.synthetic import Synthetic

FIXED = {"seed": 3, "shuffle_window": 5, "seq_len": 24}


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_resumed_in_the_third_epoch_the_rest_of_it_comes_once_and_the_next_two_are_whole(
    tmp_path: Path, packing: str
) -> None:
    ledger = Ledger({"a": corpora.write(tmp_path / "a", "jsonl", "a", 128)})
    options = {**FIXED, "sources": ["a"], "num_streams": 4, "packing": packing, "seq_len": 100}
    ledger.run(options, Phase(2, 4, None, 1))
    while ledger.epochs()["a"] < 2:
        ledger.run(options, Phase(2, 4, None, 5))
    for workers in (0, 1):
        ledger.run(options, Phase(1, 4, 2, 2, workers=workers))
    while ledger.epochs()["a"] < 5:
        ledger.run(options, Phase(3, 4, 2, 9))
    ledger.close()


def test_saved_at_the_last_row_of_an_epoch_the_next_one_begins() -> None:
    def loader(state: State | None = None) -> StreamLoader:
        return StreamLoader(
            {"a": Synthetic(1, 512, np.full(1, 7))}, 8, 1, state=state
        )  # with EOS, a document fills a row

    first = loader()
    assert len(list(islice(first, 512))) == 512
    state = through_disk(first.state_dict())
    assert state["header"]["row"] == 512
    assert state["rows"][0, Columns(["a"]).epoch].tolist() == [0]
    read = [(reading.epoch, reading.ref) for reading in readings(loader(state), 512, 1024)]
    assert sorted(read) == [(1, number) for number in range(512)]


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_sources_of_unequal_size_end_their_epochs_each_for_itself(tmp_path: Path, packing: str) -> None:
    sizes = {"a": 10, "b": 100}
    ledger = Ledger(
        {name: corpora.write(tmp_path / name, "jsonl", name, count, files=1) for name, count in sizes.items()}
    )
    options = {**FIXED, "sources": list(sizes), "num_streams": 4, "packing": packing, "mixture": {"a": 7, "b": 3}}
    ledger.run(options, Phase(1, 8, None, 3))
    while ledger.epochs()["b"] < 2:
        ledger.run(options, Phase(2, 12, 3, 20))
    assert ledger.epochs()["a"] > 8
    ledger.close()


def test_new_weights_at_a_resume_are_followed_at_once_and_nothing_is_repeated() -> None:
    def loader(mixture: dict, state: State | None = None) -> StreamLoader:
        sources = {name: Synthetic(1, 1000, np.arange(1, 60)) for name in "ab"}
        return StreamLoader(sources, 64, 4, mixture=mixture, state=state)

    first = loader({"a": 1, "b": 1})
    for _ in islice(first, 50):
        pass
    state = first.state_dict()
    row = state["header"]["row"]
    before = list(readings(loader({"a": 1, "b": 1}), 0, row))
    after = list(readings(loader({"a": 2, "b": 1}, state), row, row + 200))
    begun = [(r.source, r.epoch, r.ref) for r in before + after if r.first_token == 0]
    assert len(begun) == len(set(begun))
    share = sum(r.tokens for r in after if r.source == "a") / sum(r.tokens for r in after)
    assert share == pytest.approx(2 / 3, abs=0.03)


def test_one_file_is_shared_by_all_streams_and_searched_once_an_epoch() -> None:
    """Whatever the number of ranks and workers, which share out streams: none idles, and nothing is read twice."""
    source = Synthetic(1, 100_000, np.full(1, 10))
    order, streams = SourceOrder(source, "a", 0, 16), 16
    found = []
    for stream in range(streams):
        segment, position = order.segment(stream, 0, 4096), 0
        for _ in range(100_000):
            if (document := segment.find(position)) is None:
                break
            position = document[0] + 1
            found.append(document[3])
        assert len(found) >= (stream + 1) * 6249
    assert sorted(found) == list(range(100_000))
    assert source.searched == 100_000
    assert source.windows <= streams + -(-100_000 * source.spacing // WINDOW_BYTES)


@pytest.mark.parametrize("packing", [Concat, BestFit])
def test_a_document_of_ten_million_tokens_is_read_once_and_cut_into_rows(packing: type) -> None:
    source = Synthetic(1, 1, np.full(1, 10_000_000), token=7)
    recipe = Recipe(
        {"a": source}, Columns(["a"]), ByteTokenizer(), [(0, {"a": 1.0})], packing(2048), 0, 1, max_epochs={"a": 1}, one_pass=True
    )  # fmt: skip
    stream = Stream(0, recipe, recipe.columns.fresh(1, 4096)[0])
    rows = [stream.next_row(number) for number in range(4884)]
    assert source.reads == 1
    assert sum(int((row.tokens[0, :2048] == 7).sum()) for row in rows) == 10_000_000
    assert not any(row.known[0] for row in rows[4883:])
    assert stream.row[recipe.columns.tokens].tolist() == [10_000_001]
