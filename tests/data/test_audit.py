"""What a row is made of, found again from a state of before it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fms.data import StreamLoader
from lightning_fms.data.audit import readings
from tests.data.chains import Phase, run_phase, through_disk, write_jsonl, write_litdata

STREAMS, SEQ_LEN = 6, 40


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("audit")
    return {"p": write_jsonl(root / "p", "p", 50), "l": write_litdata(root / "l", 40)}


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@settings(max_examples=10, deadline=None, derandomize=True)
@given(data=st.data())
def test_d12_the_documents_of_a_batch_are_found_again_from_an_earlier_state(sources, packing, data):
    options = {
        "sources": sources, "seq_len": SEQ_LEN, "num_streams": STREAMS, "shuffle_window": 5, "packing": packing,
    }  # fmt: skip
    batch, before = data.draw(st.integers(1, 8)), data.draw(st.integers(0, 9))
    world = data.draw(st.integers(1, batch if batch < STREAMS else STREAMS))
    _, state = run_phase(options, Phase(world, batch, None, before), None, 0)
    rows, _ = run_phase(options, Phase(world, batch, None, 6), state, before * batch)
    wanted = data.draw(st.integers(before, before + 5))
    loader = StreamLoader(**options, global_batch_size=batch, state=through_disk(state))
    made: dict[int, list[int]] = {row: [] for row in range(wanted * batch, (wanted + 1) * batch)}
    for reading in readings(loader, wanted * batch, (wanted + 1) * batch):
        source = loader._sources[reading.source]
        document = source.read(source.listing.names.index(reading.file), reading.start, reading.ref)
        tokens, _, _ = loader._recipe.prepare(document)
        made[reading.row] += tokens[reading.first_token : reading.first_token + reading.tokens].tolist()
    for row, tokens in made.items():
        inputs = np.frombuffer(rows[row][0], np.int64).tolist()
        assert inputs == tokens + [0] * (SEQ_LEN - len(tokens))
    assert loader.state_dict()["header"]["row"] == before * batch


def test_an_audit_of_rows_before_the_state_is_refused(sources):
    options = {"sources": sources, "seq_len": SEQ_LEN, "num_streams": STREAMS}
    _, state = run_phase(options, Phase(1, 4, None, 3), None, 0)
    loader = StreamLoader(**options, global_batch_size=4, state=state)
    with pytest.raises(ValueError, match="row 11 is before row 12, where the state is; take an earlier state"):
        next(readings(loader, 11, 12))
    with pytest.raises(ValueError, match="world_size=2: an audit needs all streams"):
        next(readings(StreamLoader(**options, global_batch_size=4, world_size=2, state=state), 12, 16))
