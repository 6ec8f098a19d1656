"""Blocks that hold the memory of compiled ones, without compiling them.

`torch.compile` changes what a block keeps for its backward: the partitioner cuts the joint graph where least is stored and
computes cheap operations again. That part of the compiler is plain graph code, so it runs here on fake tensors: trace
forward and backward, decompose and partition as Inductor does, and run both graphs once, operation by operation, under
`MemoryTracker.fused`. From then on a graph is known by its outputs and its peak, and calls make these at once. What is left
out is code generation, which needs a C++ or Triton compiler and minutes.

Dynamo is left out, too: forward is traced directly, once for all blocks of a class with equal shapes.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from functorch.compile import aot_function, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch.func import functional_call
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy

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

    def fuse(self, blocks: Mapping[str, nn.Module], recomputed: Collection[str] = ()) -> None:
        """Replace the `forward` of each block in place.

        The first forward and backward of each class and shape have to happen while the tracker is not entered.

        Args:
            blocks: by name; before they are sharded.
            recomputed: names of those whose forward is computed again in their backward, within the compiled graph.
        """
        for name, block in blocks.items():
            recompute = name in recomputed
            block.forward = functools.partial(_forward, block, block.forward, self, self._traced, recompute)


def _forward(
    block: nn.Module,
    eager: Callable[..., Any],
    graphs: Graphs,
    traced: dict[Any, Any],
    recompute: bool,
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
    key = (classes, block.training, torch.is_grad_enabled(), recompute, kinds, plain)
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
            partition_fn=functools.partial(_partition, parameters=len(state), recompute=recompute),
            decompositions=select_decomp_table(),
        )
    return traced[key](list(state.values()), tensors, kept_tensors)


def _partition(
    joint: GraphModule, inputs: Any, parameters: int, recompute: bool, num_fwd_outputs: int, **options: Any
) -> tuple[GraphModule, GraphModule]:
    """As Inductor does; the first `parameters` inputs are known to outlive the graph, so that keeping them is free."""
    options["static_lifetime_input_indices"] = list(range(parameters))
    if recompute:
        _mark_recomputed(joint, num_fwd_outputs)
    parts: tuple[GraphModule, GraphModule] = min_cut_rematerialization_partition(
        joint, inputs, compiler="inductor", num_fwd_outputs=num_fwd_outputs, **options
    )
    return parts


def _mark_recomputed(joint: GraphModule, outputs: int) -> None:
    """What Dynamo does to the operations of a checkpointed region: none is kept for the backward."""
    returned, _ = tree_flatten(joint.graph.find_nodes(op="output")[0].args)
    left = {node for node in returned[:outputs] if isinstance(node, Node)}
    for node in joint.graph.nodes:
        if not left:  # the backward follows the last output of the forward
            return
        left.discard(node)
        if node.op == "call_function":
            node.meta |= {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": 0}


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

    def run(arguments: list[Any]) -> Any:
        inputs = list(arguments)
        arguments.clear()  # as compiled code does, so that what is kept for backward goes while that runs
        if not effect:
            outputs, found = _observed(graph, inputs)
            effect.append(found)
            return outputs
        graphs.tracker.spike(effect[0].peak)
        return effect[0].outputs(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@dataclass(frozen=True)
class _Effect:
    """What a graph does to memory: enough to take its place.

    Attributes:
        peak: bytes above those of the inputs, at most, outputs included.
        made: for each output how to make it from inputs and outputs before it.
        shown: inputs that are in outputs.
    """

    peak: int
    made: list[Callable[[Sequence[Any]], Any]]
    shown: set[int | None]

    def outputs(self, inputs: list[Any]) -> list[Any]:
        """The outputs; `inputs` is emptied before, so that none outlives its last reader here."""
        known = [value if i in self.shown else None for i, value in enumerate(inputs)]
        inputs.clear()
        for make in self.made:
            known.append(make(known))
        return known[len(known) - len(self.made) :]


def _observed(graph: GraphModule, inputs: list[Any]) -> tuple[Any, _Effect]:
    """Run a graph: once for its outputs, and once operation by operation, letting go of each value after its last reader."""
    outputs = graph(*inputs)
    known, made, sources = list(inputs), [], []
    for output in outputs:
        sources.append(_source(output, known))
        made.append(_recipe(output, known, sources[-1]))
        known.append(output)
    del known
    tracker = MemoryTracker()
    tracker.hold(value for value in inputs if isinstance(value, Tensor))
    before = tracker.current
    tracker.phase("graph")
    with tracker, tracker.fused():
        again = Interpreter(graph).boxed_run(inputs)
        tracker.hold(output for output in again if isinstance(output, Tensor))
    return outputs, _Effect(tracker.peaks["graph"] - before, made, set(sources))


def _source(output: Any, known: Sequence[Any]) -> int | None:
    """Which of the known values an output is, or is a view of."""
    for i, value in enumerate(known):
        if output is value:
            return i
    if isinstance(output, Tensor):
        for i, value in enumerate(known):
            if isinstance(value, Tensor) and output.dtype == value.dtype and storage_key(output) == storage_key(value):
                return i
    return None


def _recipe(output: Any, known: Sequence[Any], source: int | None) -> Callable[[Sequence[Any]], Any]:
    if source is not None and output is known[source]:
        return lambda values: values[source]
    if not isinstance(output, Tensor):
        return lambda values: output
    layout = (tuple(output.shape), tuple(output.stride()))
    if source is None:
        dtype, device = output.dtype, output.device
        return lambda values: torch.empty_strided(*layout, dtype=dtype, device=device)
    offset = output.storage_offset()
    return lambda values: values[source].detach().as_strided(*layout, offset)
