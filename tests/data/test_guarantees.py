"""The guarantees of the data layer, on chains of runs that change everything that may change.

Legend: W data ranks, B rows a step, S streams, g row number, T seq_len.
"""

import litdata
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fms.data import StreamLoader, merge_states
from lightning_fms.data.cursor import Columns
from lightning_fms.data.segments import SourceOrder
from lightning_fms.data.tokenizer import ByteTokenizer
from tests.data.chains import Phase, document, run_phase, through_disk, write_jsonl, write_litdata

STREAMS = 8
SEQ_LEN = 48


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Options of loaders over jsonl, litdata and both, by name."""
    root = tmp_path_factory.mktemp("corpora")
    prose, code = write_jsonl(root / "p", "p", 70), write_jsonl(root / "c", "c", 40)
    chunks = write_litdata(root / "l", 60)
    common = {"seq_len": SEQ_LEN, "num_streams": STREAMS, "shuffle_window": 5, "seed": 3}
    return {
        "jsonl": {"sources": {"p": prose}, **common},
        "litdata": {"sources": {"l": chunks}, **common},
        "mixed": {"sources": {"p": prose, "c": code, "l": chunks}, "mixture": {"p": 3, "c": 1, "l": 2}, **common},
        "scheduled": {
            "sources": {"p": prose, "c": code},
            "mixture": {0: {"p": 3, "c": 1}, 40: {"p": 1, "c": 3}},
            "bos": False, "eos": True, "mask_first": True, **common,
        },
    }  # fmt: skip


@st.composite
def phases(draw):
    chain = []
    for _ in range(draw(st.integers(1, 4))):
        world = draw(st.integers(1, 7))
        chain.append(
            Phase(
                world=world,
                batch=draw(st.integers(world, 20)),
                micro=draw(st.one_of(st.none(), st.integers(1, 4))),
                steps=draw(st.integers(1, 6)),
            )
        )
    return chain


def run_chain(options, chain):
    """Run the phases one after the other through saved states; return all rows by number and the last state."""
    rows, state, first_row = {}, None, 0
    for phase in chain:
        new, state = run_phase(options, phase, state, first_row)
        assert not set(new) & set(rows)
        rows.update(new)
        first_row += phase.batch * phase.steps
        state = through_disk(state)
        assert state["header"]["row"] == first_row
    return rows, state


@pytest.mark.parametrize("name", ["jsonl", "litdata", "mixed", "scheduled"])
@settings(max_examples=20, deadline=None, derandomize=True)
@given(chain=phases())
def test_d2_same_batches_for_every_chain_of_ranks_and_batch_sizes(corpora, name, chain):
    rows, state = run_chain(corpora[name], chain)
    total = sum(phase.batch * phase.steps for phase in chain)
    uninterrupted, end = run_phase(corpora[name], Phase(world=1, batch=1, micro=None, steps=total), None, 0)
    assert rows == uninterrupted
    assert torch.equal(state["rows"], end["rows"])


@pytest.mark.parametrize("name", ["jsonl", "litdata", "mixed"])
def test_d2_same_batches_for_any_number_of_workers(corpora, name):
    chain = [
        Phase(2, 9, 2, 5, workers=2),
        Phase(1, 12, None, 6, workers=1),
        Phase(3, 7, 1, 4),
        Phase(1, 8, 3, 40, workers=2),
    ]
    rows, _ = run_chain(corpora[name], chain)
    total = sum(phase.batch * phase.steps for phase in chain)
    assert rows == run_phase(corpora[name], Phase(1, 1, None, total), None, 0)[0]


def test_d2_same_batches_from_spawned_workers(corpora):
    rows, _ = run_chain(corpora["mixed"], [Phase(1, 9, 2, 5, workers=1, context="spawn")])
    assert rows == run_phase(corpora["mixed"], Phase(1, 1, None, 45), None, 0)[0]


@pytest.mark.parametrize("name", ["jsonl", "litdata", "mixed"])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(chain=phases())
def test_d1_every_token_of_every_document_exactly_once(corpora, name, chain):
    options = corpora[name]
    rows, _ = run_chain(options, [*chain, Phase(world=1, batch=STREAMS, micro=None, steps=12)])
    sources = StreamLoader(**options, global_batch_size=STREAMS)._sources
    orders = {source: SourceOrder(opened, source, options["seed"], STREAMS) for source, opened in sources.items()}
    for stream in range(STREAMS):
        line = np.concatenate([np.frombuffer(rows[g][0], np.int64) for g in sorted(rows) if g % STREAMS == stream])
        targets = np.concatenate([np.frombuffer(rows[g][1], np.int64) for g in sorted(rows) if g % STREAMS == stream])
        assert np.array_equal(targets[:-1], line[1:])  # every token but the first is a target once, too
        read = bytes_of_documents(line)
        for source, order in orders.items():
            mine = [text for text in read if text.startswith(source)]
            assert mine == expected_documents(order, stream, options["shuffle_window"], len(mine))
    for source, order in orders.items():  # and the streams' orders share out each epoch without rest
        for epoch in (0, 1):
            everything = [text for s in range(STREAMS) for text in epoch_documents(order, s, epoch, 5)]
            assert sorted(everything) == sorted(document(source, n) for n in range(len(everything)))
            assert len(everything) == {"p": 70, "c": 40, "l": 60}[source]


def bytes_of_documents(line):
    """Split a stream's line at the end-of-document token; the last document may be unfinished."""
    ends = np.flatnonzero(line == 256)
    return [part[part < 256].astype(np.uint8).tobytes().decode() for part in np.split(line, ends)][: len(ends)]


def epoch_documents(order, stream, epoch, shuffle_window):
    segment, position, texts = order.segment(stream, epoch, shuffle_window), 0, []
    while (found := segment.find(position)) is not None:
        content = segment.read(*found[1:])
        texts.append(content if isinstance(content, str) else bytes(content[:-1].astype(np.uint8)).decode())
        position = found[0] + 1
    return texts


def expected_documents(order, stream, shuffle_window, count):
    """Return the first documents that a stream must read of a source, over as many epochs as it takes."""
    texts, epoch = [], 0
    while len(texts) < count:
        texts += epoch_documents(order, stream, epoch, shuffle_window)
        epoch += 1
    return texts[:count]


@pytest.mark.parametrize("name", ["jsonl", "mixed"])
@pytest.mark.parametrize("steps", [0, 1, 9, 150])  # at the start, fewer steps than workers, inside and beyond epoch 3
@pytest.mark.parametrize("workers", [0, 2])
def test_d3_loaded_state_is_the_state(corpora, name, steps, workers):
    _, state = run_phase(corpora[name], Phase(1, STREAMS, None, steps), None, 0)
    loaders = [
        StreamLoader(
            **corpora[name],
            global_batch_size=STREAMS,
            rank=r,
            world_size=3,
            num_workers=workers,
            state=through_disk(state),
        )
        for r in range(3)
    ]
    again = merge_states([loader.state_dict() for loader in loaders])
    changing = {"accumulate"}
    assert {k: v for k, v in again["header"].items() if k not in changing} == {
        k: v for k, v in state["header"].items() if k not in changing
    }
    assert torch.equal(again["rows"], state["rows"])
    if steps == 150:
        assert state["rows"][:, 0].min() >= 3  # epoch of the first source


def test_d3_state_is_small_and_independent_of_the_data(tmp_path):
    sizes = []
    for count in (50, 5000):
        sources = {name: write_jsonl(tmp_path / f"{name}{count}", name, count) for name in "abcd"}
        loader = StreamLoader(sources, seq_len=16, global_batch_size=8, num_streams=1024)
        sizes.append(loader.state_dict()["rows"].nbytes)
    assert sizes[0] == sizes[1] <= 256 * 1024


@settings(max_examples=60, deadline=None, derandomize=True)
@given(chain=phases())
def test_d10_every_rank_yields_the_same_number_of_micro_batches(corpora, chain):
    phase = chain[0]
    loaders = [
        StreamLoader(
            **corpora["jsonl"],
            global_batch_size=phase.batch,
            micro_batch_size=phase.micro,
            rank=r,
            world_size=phase.world,
        )
        for r in range(phase.world)
    ]
    counts = set()
    for loader in loaders:
        lasts = []
        for micro in loader.micro_batches():
            lasts.append(micro.last)
            assert micro.batch["input_ids"].shape[0] == loader.slots.micro_rows <= (phase.micro or phase.batch)
            assert (micro.batch["labels"] != -100).any(), "a micro-batch without labels has a NaN loss"
            assert int(micro.batch["row_valid"].sum()) == micro.rows
            if sum(lasts) == phase.steps:
                break
        counts.add((len(lasts), tuple(lasts)))
    assert len(counts) == 1


def test_second_iteration_goes_on_behind_the_last_batch_taken(corpora):
    loader = StreamLoader(**corpora["jsonl"], global_batch_size=4)
    whole = [
        b["input_ids"] for b, _ in zip(StreamLoader(**corpora["jsonl"], global_batch_size=4), range(6), strict=False)
    ]
    first = [b["input_ids"] for _, b in zip(range(3), loader, strict=False)]
    taken = loader.state_dict()["header"]["row"] // 4
    second = [b["input_ids"] for _, b in zip(range(6 - taken), loader, strict=False)]
    assert all(torch.equal(a, b) for a, b in zip(whole, first[:taken] + second, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_state_loaded_during_iteration_is_refused_not_ignored(corpora, workers):
    loader = StreamLoader(**corpora["jsonl"], global_batch_size=4, num_workers=workers)
    state = loader.state_dict()
    next(iter(loader))
    with pytest.raises(RuntimeError, match="being iterated"):
        loader.load_state_dict(state)
    loader.close()
    loader.load_state_dict(state)
    assert loader.state_dict()["header"]["row"] == 0


def _rows(options, steps, state=None):
    return run_phase(options, Phase(2, STREAMS, None, steps), state, state["header"]["row"] if state else 0)


def test_the_order_of_the_config_does_not_matter(corpora):
    options = corpora["mixed"]
    turned = {**options, "sources": dict(reversed(options["sources"].items()))}
    assert _rows(options, 6)[0] == _rows(turned, 6)[0]


def test_a_change_of_bos_at_resume_gives_up_documents_in_flight_and_nothing_else(corpora, tmp_path):
    class WithBos(ByteTokenizer):
        vocab_size, bos_id = 258, 257

    options = {**corpora["jsonl"], "tokenizer": WithBos()}
    _, state = _rows(options, 5)
    changed = StreamLoader(**options, bos=True, global_batch_size=STREAMS, state=state)
    flights = [stream for stream in range(STREAMS) if int(state["rows"][stream, Columns(["p"]).offset]) > 0]
    assert changed.skipped_documents == len(flights) > 0
    assert StreamLoader(**options, global_batch_size=STREAMS, state=state).skipped_documents == 0


def test_a_source_whose_max_epochs_are_raised_at_resume_does_not_catch_up(corpora):
    options = corpora["mixed"]
    _, state = _rows({**options, "max_epochs": {"c": 1}}, 60)
    loader = StreamLoader(**options, max_epochs={"c": 3}, global_batch_size=STREAMS, state=state)
    before = loader.mix_report()["c"]["tokens"]
    for _ in zip(range(40), loader, strict=False):
        pass
    share = (loader.mix_report()["c"]["tokens"] - before) / (40 * STREAMS * SEQ_LEN)
    assert share == pytest.approx(1 / 6, abs=0.05)


def test_tokens_of_another_vocabulary_are_refused_not_trained(tmp_path):
    chunks = tmp_path / "chunks"
    litdata.optimize(
        fn=_large_ids, inputs=[0], output_dir=str(chunks), chunk_bytes=2000, num_workers=1, start_method="fork",
        item_loader=litdata.TokensLoader(block_size=16), verbose=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"token ids from 31999 to 31999 are not all in \[0, 257\)"):
        next(iter(StreamLoader({"l": chunks}, seq_len=8, global_batch_size=1)))


def _large_ids(_):
    yield torch.full((30,), 31999, dtype=torch.int32)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_document_is_one_message_also_from_a_worker_and_at_resume(tmp_path, workers):
    folder = write_jsonl(tmp_path / "p", "p", 20, files=1)
    options = {"sources": {"p": folder}, "seq_len": 16, "global_batch_size": 2}
    _, state = run_phase({k: v for k, v in options.items() if k != "global_batch_size"}, Phase(1, 2, None, 3), None, 0)
    file = next(folder.iterdir())
    file.write_text(file.read_text().replace('"text"', '"txet"'))
    loader = StreamLoader(**options, num_workers=workers, state=state)
    with pytest.raises(ValueError, match=r"^source 'p': .* has no key 'text'") as caught:
        for _ in zip(range(50), loader, strict=False):
            pass
    assert "Traceback" not in str(caught.value)


def test_a_tokenizer_without_eos_is_refused_where_documents_should_end_with_it(corpora):
    class NoEos(ByteTokenizer):
        eos_id = None

    with pytest.raises(ValueError, match="set eos=false"):
        StreamLoader(**{**corpora["jsonl"], "tokenizer": NoEos()}, global_batch_size=4)
    StreamLoader(**{**corpora["jsonl"], "tokenizer": NoEos()}, eos=False, global_batch_size=4)


def test_caps_that_would_end_the_data_are_refused_at_the_start(corpora):
    with pytest.raises(ValueError, match="limits every source with a weight from row 0 on"):
        StreamLoader(**{**corpora["mixed"], "mixture": {"p": 1}}, max_epochs={"p": 1}, global_batch_size=4)


def test_caps_are_of_what_comes_and_not_of_what_was(corpora):
    options = corpora["mixed"]
    alone = {**options, "sources": {"p": options["sources"]["p"]}, "mixture": {"p": 1}}
    _, state = _rows(alone, 5)
    both = {**options, "sources": {name: options["sources"][name] for name in "pc"}, "mixture": {"p": 1, "c": 1}}
    loader = StreamLoader(**both, max_epochs={"p": 2}, global_batch_size=STREAMS, state=state)
    assert loader.mix_report()["c"]["target"] == 0.5


def test_the_order_of_weights_does_not_matter_at_resume_either(corpora):
    options = {
        **corpora["mixed"],
        "mixture": {"p": 0.1, "c": 0.2, "l": 0.3},
    }  # their sum depends on the order, in its last bit
    options["sources"] = {name: options["sources"][name] for name in options["mixture"]}
    whole, _ = _rows(options, 12)
    begin, state = _rows(options, 5)
    rest, _ = _rows({**options, "mixture": dict(reversed(options["mixture"].items()))}, 7, state)
    assert {**begin, **rest} == whole


@pytest.mark.parametrize("documents", [0, 1 << 31, 10**10])
def test_a_shuffle_window_that_the_state_cannot_hold_is_refused(corpora, documents):
    with pytest.raises(ValueError, match=f"shuffle_window={documents} (is more|must be)"):
        StreamLoader(**{**corpora["jsonl"], "shuffle_window": documents}, global_batch_size=4)


@pytest.mark.parametrize("option", [{"seed": None}, {"seed": 1.0}, {"num_workers": 1.5}, {"num_workers": -1}])
def test_what_must_be_a_whole_number(corpora, option):
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=f"{name}={value} must be a whole number"):
        StreamLoader(**{**corpora["jsonl"], **option}, global_batch_size=4)
