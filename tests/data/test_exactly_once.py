"""Each token of each document once an epoch, over every format, packing, mixture and tokenizer, on changing ranks."""

from collections.abc import Iterator

import pytest
from hypothesis import Phase as Stage
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fms.data.sources import lines
from tests.data import corpora
from tests.data.chains import Phase
from tests.data.corpora import FORMATS, Corpus
from tests.data.ledger import Ledger
from tests.data.test_tokenizer import train

# Failing chains are reported as they are: making them smaller takes minutes.

STREAMS = 8
COMMON = {"num_streams": STREAMS, "shuffle_window": 5, "seed": 3}
PACKINGS = ("concat", "best_fit", "none")


@pytest.fixture(scope="module")
def every_format(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Corpus]]:
    root = tmp_path_factory.mktemp("formats")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "BLOCK_BYTES", corpora.BLOCK)
        yield {
            kind: corpora.write(root / f"{i}", kind, chr(97 + i), count=40, files=3) for i, kind in enumerate(FORMATS)
        }


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train(path, ["<|endoftext|>", "<s>"])
    return str(path)


def phases(workers: int = 0) -> st.SearchStrategy[Phase]:
    def phase(world: int) -> st.SearchStrategy[Phase]:
        return st.builds(
            Phase, st.just(world), st.integers(world, 20), st.one_of(st.none(), st.integers(1, 4)), st.integers(0, 5),
            st.just(workers),
        )  # fmt: skip

    return st.integers(1, 7).flatmap(phase)


def run(corpus: dict[str, Corpus], options: dict, chain: list[Phase], epochs: int = 2) -> None:
    """Run a chain, then on until every source has finished some epochs, and close the ledger."""
    ledger = Ledger(corpus)
    options = {"sources": list(corpus), **COMMON, **options}
    for phase in chain:
        ledger.run(options, phase)
    while not ledger.state or min(ledger.epochs().values()) < epochs:
        assert ledger.row < 5000, "an epoch does not end"
        ledger.run(options, Phase(1, 24, None, 7))
    ledger.close()
    assert not ledger.lost
    assert not ledger.over


@pytest.mark.parametrize("kind", FORMATS)
@settings(max_examples=4, deadline=None, derandomize=True, phases=[Stage.generate])
@given(data=st.data())
def test_d1_each_token_once_an_epoch_in_every_format(
    every_format: dict[str, Corpus], bpe: str, kind: str, data: st.DataObject
) -> None:
    options = {
        "packing": data.draw(st.sampled_from(PACKINGS)),
        "tokenizer": data.draw(st.sampled_from(["bytes", bpe])),
        "seq_len": data.draw(st.sampled_from([12, 48, 200])),
        "max_document_tokens": data.draw(st.sampled_from([None, 30])),
    }
    run({kind: every_format[kind]}, options, data.draw(st.lists(phases(), min_size=1, max_size=3)))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("mixture", [None, "constant", "scheduled"])
@settings(max_examples=2, deadline=None, derandomize=True, phases=[Stage.generate])
@given(data=st.data())
def test_d1_each_token_once_an_epoch_of_every_source_of_a_mixture(
    every_format: dict[str, Corpus], bpe: str, packing: str, mixture: str | None, data: st.DataObject
) -> None:
    kinds = data.draw(st.lists(st.sampled_from(FORMATS), min_size=2, max_size=3, unique=True))
    weights = {kind: data.draw(st.integers(1, 4)) for kind in kinds}
    turned = dict(zip(weights, reversed(weights.values()), strict=True))
    options = {
        "packing": packing, "seq_len": 48, "tokenizer": data.draw(st.sampled_from(["bytes", bpe])),
        "mixture": {None: None, "constant": weights, "scheduled": {0: weights, 30: turned, 77: weights}}[mixture],
    }  # fmt: skip
    chain = data.draw(st.lists(phases(), min_size=1, max_size=3))
    run({kind: every_format[kind] for kind in kinds}, options, chain, epochs=1)


@pytest.mark.parametrize("packing", PACKINGS)
def test_d1_each_token_once_an_epoch_with_workers(every_format: dict[str, Corpus], packing: str) -> None:
    kinds = ("jsonl", "parquet", "litdata", "memory")
    chain = [
        Phase(2, 9, 2, 3, workers=2),
        Phase(3, 7, None, 2, workers=1),
        Phase(1, 12, 5, 3),
        Phase(1, 8, 3, 9, workers=2),
    ]
    options = {"packing": packing, "seq_len": 48}
    run({kind: every_format[kind] for kind in kinds}, options, chain, epochs=1)


def test_the_ledger_notices_a_document_lost_and_one_repeated(every_format: dict[str, Corpus]) -> None:
    whole = every_format["jsonl"]
    with pytest.raises(AssertionError, match="0 of None"):
        run({"jsonl": Corpus(whole.spec, [*whole.documents, "one more"])}, {"seq_len": 48}, [])
    ledger = Ledger({"jsonl": whole})
    options = {"sources": ["jsonl"], "seq_len": 48, **COMMON}
    ledger.run(options, Phase(1, 8, None, 2))
    ledger.state = None
    with pytest.raises(AssertionError, match="goes on at token"):
        ledger.run(options, Phase(1, 8, None, 2))
