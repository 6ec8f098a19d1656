"""What the strategy does in a world: reductions counted, evaluation without inference mode, HSDP, meta, hooks, launch."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from gloo_world import once, run_world
from tiny import Block, D, Rows, Tiny, V, fit, trainer, whole_weights
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor

from lightning_fms.distributed import FSDPCompileStrategy

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*treespec.*",
    "ignore:The .grad attribute of a Tensor that is not a leaf",
)


class Positions(nn.Module):
    """Owns a buffer only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(8, D), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(8 * D).view(8, D) / 100)


class OnMeta(Tiny):
    """Built without memory, and tied."""

    def __init__(self) -> None:
        with torch.device("meta"):
            super().__init__(tied=True)
            self.scale = torch.ones(())  # type: ignore[assignment]
            self.positions = Positions()
        del self.scale


class Configured(pl.LightningModule):
    """Makes its layers in `configure_model`, as Lightning recommends."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Tiny | None = None

    def configure_model(self) -> None:
        if self.net is None:
            pl.seed_everything(7)
            self.net = Tiny()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.net is not None
        loss = self.net.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        assert self.net is not None
        self.log("val_loss", self.net.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Transforms(pl.Callback):
    """Looks at the module when the strategy hands it over, and at each validation."""

    def __init__(self) -> None:
        self.seen: list[bool] = []
        self.modes: list[tuple[bool, bool]] = []

    def transform_module(self, module: nn.Module) -> None:
        self.seen.append(any(isinstance(p, DTensor) for p in module.parameters()))

    def on_validation_batch_end(self, *_: Any) -> None:
        self.modes.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))


def count_reductions(**options: Any) -> int:
    real = _fsdp_param_group.foreach_reduce
    with mock.patch.object(_fsdp_param_group, "foreach_reduce", side_effect=real) as reduce:
        fit(max_steps=2, accumulate_grad_batches=4, batches=8, **options)
    return int(reduce.call_count)


def in_a_world() -> dict[str, Any]:
    size = int(os.environ["WORLD_SIZE"])
    results: dict[str, Any] = {
        "reductions": count_reductions(),
        "reductions, each": count_reductions(strategy=FSDPCompileStrategy(accumulate_without_reduce=False)),
    }
    watcher = Transforms()
    with mock.patch("lightning.pytorch.loops.utilities._distributed_is_initialized", return_value=False):  # off gloo
        forced = fit(callbacks=[watcher], val_check_interval=1, num_sanity_val_steps=1)
    results["forced"] = (forced.losses, watcher.modes, watcher.seen)
    results["plain"] = fit(val_check_interval=1).losses
    results["meta"] = fit(OnMeta, max_steps=1)
    results["configured"] = fit(Configured).losses
    hybrid = FSDPCompileStrategy(replicate=size, shard=1)
    results["replicated"] = fit(strategy=hybrid).losses
    results["sampler"] = (hybrid.distributed_sampler_kwargs["num_replicas"], hybrid.distributed_sampler_kwargs["rank"])
    results["unseeded"] = unseeded()
    return results


def unseeded() -> dict[str, Tensor]:
    """Each rank builds another model; all train rank 0's."""
    torch.manual_seed(int(os.environ["RANK"]))
    module = Tiny()
    own = whole_weights(module)
    t = trainer(max_steps=1, strategy=FSDPCompileStrategy(replicate=int(os.environ["WORLD_SIZE"])))
    with mock.patch.object(torch.optim.AdamW, "step", lambda self, closure=None: closure()):
        t.fit(module, Rows(1), Rows(1))
    return {"own": own["head.weight"], "trained": module.head.weight.to_local().detach().clone()}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    def run(folder: Path) -> dict[int, list[dict[str, Any]]]:
        return {size: run_world(size, in_a_world, folder / str(size)) for size in (2, 3)}

    return once(tmp_path_factory, "strategy", run)


def test_accumulation_reduces_once_per_group_and_step(worlds) -> None:
    groups, steps, micro_batches = 5, 2, 4  # embedding, three blocks, root
    for world in worlds.values():
        assert world[0]["reductions"] == groups * steps
        assert world[0]["reductions, each"] == groups * steps * micro_batches


def test_evaluation_is_never_in_inference_mode_and_training_goes_on_after_it(worlds) -> None:
    for world in worlds.values():
        losses, modes, seen = world[0]["forced"]
        assert modes == [(False, False)] * len(modes)
        assert len(modes) >= 5
        assert losses == world[0]["plain"], "validation changed the training"
        assert seen == [False], "transform_module comes once, before the module is sharded"


def test_weights_made_from_meta_are_the_same_on_any_number_of_ranks(worlds) -> None:
    one = fit(OnMeta, max_steps=1)
    for world in worlds.values():
        torch.testing.assert_close(world[0]["meta"].losses, one.losses, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(world[0]["meta"].weights, one.weights, rtol=1e-4, atol=1e-4)
    assert one.losses[0] < 60
    assert torch.equal(one.weights["head.weight"], one.weights["embedding.weight"])


def test_modules_of_configure_model_are_sharded_too(worlds) -> None:
    expected = fit(Configured, strategy="auto").losses
    for world in worlds.values():
        torch.testing.assert_close(world[0]["configured"], expected, rtol=2e-6, atol=2e-6)


def test_hybrid_sharding_is_the_mean_over_all_data_ranks(worlds) -> None:
    expected = fit(strategy="auto").losses
    for size, world in worlds.items():
        torch.testing.assert_close(world[0]["replicated"], expected, rtol=2e-6, atol=2e-6)
        assert [rank["sampler"] for rank in world] == [(size, rank) for rank in range(size)]


def test_replicas_start_from_rank_zeros_weights(worlds) -> None:
    for world in worlds.values():
        assert not torch.equal(world[0]["unseeded"]["own"], world[1]["unseeded"]["own"])
        for rank in world:
            assert torch.equal(rank["unseeded"]["trained"], world[0]["unseeded"]["own"])


def hybrid_of_four() -> list[float]:
    return fit(strategy=FSDPCompileStrategy(replicate=2, shard=2), accumulate_grad_batches=2).losses


def test_hsdp_2_x_2_agrees_on_four_processes(tmp_path: Path) -> None:
    results = run_world(4, hybrid_of_four, tmp_path)
    assert results[0] == results[3]
    assert results[0][-1] < 10


# ---- one device, in this process


def test_one_device_is_not_wrapped_and_has_no_process_group() -> None:
    pl.seed_everything(7)
    module = Tiny()
    t = trainer()
    t.fit(module, Rows(4), Rows(1))
    assert type(module) is Tiny
    assert not torch.distributed.is_initialized()
    assert "forward" not in module.layers[0].__dict__
    assert "RANK" not in os.environ
    assert "nothing" in "\n".join(t.strategy.report.lines())


def test_hooks_see_fp32_masters_and_steps_compute_in_bf16() -> None:
    dtypes: dict[str, set[torch.dtype]] = {}

    class Looks(Tiny):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            dtypes["step"] = {p.dtype for p in self.parameters()}
            return super().training_step(batch, batch_idx)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            dtypes["hook"] = {p.dtype for p in self.parameters()} | {p.grad.dtype for p in self.parameters()}  # type: ignore[union-attr]

        def configure_optimizers(self) -> Any:
            dtypes["optimizer"] = {p.dtype for p in self.parameters()}
            return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)

    fit(Looks, precision="bf16-mixed", gradient_clip_val=1.0)  # clipping with a fused optimizer is allowed
    assert dtypes == {"step": {torch.bfloat16}, "hook": {torch.float32}, "optimizer": {torch.float32}}


def test_edited_and_averaged_masters_are_used_at_the_next_step() -> None:
    class Edits(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            with torch.no_grad():
                pl_module.head.weight.zero_()

    losses = fit(callbacks=[Edits()], precision="bf16-mixed").losses
    assert losses == pytest.approx([float(torch.tensor(V).log())] * 4, abs=1e-3)


@pytest.mark.parametrize("precision", ["16-true", "64-true"])
def test_precisions_it_cannot_do_are_refused_before_anything_starts(precision: str) -> None:
    with pytest.raises(ValueError, match=r"precision"):
        trainer(precision=precision)


def test_16_mixed_is_refused() -> None:
    from lightning.pytorch.plugins import MixedPrecision  # noqa: PLC0415

    plugin = MixedPrecision.__new__(MixedPrecision)
    plugin.precision = "16-mixed"
    with pytest.raises(ValueError, match="loss scaling"):
        trainer(plugins=[plugin])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicate": 3}, "does not divide the 2 processes"),
        ({"replicate": 2, "shard": 2}, "needs 4 processes, this run has 2"),
        ({"replicate": 0}, "replicate=0"),
        ({"replicate": "auto"}, "one of the two"),
        ({"activation_checkpointing": "half"}, "choose one of none, full, selective, budget"),
        ({"compile": "yes"}, "compile='yes'"),
        ({"checkpoint_format": "zip"}, "checkpoint_format='zip'"),
    ],
)
def test_impossible_settings_are_one_clear_error_before_a_process_is_launched(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(strategy=FSDPCompileStrategy(**options), devices=2)


def test_offload_on_the_cpu_and_unknown_block_classes_are_refused() -> None:
    with pytest.raises(ValueError, match="cpu_offload"):
        fit(strategy=FSDPCompileStrategy(cpu_offload=True))
    with pytest.raises(ValueError, match=r"no such class in the model, which has Block"):
        fit(strategy=FSDPCompileStrategy(blocks=["Layer"]))


class Untraceable(Block):
    def forward(self, x_BTD: Tensor) -> Tensor:
        if float(x_BTD.detach().sum()) > 1e9:
            print("never")
        return super().forward(x_BTD)


def with_one_untraceable_block() -> Tiny:
    module = Tiny()
    module.layers = nn.ModuleList([nn.Sequential(Untraceable(), Untraceable()), nn.Sequential(Block(), Block())])
    return module


def test_a_block_that_cannot_be_traced_runs_uncompiled_with_a_word_and_strict_raises() -> None:
    options = {"compile": True, "compile_options": {"backend": "eager"}, "blocks": ["Untraceable", "Block"]}
    strategy = FSDPCompileStrategy(**options)
    run = fit(with_one_untraceable_block, strategy=strategy)
    torch.testing.assert_close(run.losses, fit(with_one_untraceable_block, strategy="auto").losses)
    assert [line for line in strategy.report.notes if line.startswith("Untraceable runs uncompiled: ")]
    assert not [line for line in strategy.report.notes if line.startswith("Block ")]
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        fit(with_one_untraceable_block, strategy=FSDPCompileStrategy(compile_strict=True, **options))


SCRIPT = """
import os, sys
sys.path.insert(0, {here!r})
import warnings; warnings.simplefilter("ignore")
from tiny import Rows, Tiny, fit
run = fit(devices={devices}, max_steps=2)
os.write(1, f"LOSS {{run.losses[-1]}}\\n".encode())  # in one piece, beside the other process
"""


def test_lightnings_own_launcher_starts_the_other_processes(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    (tmp_path / "script.py").write_text(SCRIPT.format(here=here, devices=2))
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    losses = {line for line in done.stdout.splitlines() if line.startswith("LOSS")}
    assert len(losses) == 1
    assert done.stdout.count("LOSS") == 2


class LooksAtGradients(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.held: list[bool] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        groups = self.optimizers(use_pl_optimizer=False).param_groups
        self.held.append(any(p.grad is not None for group in groups for p in group["params"]))
        return super().training_step(batch, batch_idx)


class KeepsGradients(LooksAtGradients):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        pass


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_last_steps_gradients_are_gone_before_the_next_forward(precision: Any) -> None:
    module = LooksAtGradients()
    trainer(accumulate_grad_batches=2, max_steps=3, precision=precision).fit(module, Rows(6), Rows(1))
    assert module.held == [False, True] * 3
    module = KeepsGradients()
    trainer(accumulate_grad_batches=2, max_steps=3, precision=precision).fit(module, Rows(6), Rows(1))
    assert module.held == [False] + [True] * 5
