"""Activation offload: what a block saves for its backward waits in pinned host memory, and is back before it is needed.

Saved activations grow with rows and layers, while each is used twice, far apart. Hooks on autograd's saved tensors move them:

    compute      | block 1 | block 2 | block 3 | ...  | backward 3 | backward 2 |
    to the host            |  1 ...  |  2 ...  |
    to the device                                     |   2 ...    |   1 ...    |

Copies run on a stream of their own beside the next block, so a step takes longer only where the bus is slower than a block.
`torch.autograd.graph.save_on_cpu` copies in line with the compute, and weights as well; here parameters, and views of them, stay
(FSDP frees them itself), and so do small tensors, views with gaps, and tensor subclasses (DTensor, FP8). The last block keeps
its own: they are needed at once.

A page holds what one call of a block saved. Its tensors on the device are let go one block later, when the compute stream has
waited for their copies: memory is then reused in the order of streams, the host never waits, and at most two blocks' worth is on
the device. `record_stream` would free it when the host finds out, which runs ahead by many blocks.

The hooks are outside of the compiled block, so what is moved is what the compiler saves; around activation checkpointing it is
the blocks' inputs. A tensor that is saved twice is moved once.
"""

import functools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

LEAST_BYTES = 2**20  # below, a copy's launch costs more than the memory is worth


class Offload:
    """Moves what blocks save; one for a model.

    Args:
        device: of the blocks. On the CPU tensors are copied where they are, which shows that this is right and saves nothing.
        least_bytes: smaller tensors stay.

    Attributes:
        moved_bytes: of all tensors moved so far.
    """

    def __init__(self, device: torch.device, least_bytes: int = LEAST_BYTES) -> None:
        self._least_bytes = least_bytes
        self._copies = torch.Stream(device) if device.type != "cpu" else None
        self._leaving: _Page | None = None  # the last page whose tensors are still on the device
        self._last: weakref.ref[_Page] | None = None
        self.moved_bytes = 0

    def wrap(self, block: nn.Module) -> None:
        """Move what the block's `forward` saves from now on, in place."""
        forward = block.forward

        @functools.wraps(forward)
        def offloaded(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            page = _Page(self._copies, self._last() if self._last is not None else None)
            keep = {parameter.untyped_storage()._cdata for parameter in block.parameters()}

            def pack(tensor: Tensor) -> Any:
                if not self._moves(tensor) or tensor.untyped_storage()._cdata in keep:
                    return tensor
                return page.add(tensor)

            with saved_tensors_hooks(pack, self._unpack):
                output = forward(*args, **kwargs)
            self.settle()
            self.moved_bytes += page.send()
            self._leaving, self._last = page, weakref.ref(page)
            return output

        block.forward = offloaded

    def wrap_last(self, block: nn.Module) -> None:
        """The block keeps what it saves, and its backward begins by fetching the page of the block before it."""
        forward = block.forward

        @functools.wraps(forward)
        def last(*args: Any, **kwargs: Any) -> Any:
            output, before = forward(*args, **kwargs), self._last
            self.settle()

            def fetch(_: Tensor) -> None:
                page = before() if before is not None else None
                if page is not None:
                    page.fetch()

            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(fetch)
            return output

        block.forward = last

    def settle(self) -> None:
        """Let go of the tensors of the last page on the device."""
        if self._leaving is not None:
            self._leaving.let_go()
            self._leaving = None

    def _moves(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor
            and tensor.layout == torch.strided
            and tensor.numel() * tensor.element_size() >= max(1, self._least_bytes)
            and torch.ops.aten.is_non_overlapping_and_dense(tensor)
        )

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        page, index = packed
        self.settle()
        return page.take(index)


class _Page:
    """What one call of a block saved: on the device, then on the host, then on the device again.

    Args:
        copies: the stream of the copies; None on the CPU.
        before: the page of the call before, which backward needs after this one.
    """

    def __init__(self, copies: torch.Stream | None, before: "_Page | None") -> None:
        self._copies = copies
        self._before = weakref.ref(before) if before is not None else None
        self._leaving: list[Tensor] = []
        self._versions: list[int] = []
        self._spoilt: set[int] = set()
        self._host: list[Tensor] = []
        self._back: dict[int, Tensor] = {}
        self._fetched = False
        self._event: torch.Event | None = None
        self._index: dict[Any, int] = {}

    def add(self, tensor: Tensor) -> tuple["_Page", int]:
        """Note a tensor; it is copied by `send`. The same one twice is one, since all are alive until then."""
        key = (tensor.data_ptr(), tensor.dtype, tensor.size(), tensor.stride(), tensor._version)
        if key not in self._index:
            self._index[key] = len(self._leaving)
            self._leaving.append(tensor.detach())
            self._versions.append(tensor._version)
        return self, self._index[key]

    @torch.no_grad()
    def send(self) -> int:
        """Begin to copy everything to the host; returns its bytes."""
        self._host = [
            torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, pin_memory=self._copies is not None)
            for t in self._leaving
        ]
        self._copy(self._leaving, self._host)
        return sum(t.numel() * t.element_size() for t in self._host)

    def let_go(self) -> None:
        """The compute stream waits for the copies; then the memory of the originals is free in its order."""
        self._wait()
        self._spoilt = {
            i for i, (t, v) in enumerate(zip(self._leaving, self._versions, strict=True)) if t._version != v
        }
        self._leaving, self._versions, self._index = [], [], {}

    def fetch(self) -> None:
        """Begin to copy everything back to the device, into memory of the compute stream."""
        if self._fetched:
            return
        self._fetched = True
        device = torch.device("cpu") if self._copies is None else self._copies.device
        self._back = {
            i: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=device) for i, t in enumerate(self._host)
        }
        self._copy(self._host, list(self._back.values()))

    def take(self, index: int) -> Tensor:
        """A tensor on the device, and a word to the page that comes next."""
        if index in self._spoilt:
            raise RuntimeError(
                f"a tensor of shape {list(self._host[index].shape)} that is needed for backward was changed in place after it was "
                f"saved; clone it before the change"
            )
        self.fetch()
        before = self._before() if self._before is not None else None
        if before is not None:
            before.fetch()
        self._wait()
        if index not in self._back:  # a second backward through the same graph
            self._fetched = False
            self.fetch()
            self._wait()
        return self._back.pop(index)

    def _copy(self, sources: list[Tensor], targets: list[Tensor]) -> None:
        if self._copies is None:
            torch._foreach_copy_(targets, sources) if sources else None
            return
        self._copies.wait_stream(torch.accelerator.current_stream(self._copies.device))
        with self._copies:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            self._event = self._copies.record_event()

    def _wait(self) -> None:
        if self._event is not None:
            torch.accelerator.current_stream(self._event.device).wait_event(self._event)
            self._event = None

    def __del__(self) -> None:
        self._wait()  # a graph that is dropped: the copies end before the memory is used again


def offload_blocks(
    blocks: Mapping[str, nn.Module], device: torch.device, least_bytes: int | None = None
) -> tuple[Offload, list[str]]:
    """Wrap the `forward` of each block but the last in place; returns what moves, and their names."""
    offload, names = Offload(device, LEAST_BYTES if least_bytes is None else least_bytes), list(blocks)
    for name in names[:-1]:
        offload.wrap(blocks[name])
    if names:
        offload.wrap_last(blocks[names[-1]])
    return offload, names[:-1]


def check_offload(device: torch.device, wanted: Mapping[str, bool]) -> None:
    """Refuse offload, by the arguments' names, where there is no other memory to move to (ValueError)."""
    for name, on in wanted.items():
        if on and device.type == "cpu":
            raise ValueError(f"{name}=True: the run is on the CPU already; set it to False")
