"""One rank's memory in a training step of fake tensors, phase by phase.

The step is the real one: the user's `training_step`, the suite's sharding or bf16 copies, autograd, the optimizer. Only the
tensors are fake and the other ranks are missing, so it needs no GPU and no memory. The first step traces compiled
blocks and makes optimizer state, in the second the tracker meets what lives on from the first; the following ones count:

- `single`: one micro-batch a step.
- `held`: the last of several, while whole gradients wait for one reduction.
- `reduced`: the last of several, each of which was reduced.

A step's peak moves with its sizes (from the loss to the optimizer, say), so the peak of the whole step is no straight line.
The peak of one phase is: blocks are equal, so memory rises or falls evenly over them and is largest in the first or the
last. Phases are named after the blocks next to either end, which every depth has. What `offload` would move to the host
(parameters, gradients and optimizer state) is noted for each phase, as it lay there when the phase began.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fms.planner.tracker import MemoryTracker

Peaks = dict[str, tuple[int, int]]  # phase: (peak bytes, bytes of them that offload would move)
VARIANTS = ("single", "held", "reduced")


@dataclass
class Subject:
    """A module that is placed as for training, and how to run it.

    Attributes:
        module: the root; its parameters are what the optimizer sees.
        blocks: the repeated blocks by name.
        training_step: the loss of a micro-batch with so many rows.
        optimizers: of the module.
        computing: a context for forward and backward.
        hold_gradients: whether backward keeps whole gradients instead of reducing them.
        before_step: called at the start of an optimizer step.
        long_lived: tensors that exist between steps, besides parameters and optimizer state.
    """

    module: nn.Module
    blocks: Mapping[str, nn.Module]
    training_step: Callable[[int], Tensor]
    optimizers: Sequence[Optimizer]
    computing: Callable[[], AbstractContextManager[Any]]
    hold_gradients: Callable[[bool], None]
    before_step: Callable[[], None]
    long_lived: Sequence[Tensor]


def measure(
    subject: Subject, tracker: MemoryTracker, rows: int, period: int, variants: Sequence[str]
) -> dict[str, Peaks]:
    """Peaks of an optimizer step by variant and phase.

    Args:
        subject: to run.
        tracker: the one that the subject's fused blocks count with, not entered.
        rows: of a micro-batch.
        period: blocks after which the kind of block repeats (2 if every second one is recomputed).
        variants: which of `VARIANTS`.
    """
    run_step(subject, rows, 1)
    found = {}
    with _phases(subject, tracker, period) as begin:
        for variant in (variants[0], *variants):
            tracker.peaks.clear()
            begin.movable.clear()
            tracker.hold([*subject.module.parameters(), *_state(subject.optimizers), *subject.long_lived])
            tracker.hold(p.grad for p in subject.module.parameters() if p.grad is not None)
            with tracker:
                _step(subject, rows, 1 if variant == "single" else 2, begin, hold=variant == "held")
            found[variant] = {name: (peak, begin.movable.get(name, 0)) for name, peak in tracker.peaks.items()}
    return found


def run_step(subject: Subject, rows: int, micro_batches: int, hold: bool = False) -> None:
    """One optimizer step; `hold` keeps whole gradients until the last micro-batch."""
    _step(subject, rows, micro_batches, lambda *names: None, hold)


def _step(subject: Subject, rows: int, micro_batches: int, begin: Callable[..., None], hold: bool = False) -> None:
    subject.before_step()
    for optimizer in subject.optimizers:
        optimizer.zero_grad(set_to_none=True)
    for i in range(micro_batches):
        last = i == micro_batches - 1
        subject.hold_gradients(hold and not last)
        begin("input", last)
        with subject.computing():
            loss = subject.training_step(rows)
            begin("backward loss", last)
            (loss / micro_batches).backward()
            del loss
    begin("optimizer", True)
    for optimizer in subject.optimizers:
        optimizer.step()


class _Begin:
    """Starts a phase, and notes what offload would move by then."""

    def __init__(self, subject: Subject, tracker: MemoryTracker) -> None:
        self._subject, self._tracker = subject, tracker
        self._counts = True
        self.movable: dict[str, int] = {}

    def __call__(self, name: str, last: bool | None = None) -> None:
        self.phases((name,), last)

    def phases(self, names: Sequence[str], last: bool | None = None) -> None:
        if last is not None:
            self._counts = last
        names = tuple(names) if self._counts else ()
        parameters = list(self._subject.module.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        movable = self._tracker.bytes_of([*parameters, *gradients, *_state(self._subject.optimizers)])
        self.movable |= dict.fromkeys(names, movable)
        self._tracker.phase(*names)


@contextmanager
def _phases(subject: Subject, tracker: MemoryTracker, period: int) -> Iterator[_Begin]:
    begin = _Begin(subject, tracker)
    blocks = list(subject.blocks.values())
    handles = []
    for i, block in enumerate(blocks):
        names = [str(i)] if i <= period else []
        names += [str(i - len(blocks))] if len(blocks) - i <= period + 1 else []
        forward, backward = ([f"{way} {name}" for name in names] for way in ("forward", "backward"))
        handles.append(block.register_forward_pre_hook(_entering(begin, forward, i == 0)))
        handles.append(block.register_forward_hook(_leaving(begin, backward, i == len(blocks) - 1)))
    try:
        yield begin
    finally:
        for handle in handles:
            handle.remove()


def _entering(begin: _Begin, names: list[str], first: bool) -> Callable[..., None]:
    def hook(block: nn.Module, args: Any) -> None:
        begin.phases(names)
        if first:
            for tensor in _differentiable(args):
                tensor.register_hook(lambda gradient: begin("backward input"))

    return hook


def _leaving(begin: _Begin, names: list[str], last: bool) -> Callable[..., None]:
    def hook(block: nn.Module, args: Any, output: Any) -> None:
        for tensor in _differentiable(output if isinstance(output, tuple) else (output,)):
            tensor.register_hook(lambda gradient: begin.phases(names))
        if last:
            begin("loss")

    return hook


def _differentiable(values: Iterable[Any]) -> Iterator[Tensor]:
    return (value for value in values if isinstance(value, Tensor) and value.requires_grad)


def _state(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    values = (value for o in optimizers for state in o.state.values() for value in state.values())
    return [value for value in values if isinstance(value, Tensor)]


def use_gpu_defaults(optimizers: Iterable[Optimizer]) -> None:
    """On a GPU an optimizer that is not fused takes lists of tensors at once, with temporary copies; here it would not."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True


def depth_pair(depth: int, period: int, reach: int = 0) -> tuple[int, ...]:
    """Numbers of blocks to probe for a model of `depth` blocks: two small ones of the same kind, or itself where small.

    Both have `depth`'s remainder by `period`, so that the last block is of the kind that it is in the model. `reach` is how many
    blocks away a block still has memory (that is on its way to the host, or being reduced, say).
    """
    least = period + 1 + reach
    first = least + (depth - least) % period
    return (depth,) if depth <= first + period else (first, first + period)


def keep_blocks(module: nn.Module, names: Sequence[str], depth: int) -> bool:
    """Cut a stack of blocks to its first `depth`, in place; false, and nothing done, where the blocks are no single stack.

    Args:
        module: the root.
        names: of its blocks, in order.
        depth: how many to keep.
    """
    containers = {name.rpartition(".")[0] for name in names}
    if len(containers) != 1 or [name.rpartition(".")[2] for name in names] != [str(i) for i in range(len(names))]:
        return False
    stack = module.get_submodule(containers.pop())
    if not isinstance(stack, nn.ModuleList | nn.Sequential):
        return False
    del stack[depth:]
    return True


def fake_safe_swap() -> None:
    """Let `Module.to(device)` pass fake tensors, for the rest of this process.

    It exchanges each parameter for its converted self, which PyTorch refuses where somebody holds a weak reference, as
    fake tensors do. Nothing is converted here: a probe's tensors lie where they were made.
    """

    def swap(old: Tensor, new: Tensor) -> None:
        if old.dtype != new.dtype or old.device != new.device:
            raise ValueError(f"a probe cannot convert {old.dtype} on {old.device} to {new.dtype} on {new.device}")

    torch.utils.swap_tensors = swap
