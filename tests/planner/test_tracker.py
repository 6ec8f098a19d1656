"""What the tracker counts, on fake tensors."""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_fms.planner.fused import Graphs
from lightning_fms.planner.tracker import MemoryTracker

KIB = 1024


def kib(*shape: int) -> torch.Tensor:
    """A tensor of so many KiB: the first size counts 256 floats."""
    return torch.empty(shape[0] * 256)


def test_bytes_are_counted_while_tensors_live_and_once_a_memory() -> None:
    with FakeTensorMode(), MemoryTracker() as tracker:
        tracker.phase("first")
        x = kib(8)
        y = x.view(-1, 2)
        assert tracker.current == 8 * KIB
        del x
        assert tracker.current == 8 * KIB
        z = y + 1
        del y, z
        assert tracker.current == 0
        tracker.phase("second")
        kib(2)
        assert tracker.peaks == {"first": 16 * KIB, "second": 2 * KIB}


def test_sizes_are_rounded_as_the_allocator_does() -> None:
    with FakeTensorMode(), MemoryTracker() as tracker:
        x = torch.empty(3)
        assert tracker.current == 512
        del x


def test_memory_that_is_freed_inside_a_storage_is_followed() -> None:
    with FakeTensorMode(), MemoryTracker() as tracker:
        x = kib(4)
        x.untyped_storage().resize_(0)
        assert tracker.current == 0
        x.untyped_storage().resize_(2 * KIB)
        assert tracker.current == 2 * KIB
    assert torch.UntypedStorage.resize_ is MemoryTracker()._resize


def test_what_is_left_out_stays_out() -> None:
    with FakeTensorMode():
        x = kib(4)
        tracker = MemoryTracker()
        tracker.hold([x])
        assert tracker.current == 4 * KIB
        tracker.leave_out([x])
        with tracker, tracker.fused():
            torch.mm(x.view(32, 32), x.view(32, 32))
        assert tracker.current == 0


def test_only_what_leaves_a_fused_kernel_is_counted() -> None:
    with FakeTensorMode():
        x = torch.empty(32, 32)
        tracker = MemoryTracker()
        with tracker, tracker.fused():
            y = x.sin().cos()
            assert tracker.current == 0
            z = y @ y  # a matrix product reads y from memory, and its result is in memory
            assert tracker.current == 2 * 4 * KIB
        del y, z


def test_what_a_kernel_reads_lives_until_it_has_run() -> None:
    with FakeTensorMode():
        x, w = torch.empty(1000, 64), torch.empty(64, 64)
        tracker = MemoryTracker()
        tracker.hold([x, w])
        both = tracker.current
        with tracker, tracker.fused():
            wide = x @ w
            activated = wide.sigmoid()
            del wide
            assert tracker.current == both + 1000 * 64 * 4
            out = activated @ w  # written over `wide`, which nothing else needs
            assert tracker.current == both + 2 * 1000 * 64 * 4
            del activated, out
        assert tracker.current == both


def test_meta_tensors_take_no_memory() -> None:
    with FakeTensorMode(), MemoryTracker() as tracker:
        x = torch.empty(1000, device="meta")
        assert tracker.current == 0
        del x


class Gated(nn.Module):
    """A block whose eager backward keeps more than a compiler's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.up(x)
        return x + self.down(torch.nn.functional.silu(wide) * wide.sigmoid())


def kept(fuse: bool, rows: int = 128, recomputed: Collection[str] = ()) -> int:
    """Bytes that the forward of two blocks leaves for the backward."""
    graphs = Graphs()
    with FakeTensorMode():
        blocks = {"0": Gated(), "1": Gated()}
        if fuse:
            graphs.fuse(blocks, recomputed)
        x = torch.empty(rows, 64, requires_grad=True)
        for block in blocks.values():  # traces, outside of the tracker
            block(x).sum().backward()
        graphs.tracker.hold([x, *(p for block in blocks.values() for p in block.parameters())])
        with graphs.tracker as tracker:
            before = tracker.current
            y = blocks["1"](blocks["0"](x)).sum()
            after = tracker.current - before
            y.backward()
            return after


def test_a_fused_block_keeps_less_than_an_eager_one() -> None:
    wide, narrow, loss = 128 * 256 * 4, 128 * 64 * 4, 512
    # `wide` and what `down` multiplies; the compiler computes the two activations of `wide` again.
    assert kept(fuse=True) == 2 * 2 * wide + narrow + loss
    assert kept(fuse=False) == 2 * 4 * wide + narrow + loss


def test_a_recomputed_block_keeps_its_input_only() -> None:
    narrow, loss = 128 * 64 * 4, 512
    assert kept(fuse=True, recomputed=("0", "1")) == narrow + loss


class _Rounded(torch.autograd.Function):
    """A product that rounds its weight in another way for the backward, as FP8 layers do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x @ weight.bfloat16()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (weight,) = ctx.saved_tensors
        return grad @ (2 * weight).bfloat16().t(), None


class Rounding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Rounded.apply(x, self.weight)


def test_nothing_is_kept_that_follows_from_parameters() -> None:
    """They outlive the graph, so a compiler rounds them in the backward, although what comes out is smaller than they are."""
    graphs = Graphs()
    with FakeTensorMode():
        block = Rounding()
        graphs.fuse({"0": block})
        x = torch.empty(8, 64, dtype=torch.bfloat16, requires_grad=True)
        block(x).sum().backward()
        graphs.tracker.hold([x, block.weight])
        with graphs.tracker as tracker:
            before = tracker.current
            output = block(x)
            assert tracker.current - before == output.nbytes


def test_what_is_kept_for_backward_goes_while_it_runs() -> None:
    graphs, wide = Graphs(), 128 * 256 * 4
    with FakeTensorMode():
        block = Gated()
        graphs.fuse({"0": block})
        x = torch.empty(128, 64, requires_grad=True)
        block(x).sum().backward()
        x.grad = block.up.weight.grad = block.down.weight.grad = None
        graphs.tracker.hold([x, *block.parameters()])
        with graphs.tracker as tracker:
            loss = block(x).sum()
            before = tracker.current
            tracker.phase("backward")
            loss.backward()
        # Its gradient and the wide one beside what was kept: three, where four were held at once.
        assert tracker.peaks["backward"] - before < 2 * wide


def test_fused_blocks_give_gradients_of_the_right_shapes() -> None:
    graphs = Graphs()
    with FakeTensorMode():
        block = Gated()
        graphs.fuse({"0": block})
        x = torch.empty(8, 64, requires_grad=True)
        for _ in range(3):
            x.grad = None
            block(x).sum().backward()
            assert x.grad is not None
            assert x.grad.shape == x.shape
        assert block.up.weight.grad is not None
        assert block.up.weight.grad.shape == (256, 64)
