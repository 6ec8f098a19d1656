"""Blocks that hold the memory of compiled ones, without compiling them.

`torch.compile` changes what a block keeps for its backward: the partitioner cuts the joint graph where least is stored and
computes cheap operations again. That part of the compiler is plain graph code, so it runs here on fake tensors: trace
forward and backward, decompose and partition as Inductor does, and run both graphs once, operation by operation, under
`MemoryTracker.fused`. From then on a graph is known by its outputs and its peak, and calls make these at once. What is left
out is code generation, which needs a C++ or Triton compiler and minutes.

Dynamo is left out, too: forward is traced directly, once for all blocks of a class with equal shapes.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch.func import functional_call
from torch.fx import GraphModule
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_fms.planner.tracker import MemoryTracker, storage_key


class Graphs:
    """Traced blocks, for all models of a process that are built under one fake mode.

    Args:
        attributes: names of attributes of modules that hold tensors which are neither parameters nor buffers.

    Attributes:
        tracker: counts what the graphs hold while they run.
    """

    def __init__(self, attributes: Sequence[str] = ()) -> None:
        self.tracker = MemoryTracker()
        self.attributes = tuple(attributes)
        self._traced: dict[Any, Callable[..., Any]] = {}

    def fuse(self, blocks: Mapping[str, nn.Module]) -> None:
        """Replace the `forward` of each block in place.

        The first forward and backward of each class and shape have to happen while the tracker is not entered.

        Args:
            blocks: by name; before they are wrapped for recomputation and sharding.
        """
        for block in blocks.values():
            block.forward = functools.partial(_forward, block, block.forward, self, self._traced)


def _forward(
    block: nn.Module,
    eager: Callable[..., Any],
    graphs: Graphs,
    traced: dict[Any, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    state = {**dict(block.named_parameters()), **dict(block.named_buffers())}
    leaves, layout = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    plain = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    kept = [(part.__dict__, name) for part in block.modules() for name in graphs.attributes if name in part.__dict__]
    kept_tensors, kept_layout = tree_flatten([held[name] for held, name in kept])
    classes = tuple(type(part) for part in block.modules())  # a layer in FP8 has another class
    kinds = tuple(map(_kind, [*state.values(), *tensors, *kept_tensors]))
    key = (classes, block.training, torch.is_grad_enabled(), kinds, plain)
    if key not in traced:

        def function(values: list[Tensor], inputs: list[Tensor], others: list[Any]) -> Any:
            left = iter(inputs)
            filled = [next(left) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            again_args, again_kwargs = tree_unflatten(filled, layout)
            with _own_forward(block, eager), _exchanged(kept, tree_unflatten(others, kept_layout)):
                return functional_call(block, dict(zip(state, values, strict=True)), again_args, again_kwargs)

        traced[key] = aot_function(
            function,
            fw_compiler=functools.partial(_runner, graphs),
            bw_compiler=functools.partial(_runner, graphs),
            partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
            decompositions=select_decomp_table(),
        )
    return traced[key](list(state.values()), tensors, kept_tensors)


@contextmanager
def _exchanged(kept: Sequence[tuple[dict[str, Any], str]], values: Sequence[Any]) -> Iterator[None]:
    """Attributes with other values inside."""
    before = [held[name] for held, name in kept]
    try:
        for (held, name), value in zip(kept, values, strict=True):
            held[name] = value
        yield
    finally:
        for (held, name), value in zip(kept, before, strict=True):
            held[name] = value


class _own_forward:
    """The block's forward as it was, and no hooks, while it is traced."""

    def __init__(self, block: nn.Module, eager: Callable[..., Any]) -> None:
        self._block, self._eager = block, eager

    def __enter__(self) -> None:
        self._now = self._block.__dict__["forward"]
        self._block.forward = self._eager
        self._hooks = {name: self._block.__dict__[name] for name in ("_forward_hooks", "_forward_pre_hooks")}
        for name in self._hooks:
            self._block.__dict__[name] = type(self._hooks[name])()

    def __exit__(self, *details: Any) -> None:
        self._block.forward = self._now
        self._block.__dict__.update(self._hooks)


def _kind(tensor: Any) -> tuple[Any, ...] | None:
    if not isinstance(tensor, Tensor):
        return None
    return (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def _runner(graphs: Graphs, graph: GraphModule, example: Any) -> Callable[..., Any]:
    effect: list[_Effect] = []

    def run(*inputs: Any) -> Any:
        if not effect:
            outputs, found = _observed(graph, inputs)
            effect.append(found)
            return outputs
        graphs.tracker.spike(effect[0].peak)
        return effect[0].outputs(inputs)

    return make_boxed_func(run)


@dataclass(frozen=True)
class _Effect:
    """What a graph does to memory: enough to take its place.

    Attributes:
        peak: bytes above those of the inputs, at most, outputs included.
        made: for each output how to make it from inputs and outputs before it.
    """

    peak: int
    made: list[Callable[[Sequence[Any]], Any]]

    def outputs(self, inputs: Sequence[Any]) -> list[Any]:
        known = list(inputs)
        for make in self.made:
            known.append(make(known))
        return known[len(inputs) :]


def _observed(graph: GraphModule, inputs: Sequence[Any]) -> tuple[Any, _Effect]:
    """Run a graph operation by operation."""
    tracker = MemoryTracker()
    tracker.hold(value for value in inputs if isinstance(value, Tensor))
    before = tracker.current
    tracker.phase("graph")
    with tracker, tracker.fused():
        outputs = graph(*inputs)
        tracker.hold(output for output in outputs if isinstance(output, Tensor))
    known, made = list(inputs), []
    for output in outputs:
        made.append(_recipe(output, known))
        known.append(output)
    return outputs, _Effect(tracker.peaks["graph"] - before, made)


def _recipe(output: Any, known: Sequence[Any]) -> Callable[[Sequence[Any]], Any]:
    for i, value in enumerate(known):
        if output is value:
            return lambda values: values[i]
    if not isinstance(output, Tensor):
        return lambda values: output
    layout = (tuple(output.shape), tuple(output.stride()))
    for i, value in enumerate(known):
        if isinstance(value, Tensor) and output.dtype == value.dtype and storage_key(output) == storage_key(value):
            offset = output.storage_offset()
            return lambda values: values[i].detach().as_strided(*layout, offset)
    dtype, device = output.dtype, output.device
    return lambda values: torch.empty_strided(*layout, dtype=dtype, device=device)
