"""Resume costs the same wherever the run is: it seeks, and reads a document in flight again, and nothing else."""

import numpy as np
import pytest
import torch

from lightning_fms.data import State, StreamLoader
from lightning_fms.data.cursor import LOOK_AHEAD, Columns
from lightning_fms.data.segments import SourceOrder
from lightning_fms.data.stream import Stream
from tests.data.synthetic import Synthetic

STREAMS = 16
MILLION = 1_000_000


def source() -> Synthetic:
    return Synthetic(files=1, documents=MILLION, lengths=np.full(1, 100))


def at(fraction: float, packing: str) -> State:
    """The state of a run that has read this part of its first epoch."""
    state = StreamLoader({"a": source()}, 64, STREAMS, packing=packing).state_dict()
    order = SourceOrder(source(), "a", 0, STREAMS)
    for stream, row in enumerate(state["rows"]):
        segment = order.segment(stream, 0, 4096)
        found = segment.find(int(fraction * segment.windows) << 32 | 1234)
        assert found is not None
        row[Columns(["a"]).position] = torch.tensor([found[0]])
    return state


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_d5_the_first_batch_costs_the_same_at_any_position(packing: str) -> None:
    costs = []
    for state in (None, at(0.5, packing), at(0.9, packing)):
        data = source()
        loader = StreamLoader({"a": data}, 64, STREAMS, packing=packing, state=state)
        assert data.windows == data.reads == 0
        next(iter(loader))
        costs.append((data.windows, data.reads))
    assert len({reads for _, reads in costs}) == 1
    assert costs[0][1] <= STREAMS * (1 if packing == "concat" else LOOK_AHEAD)
    assert max(windows for windows, _ in costs) <= 2 * STREAMS, "a look-ahead may reach into the next window"


@pytest.mark.parametrize(("packing", "again"), [("concat", 1), ("best_fit", LOOK_AHEAD)])
def test_d5_a_resume_reads_a_document_a_stream_again_or_its_look_ahead(packing: str, again: int) -> None:
    def run(resumes: tuple[int, ...]) -> tuple[list[np.ndarray], int]:
        data = Synthetic(1, MILLION, np.arange(1, 300, 7))
        streams = StreamLoader({"a": data}, 64, STREAMS, packing=packing).streams()
        for step in range(60):
            if step in resumes:
                streams = [Stream(stream.index, stream.recipe, stream.row) for stream in streams]
            for stream in streams:
                stream.next_row(step * STREAMS + stream.index)
        return [stream.row for stream in streams], data.reads

    rows, reads = run(())
    resumed, total = run((1, 10, 31))
    assert np.array_equal(rows, resumed)
    assert reads < total <= reads + 3 * STREAMS * again
