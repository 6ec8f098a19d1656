"""Activation offload and deeper prefetch change no gradient; what moves is what is worth it, and only once."""

import gc
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gloo_world import run_world
from tiny import Block, D, Tiny, V, fit, whole
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, register_fsdp_forward_method

from lightning_fms.distributed import FSDPCompileStrategy
from lightning_fms.distributed import offload as offload_module
from lightning_fms.distributed.activation import checkpoint_blocks
from lightning_fms.distributed.compile import compile_blocks
from lightning_fms.distributed.mesh import MeshShape, build_mesh
from lightning_fms.distributed.offload import Offload, offload_blocks
from lightning_fms.distributed.place import Settings, place
from lightning_fms.fsdp_parameters import fsdp_groups

CPU = torch.device("cpu")
PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


def stack(mode: str = "none", compiled: bool = False, offloaded: bool = True, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block() for _ in range(4)))
    named = dict(blocks.named_children())
    checkpoint_blocks(named, mode, **options)
    if compiled:
        compile_blocks(named, {"backend": "aot_eager"}, strict=True)
    return blocks, offload_blocks(named, CPU, least_bytes=0)[0] if offloaded else None


def gradients(blocks: nn.Module, backwards: int = 1) -> list[Tensor]:
    x = torch.randn(2, 3, D, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for _ in range(2):  # micro-batches
        loss = blocks(x).square().sum()
        for i in range(backwards):
            loss.backward(retain_graph=i + 1 < backwards)
    return [x.grad, *(p.grad for p in blocks.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "full"},
        {"mode": "selective", "save_ops": "compute"},
        {"compiled": True},
        {"mode": "selective", "save_ops": "compute", "compiled": True},
        {"backwards": 2},
    ],
    ids=str,
)
def test_gradients_are_bitwise_those_without_offload(options: dict[str, Any]) -> None:
    backwards = options.pop("backwards", 1)
    blocks, offload = stack(**options)
    found, expected = gradients(blocks, backwards), gradients(stack(offloaded=False, **options)[0], backwards)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert offload.moved_bytes > 0


def test_around_recomputation_the_inputs_of_blocks_move_and_nothing_else() -> None:
    blocks, offload = stack("full")
    gradients(blocks)
    assert offload.moved_bytes == 2 * 3 * (2 * 3 * D) * 4, "micro-batches x blocks but the last x input"


class Saves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x.exp()  # saves its output ...
        return (
            x * x + x @ self.weight.t() + torch.zeros(4, 1).exp() * x[:, ::2].exp().sum()
        )  # ... which is saved thrice more


def test_weights_and_small_tensors_stay_and_a_tensor_saved_twice_moves_once() -> None:
    offload, block = Offload(CPU, least_bytes=4 * 8 * 4), Saves()
    offload.wrap(block)
    x = torch.ones(4, 8, requires_grad=True)
    block(x).sum().backward()
    assert offload.moved_bytes == 4 * 8 * 4


def test_nothing_moves_without_gradients_and_a_dropped_graph_keeps_no_memory() -> None:
    blocks, offload = stack()
    with torch.no_grad():
        blocks(torch.ones(1, 2, D))
    assert offload.moved_bytes == 0
    output = blocks(torch.ones(1, 2, D, requires_grad=True))
    page = offload._last
    assert isinstance(page, weakref.ref)
    assert page() is not None
    del output
    gc.collect()
    assert page() is None


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        z = y * 2
        y.add_(1)
        return z


def test_a_change_in_place_of_what_was_saved_raises_as_it_does_without_offload() -> None:
    for offloaded in (False, True):
        block = InPlace()
        if offloaded:
            Offload(CPU, least_bytes=0).wrap(block)
        with pytest.raises(RuntimeError, match=r"in-?\s?place"):
            block(torch.ones(4, requires_grad=True)).sum().backward()


# ---- sharded, and split between tensor ranks


class Gathers:
    """In which order groups are gathered, and blocks computed."""

    def __init__(self, module: Tiny) -> None:
        self.seen: list[str] = []
        for name, group in module.named_modules():
            if isinstance(group, FSDPModule) and name.startswith("layers."):
                (held,) = fsdp_groups(group)
                held.unshard = self._before(f"gather {name[-1]}", held.unshard, held)
                group.up.register_forward_pre_hook(lambda *_, name=name: self.seen.append(f"compute {name[-1]}"))

    def _before(self, what: str, unshard: Any, held: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            if held.is_sharded and held._all_gather_result is None:  # else it does nothing
                self.seen.append(what)
            return unshard(*args, **kwargs)

        return noted


def placed(shape: MeshShape, **settings: Any) -> tuple[list[Tensor], list[str]]:
    """Gradients of two steps, and what happened in the first forward."""
    torch.manual_seed(0)
    module = Tiny()
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    place(module, Settings(tensor_plan=PLAN, **settings), build_mesh(shape, "cpu"), CPU, 0, policy, False)
    found, gathers = [], Gathers(module) if not settings.get("compile") else None
    tokens = torch.randint(0, V, (2, 6), generator=torch.Generator().manual_seed(1))
    register_fsdp_forward_method(module, "loss")
    for _ in range(2):
        module.loss(tokens).backward()
        found += [whole(p.grad) for p in module.parameters()]
        module.zero_grad()
    return found, gathers.seen if gathers is not None else []


def on_two_ranks() -> dict[str, bool]:
    dist.init_process_group("gloo")
    compiled = {"compile": True, "compile_options": {"backend": "aot_eager"}, "activation_checkpointing": "full"}
    moved: dict[str, Any] = {"activation_offload": True}
    changes = {"moved": moved, "moved, recomputed, compiled": {**moved, **compiled}, "two ahead": {"prefetch": 2}}
    agree, order = {}, {}
    with mock.patch.object(offload_module, "LEAST_BYTES", 0):
        for shape, names in ((MeshShape(1, 2), list(changes)), (MeshShape(1, 1, 2), ["moved"])):
            plain, order["one ahead"] = placed(shape)
            for name in names:
                found, order[name] = placed(shape, **changes[name])
                agree[f"{shape}, {name}"] = all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    agree["one by one"] = order["one ahead"][:4] == ["gather 0", "compute 0", "gather 1", "compute 1"]
    agree["in front of the first"] = order["two ahead"][:4] == ["gather 0", "gather 1", "gather 2", "compute 0"]
    return agree


def test_gradients_on_two_ranks_are_bitwise_those_without_offload_and_deeper_prefetch(tmp_path: Path) -> None:
    for agree in run_world(2, on_two_ranks, tmp_path):
        assert all(agree.values()), agree


def test_offload_on_the_cpu_is_refused_like_that_of_parameters() -> None:
    with pytest.raises(ValueError, match="activation_offload=True: the run is on the CPU already"):
        fit(strategy=FSDPCompileStrategy(activation_offload=True))


@pytest.mark.parametrize("depth", [0, True, 1.5])
def test_a_depth_that_is_no_number_of_groups_is_refused(depth: Any) -> None:
    with pytest.raises(ValueError, match=f"prefetch={depth}"):
        FSDPCompileStrategy(prefetch=depth)
