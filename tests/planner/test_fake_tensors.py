"""What a probe puts in the place of what a GPU would run."""

from collections.abc import Collection, Mapping

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_fms.distributed import activation
from lightning_fms.planner.fused import Graphs
from lightning_fms.planner.tracker import MemoryTracker
from lightning_fms.planning.fake_tensors import _rms_norm
from lightning_fms.planning.subject import _fuse


def test_a_norm_outside_of_blocks_keeps_no_fp32_copy() -> None:
    with FakeTensorMode():
        x = torch.empty(1024, 64, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(64, dtype=torch.bfloat16, requires_grad=True)
        tracker = MemoryTracker()
        tracker.hold([x, weight])
        with tracker:
            before = tracker.current
            output = _rms_norm(torch.rms_norm, x, (64,), weight, 1e-6)
            assert tracker.current - before == output.nbytes + 1024 * 4  # and a scale of each row
            output.sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert (x.grad.shape, weight.grad.shape) == (x.shape, weight.shape)


def test_a_norm_of_real_tensors_is_left_to_torch() -> None:
    x, weight = torch.randn(4, 8), torch.randn(8)
    assert torch.equal(_rms_norm(torch.rms_norm, x, (8,), weight, 1e-6), torch.rms_norm(x, (8,), weight, 1e-6))


class Asked(Graphs):
    """Notes which blocks are to be recomputed within their graph."""

    def fuse(self, blocks: Mapping[str, nn.Module], recomputed: Collection[str] = ()) -> None:
        self.within = sorted(recomputed)


def test_blocks_are_recomputed_within_their_graph_or_around_it_never_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = nn.Linear(2, 2)
    blocks = {"0": nn.Linear(2, 2), "1": nn.Linear(2, 2), "2": apart, "3": nn.Linear(2, 2)}
    monkeypatch.setattr(activation, "kept_by_the_compiler", lambda block: block is apart)
    graphs = Asked()
    _fuse(blocks, graphs, "selective", 2)
    assert graphs.within == ["0"]
    assert [name for name, block in blocks.items() if "forward" in block.__dict__] == ["2"]
