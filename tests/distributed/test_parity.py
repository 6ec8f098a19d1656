"""Losses and gradients are those of stock Lightning on one process at the same global batch, on 1, 2 and 3 processes."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from gloo_world import once, run_world
from tiny import D, Run, Tiny, V, fit
from torch import Tensor

from lightning_fms.distributed import FSDPCompileStrategy

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*", "ignore:.*LeafSpec.*", "ignore:.*`isinstance.treespec.*"
)
OPTIONS: dict[str, Any] = {
    "max_steps": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "val_check_interval": 4
}  # fmt: skip


class Frozen(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)
        self.embedding.requires_grad_(False)


class Alternating(Tiny):
    """Manual optimization: two optimizers that take turns within a step, each on its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        for turn, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            loss = self.loss(batch) * (1 + turn)
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.log("loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        body = [*self.embedding.parameters(), *self.layers.parameters()]
        rest = [*self.norm.parameters(), *self.head.parameters()]
        return [torch.optim.AdamW(body, lr=1e-2), torch.optim.SGD(rest, lr=1e-1)]


class NoBlocks(pl.LightningModule):
    """Everything is in the root group, and optimization is manual: nothing but the loss reaches FSDP's root."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(V, D))
        self.head = torch.nn.Linear(D, V)
        self.automatic_optimization = False

    def loss(self, batch: Tensor) -> Tensor:
        logits_BTV = self.head(torch.nn.functional.embedding(batch[:, :-1], self.table))
        return torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), batch[:, 1:].flatten())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for _ in range(2):
            loss = self.loss(batch)
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        self.log("loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def tied() -> Tiny:
    return Tiny(tied=True)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (Tiny, OPTIONS),
    "tied": (tied, OPTIONS),
    "frozen": (Frozen, OPTIONS),
    "manual": (Alternating, {"max_steps": 4, "val_check_interval": 2}),
    "no_blocks": (NoBlocks, {"max_steps": 4, "val_check_interval": 2}),
}


def ours() -> dict[str, Run]:
    runs = {name: fit(make, **options) for name, (make, options) in CASES.items()}
    runs["reduced_each_time"] = fit(Tiny, strategy=FSDPCompileStrategy(accumulate_without_reduce=False), **OPTIONS)
    recomputed = FSDPCompileStrategy(
        activation_checkpointing="selective", compile=True, compile_options={"backend": "aot_eager"}
    )
    evaluated = {} if os.environ.get("WORLD_SIZE", "1") == "1" else {"limit_val_batches": 0}  # is compiled once more
    runs["recomputed_compiled"] = fit(Tiny, strategy=recomputed, **OPTIONS, **evaluated)
    runs["gathered"] = fit(Tiny, strategy=FSDPCompileStrategy(reshard_after_forward=False), **OPTIONS)
    runs["bf16"] = fit(Tiny, precision="bf16-mixed", **OPTIONS)
    runs["bf16_recomputed"] = fit(
        Tiny, strategy=FSDPCompileStrategy(activation_checkpointing="full"), precision="bf16-mixed", **OPTIONS
    )
    runs["bf16_manual"] = fit(Alternating, precision="bf16-mixed", max_steps=4)
    runs["bf16_true"] = fit(Tiny, precision="bf16-true", **OPTIONS)
    return runs


def stock_runs(_: Path) -> dict[str, Run]:
    return {name: fit(make, strategy="auto", **options) for name, (make, options) in CASES.items()}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    return once(tmp_path_factory, "parity-stock", stock_runs)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Run]]:
    def run(folder: Path) -> dict[int, dict[str, Run]]:
        return {1: ours(), **{size: run_world(size, ours, folder / str(size))[0] for size in (2, 3)}}

    return once(tmp_path_factory, "parity", run)


def assert_same_run(run: Run, reference: Run, tolerance: float) -> None:
    assert run.losses
    torch.testing.assert_close(run.losses, reference.losses, rtol=tolerance, atol=tolerance)
    if run.val_losses:
        torch.testing.assert_close(run.val_losses, reference.val_losses, rtol=tolerance, atol=tolerance)
    assert len(run.gradients) == len(reference.gradients)
    for gradients, expected in zip(run.gradients, reference.gradients, strict=True):
        torch.testing.assert_close(gradients, expected, rtol=100 * tolerance, atol=tolerance)
    torch.testing.assert_close(run.weights, reference.weights, rtol=100 * tolerance, atol=100 * tolerance)


@pytest.mark.parametrize("case", [*CASES, "reduced_each_time", "recomputed_compiled", "gathered"])
def test_losses_and_gradients_equal_stock_lightning_on_1_2_3_processes(worlds, stock, case: str) -> None:
    for size in (1, 2, 3):
        # fp32 sums in another order; AdamW turns a gradient near zero into a step of either sign
        assert_same_run(worlds[size][case], stock[case if case in CASES else "plain"], tolerance=2e-6)


def test_one_device_fp32_is_bitwise_stock_lightning(worlds, stock) -> None:
    assert worlds[1]["plain"].losses == stock["plain"].losses
    assert all(torch.equal(worlds[1]["plain"].weights[n], w) for n, w in stock["plain"].weights.items())


@pytest.mark.parametrize("case", ["bf16", "bf16_recomputed", "bf16_manual"])
def test_bf16_losses_on_1_and_2_and_3_processes_agree_to_1e3(worlds, case: str) -> None:
    for size in (2, 3):
        torch.testing.assert_close(worlds[size][case].losses, worlds[1][case].losses, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(worlds[size][case].val_losses, worlds[1][case].val_losses, rtol=1e-3, atol=1e-3)


def test_bf16_gradients_are_those_of_fp32_within_bf16(worlds, stock) -> None:
    for size in (1, 2, 3):
        for name, gradient in worlds[size]["bf16"].gradients[0].items():
            expected = stock["plain"].gradients[0][name]
            assert gradient.dtype == torch.float32
            assert (gradient - expected).norm() <= 0.05 * expected.norm()


def test_bf16_keeps_fp32_masters_and_bf16_true_does_not(worlds) -> None:
    for size in (1, 2, 3):
        assert {w.dtype for w in worlds[size]["bf16"].weights.values()} == {torch.float32}
        assert worlds[size]["bf16_true"].weights["head.weight"].dtype == torch.bfloat16
        torch.testing.assert_close(
            worlds[size]["bf16_true"].losses[0], worlds[1]["bf16_true"].losses[0], rtol=1e-2, atol=1e-2
        )
