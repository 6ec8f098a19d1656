"""Shares of tokens: each stream within two of the longest documents of its weights, the run within 1 % soon."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fms.data import StreamLoader
from lightning_fms.data.cursor import Columns
from lightning_fms.data.mixture import parse
from lightning_fms.data.packing import BestFit, Concat
from lightning_fms.data.stream import Recipe, Stream
from lightning_fms.data.tokenizer import ByteTokenizer
from tests.data.synthetic import Synthetic

NAMES = ("a", "b", "c", "d")


def lengths(seed: int, longest: int, scale: float = 4.0) -> np.ndarray:
    """Log-normal, as those of real corpora are: the mean is far above the median."""
    return np.clip(np.random.default_rng(seed).lognormal(scale, 1.2, 997), 1, longest).astype(np.int64)


class Drawn(Synthetic):
    """Notes what is drawn of all sources, in order."""

    def __init__(self, number: int, log: list[tuple[int, int]], **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.number, self.log = number, log

    def read(self, file: int, start: int, number: int) -> np.ndarray:
        document = super().read(file, start, number)
        self.log.append((self.number, len(document) + 1))
        return document


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_d7_a_stream_is_near_its_shares_through_changes_and_ends_of_sources(packing: str, data: st.DataObject) -> None:
    """From a change on, or the end of a source, whichever was last, the stream's draws are within the bound."""
    longest, streams, log = 700, 4, list[tuple[int, int]]()
    sources = {
        name: Drawn(i, log, files=2, documents=30 if name == "d" else 5000, lengths=lengths(i, longest))
        for i, name in enumerate(NAMES)
    }
    weights = [{name: data.draw(st.integers(1, 9)) for name in NAMES} for _ in range(3)]
    changes = {0: weights[0], 30 * streams: weights[1], 75 * streams: weights[2]}
    history = parse(changes, dict.fromkeys(NAMES, 1))
    recipe = Recipe(
        sources, Columns(NAMES), ByteTokenizer(), history, {"concat": Concat, "best_fit": BestFit}[packing](256), 3, streams,
        max_epochs={"d": 1},
    )  # fmt: skip
    index = data.draw(st.integers(0, streams - 1))
    stream = Stream(index, recipe, recipe.columns.fresh(streams, 64)[index])
    draws: list[tuple[int, int, int]] = []
    for row in range(130):
        log.clear()
        stream.next_row(row * streams + index)
        draws += [(row, *draw) for draw in log]
    last = max((i for i, (_, source, _) in enumerate(draws) if source == 3), default=-1)
    ended = stream.row[recipe.columns.epoch][3] == 1
    assert not any(source == 3 for _, source, _ in draws[last + 1 :])
    shares, count, before = np.zeros(4), np.zeros(4), -1
    for i, (row, source, tokens) in enumerate(draws):
        now = sum(row >= first // streams for first in changes)
        if now != before or (ended and i == last + 1):
            shares, count = np.array(list(weights[now - 1].values()), dtype=float), np.zeros(4)
            shares[3] *= not (ended and i > last)
            before = now
        count[source] += tokens
        assert np.abs(count - shares / shares.sum() * count.sum()).max() <= 2 * (longest + 1)


def test_d7_the_run_is_within_one_percent_after_a_hundred_million_tokens() -> None:
    """Scaled: documents of up to 1,000 tokens instead of 20,000 and 5 million tokens instead of 100.

    The weights change after the first 5 million; one source ends before that.
    """
    sources = {
        name: Synthetic(files=4, documents=200 if name == "d" else 50_000, lengths=lengths(i, 1000, 4.5))
        for i, name in enumerate(NAMES)
    }
    streams, seq_len, steps = 64, 4096, 20
    mixture = {0: {"a": 6, "b": 2, "c": 1, "d": 1}, steps * streams: {"a": 1, "b": 2, "c": 6, "d": 1}}
    loader = StreamLoader(sources, seq_len, streams, mixture=mixture, max_epochs={"d": 1})
    batches, reports = iter(loader), [{name: {"tokens": 0.0} for name in NAMES}]
    for weights in ((6, 2, 1), (1, 2, 6)):
        for _ in range(steps):
            next(batches)
        while loader.state_dict()["header"]["row"] % (steps * streams):  # a step counts when the next one is asked for
            next(batches)
        reports.append(loader.mix_report())
        used = np.array([reports[-1][name]["tokens"] - reports[-2][name]["tokens"] for name in NAMES[:3]])
        assert used.sum() > 4.9e6
        assert np.abs(used / used.sum() - np.array(weights) / sum(weights)).max() < 0.01
        assert reports[-1]["d"]["epoch"] == 1
