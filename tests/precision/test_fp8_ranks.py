"""FP8 on two processes: under DDP, and gathered in FP8 by FSDP2."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock
from fp8_runs import STEPS, THIRD_PARTY_WARNINGS, Counting, causal_lm, plugin, trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from lightning_fms.callbacks import FP8Amax, fp8_amax
from lightning_fms.distributed.strategy import FSDPCompileStrategy
from lightning_fms.precision import FP8Precision
from lightning_fms.precision.float8 import convert, float8_config, precompute_scales
from lightning_fms.precision.selection import decide
from tests.worlds import run_world

pytestmark = THIRD_PARTY_WARNINGS

WORLD = 2


class Block(nn.Module):
    """A residual block whose norm makes FSDP gather bytes, which gloo can, instead of FP8, which it cannot."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.up, self.down = nn.Linear(64, hidden, bias=False), nn.Linear(hidden, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def sharded(all_gather: bool | None, shards: int = WORLD) -> tuple[nn.Module, list[str]]:
    """A small model under FSDP2: bf16 (`None`), FP8 gathered in bf16, or FP8 gathered in FP8."""
    torch.manual_seed(0)
    net = nn.Sequential(Block(128), Block(144))
    notes = []
    if all_gather is not None:
        config = float8_config("tensorwise", emulate=True, all_gather=all_gather)
        notes = [d.note for d in convert(net, decide(net, "tensorwise", keep_small=False), config, shards)]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in net:
        fully_shard(block, mp_policy=policy)
    return fully_shard(net, mp_policy=policy), notes


def train(net: nn.Module, steps: int = 6) -> list[float]:
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=1e-2), []
    random = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        loss = net(torch.randn(32, 64, generator=random)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        precompute_scales(net)
        losses.append(loss.item())
    return losses


def scale_of(net: nn.Module) -> torch.Tensor | None:
    return net[0].up.weight._local_tensor._precomputed_scale


def fp8_all_gather(folder: Path) -> dict[str, Any]:
    """Losses and state of each way to gather, and what happens to scales when weights are loaded."""
    runs = {name: sharded(mode) for name, mode in (("bf16", None), ("fp8", False), ("gathered", True))}
    losses = {name: train(net) for name, (net, _) in runs.items()}
    net, plain = runs["gathered"][0], runs["bf16"][0]
    state = net.state_dict()
    kinds = {type(value._local_tensor).__name__ for value in state.values()}
    shares = state["0.up.weight"]._local_tensor.data_ptr() == net[0].up.weight._local_tensor._tensor.data_ptr()
    before = scale_of(net)
    net.load_state_dict(plain.state_dict())
    after_load = scale_of(net)
    same = all(
        torch.equal(a.full_tensor(), b.full_tensor())
        for a, b in zip(net.state_dict().values(), plain.state_dict().values(), strict=True)
    )
    plain.load_state_dict(net.state_dict())
    precompute_scales(net)
    largest = net.state_dict()["0.up.weight"].full_tensor().abs().max()
    precomputed = scale_of(net)
    FP8Precision().on_weights_loaded(net)
    return {
        "losses": losses,
        "kinds": kinds,
        "wrapped": isinstance(net[0].up.weight._local_tensor, WeightWithDynamicFloat8CastTensor),
        "is_dtensor": isinstance(net[0].up.weight, DTensor),
        "state_shares_storage": shares,
        "scale_before_load": before is not None,
        "scale_after_load": after_load is not None,
        "same_after_load": same,
        "scale_error": abs(precomputed.item() * largest.item() / 448 - 1),
        "scale_after_drop": scale_of(net) is not None,
    }


def uneven_rows(folder: Path) -> dict[str, Any]:
    """Rows that do not divide over the shards: gathered in bf16, with a note. (3 shards on paper, 2 in fact.)"""
    net, notes = sharded(True, shards=3)
    return {"notes": notes, "losses": train(net, 1)}


def rows(devices: int) -> DataLoader:
    """The same global batches of 4 rows on any number of devices."""
    rank = dist.get_rank() if devices > 1 else 0
    sampler = DistributedSampler(Counting(), devices, rank, shuffle=False)  # Lightning's own would shuffle
    return DataLoader(Counting(), batch_size=4 // devices, sampler=sampler)


def ddp(folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    run, losses = trainer(fp8=plugin(), devices=WORLD, strategy=DDPStrategy(), use_distributed_sampler=False)
    run.fit(causal_lm(), rows(WORLD))
    return {"losses": losses.losses, "float8_layers": losses.float8_layers, "dtypes": losses.dtypes}


def ours(
    fp8: FP8Precision | None,
    devices: int,
    save_to: Path | None = None,
    meta: bool = False,
    compile: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """A fit under the suite's strategy: losses, and the weights that it ended with."""
    torch.manual_seed(0)
    strategy = FSDPCompileStrategy(
        compile=compile, compile_options={"backend": "aot_eager"}, compile_strict=True, **options
    )
    run, losses = trainer(
        fp8=fp8, devices=devices, strategy=strategy, use_distributed_sampler=False, log_every_n_steps=1
    )
    run.callbacks.append(FP8Amax())  # type: ignore[attr-defined]
    with torch.device("meta" if meta else "cpu"):
        module = causal_lm()
    run.fit(module, rows(devices))
    if save_to is not None:
        run.save_checkpoint(save_to)
    weights = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in module.state_dict().items()}
    return {
        "losses": losses.losses,
        "float8_layers": losses.float8_layers,
        "dtypes": losses.dtypes,
        "weights": weights,
        "report": fp8.report if fp8 else [],
        "amax": {n: float(v) for n, v in run.callback_metrics.items() if n.startswith(fp8_amax.TAG)},
    }


def ours_fp8(folder: Path) -> dict[str, Any]:
    return ours(plugin(), WORLD)


def ours_fused(folder: Path) -> dict[str, Any]:
    return ours(plugin("fused"), WORLD, folder / "fused", compile=True)


def ours_gathered(folder: Path) -> dict[str, Any]:
    return ours(plugin(all_gather=True), WORLD, folder / "gathered", compile=True)


def ours_gathered_meta(folder: Path) -> dict[str, Any]:
    return ours(plugin(all_gather=True), WORLD, meta=True)


SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {
    f.__name__: f for f in (fp8_all_gather, uneven_rows, ddp, ours_fp8, ours_fused, ours_gathered, ours_gathered_meta)
}


def all_scenarios(folder: Path) -> None:
    dist.init_process_group("gloo")
    torch.save({name: scenario(folder) for name, scenario in SCENARIOS.items()}, folder / f"{dist.get_rank()}.pt")


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """All scenarios in one launch, shared by the test processes: starting ranks is most of the time."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "fp8_ranks"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        if not (folder / "done").exists():
            run_world(all_scenarios, WORLD, folder)
            (folder / "done").touch()
    return folder


@pytest.fixture(scope="module")
def results(launch: Path) -> list[dict[str, Any]]:
    return [torch.load(launch / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


@pytest.mark.parametrize("scenario", ["ours_fp8", "ours_fused", "ours_gathered"])
def test_shards_have_the_largest_weight_of_all_ranks(results: list[dict[str, Any]], scenario: str) -> None:
    for found in (result[scenario] for result in results):
        whole: dict[str, float] = {}
        for name, weight in found["weights"].items():
            family = fp8_amax.TAG + fp8_amax.family_of(name).removesuffix(".weight")
            whole[family] = max(whole.get(family, 0.0), weight.abs().max().item())
        assert len(found["amax"]) == 7
        assert found["amax"] == pytest.approx({family: whole[family] for family in found["amax"]})


def test_fp8_all_gather_trains_like_bf16(results: list[dict[str, Any]]) -> None:
    for found in results:
        losses = found["fp8_all_gather"]["losses"]
        assert losses["bf16"][-1] < 0.9 * losses["bf16"][0]
        for name in ("fp8", "gathered"):
            assert losses[name] == pytest.approx(losses["bf16"], rel=0.02)
            assert losses[name] != losses["bf16"]
        assert found["fp8_all_gather"]["wrapped"]
        assert found["fp8_all_gather"]["is_dtensor"]


def test_fp8_all_gather_keeps_plain_checkpoints_both_ways(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert found["fp8_all_gather"]["kinds"] == {"Tensor"}
        assert found["fp8_all_gather"]["state_shares_storage"]  # so that loading in place reaches the weights
        assert found["fp8_all_gather"]["same_after_load"]


def test_scales_are_precomputed_after_a_step_and_dropped_by_a_load(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert found["fp8_all_gather"]["scale_before_load"]
        assert not found["fp8_all_gather"]["scale_after_load"]
        assert found["fp8_all_gather"]["scale_error"] < 1e-6
        assert not found["fp8_all_gather"]["scale_after_drop"]


def test_rows_that_do_not_divide_are_gathered_in_bf16(results: list[dict[str, Any]]) -> None:
    for found in results:
        odd = "gathered in bf16: rows do not divide by 3"
        assert found["uneven_rows"]["notes"] == [odd, odd, "", odd]
        assert all(map(torch.isfinite, map(torch.tensor, found["uneven_rows"]["losses"])))


def test_ddp_trains_like_one_device_with_the_same_global_batch(results: list[dict[str, Any]]) -> None:
    torch.manual_seed(0)
    run, alone = trainer(fp8=plugin())
    run.fit(causal_lm(), rows(1))
    mean = [sum(pair) / WORLD for pair in zip(*(found["ddp"]["losses"] for found in results), strict=True)]
    assert len(mean) == STEPS
    assert mean == pytest.approx(alone.losses, abs=0.02)  # each rank scales its own activations
    for found in results:
        assert found["ddp"]["float8_layers"] == 14
        assert found["ddp"]["dtypes"] == {torch.bfloat16}


def test_suite_strategy_trains_alike_on_one_and_two_ranks(results: list[dict[str, Any]]) -> None:
    alone = ours(plugin(), 1)
    assert alone["float8_layers"] == 14
    assert alone["dtypes"] == {torch.bfloat16}
    for name in ("ours_fp8", "ours_gathered"):
        pairs = zip(*(found[name]["losses"] for found in results), strict=True)
        assert [sum(pair) / WORLD for pair in pairs] == pytest.approx(alone["losses"], abs=0.05), (
            name
        )  # 1.5 ulp of a bf16 loss
        for found in results:
            assert found[name]["float8_layers"] == 14
            assert found[name]["dtypes"] == {torch.bfloat16}


def test_fused_layers_on_two_ranks_round_what_was_gathered_as_one_device_rounds_its_copies(
    results: list[dict[str, Any]],
) -> None:
    alone = ours(plugin("fused"), 1)
    pairs = zip(*(found["ours_fused"]["losses"] for found in results), strict=True)
    assert [sum(pair) / WORLD for pair in pairs] == pytest.approx(alone["losses"], abs=0.03)
    assert results[0]["ours_fused"]["float8_layers"] == alone["float8_layers"] == 14


def two_copies(recipes: tuple[str, ...]) -> dict[str, list[float]]:
    dist.init_process_group("gloo")
    return {recipe: ours(plugin(recipe), 4, replicate=2)["losses"] for recipe in recipes}


def test_two_copies_of_two_shards_train_as_one_device_does() -> None:
    recipes = ("tensorwise", "fused")
    results = run_world(two_copies, 4, recipes)
    for recipe in recipes:
        alone = ours(plugin(recipe), 1)["losses"]
        together = [sum(losses) / 4 for losses in zip(*(found[recipe] for found in results), strict=True)]
        assert together == pytest.approx(alone, abs=0.05), recipe
        assert together[-1] < together[0] - 1


@pytest.mark.parametrize("recipe", ["tensorwise", "fused"])
def test_suite_strategy_fp8_follows_bf16(recipe: str) -> None:
    fp8, bf16 = ours(plugin(recipe), 1), ours(None, 1)
    differences = [abs(a - b) for a, b in zip(fp8["losses"], bf16["losses"], strict=True)]
    assert 0 < max(differences) < 0.1


def test_module_on_meta_is_converted_sharded_and_filled(results: list[dict[str, Any]]) -> None:
    for found in results:
        losses = found["ours_gathered_meta"]["losses"]
        assert found["ours_gathered_meta"]["float8_layers"] == 14
        assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("kind", ["gathered", "fused"])
def test_checkpoint_of_a_run_in_fp8_on_two_ranks_loads_into_bf16(
    results: list[dict[str, Any]], launch: Path, kind: str
) -> None:
    run, _ = trainer(fp8=None, strategy=FSDPCompileStrategy(), max_epochs=1)
    module = causal_lm()
    run.fit(module, rows(1), ckpt_path=launch / kind)
    assert run.global_step == STEPS
    saved = results[0][f"ours_{kind}"]["weights"]
    assert list(saved) == list(module.state_dict())
    assert all(torch.equal(saved[name], value) for name, value in module.state_dict().items())
