"""The callback in the Trainer: same training with and without it, no logits, under one device, DDP and the suite's FSDP."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from test_swap import CASES, V
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from user_models import Decoder

from lightning_fms.distributed import FSDPCompileStrategy
from lightning_fms.kernels import DeferredLogits, TritonKernels
from lightning_fms.kernels.swap import is_swapped
from tests.worlds import run_world

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*`isinstance.treespec"),
]
STEPS, ROWS = 3, 4


class Lit(pl.LightningModule):
    def __init__(self, case: str) -> None:
        super().__init__()
        make, self.loss_of, _, _ = CASES[case]
        self.net = make()
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss_of(self.net, batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss_of(self.net, batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


class Late(Lit):
    """Builds its network in `configure_model`."""

    def __init__(self, case: str) -> None:
        super().__init__(case)
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            torch.manual_seed(1)
            self.net = Decoder()


class Sharded(Lit):
    """Shards itself, as stock Lightning wants it: the head's group ends before the loss."""

    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class ShardedWhole(Lit):
    """Is one FSDP2 group, and looks at each step's logits again in the next step."""

    kept: Tensor | None = None

    def configure_model(self) -> None:
        fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def forward(self, batch: Tensor) -> Tensor:
        if self.kept is not None:
            self.kept.softmax(-1)
        self.kept = self.net(batch).detach()
        return self.loss_of(self.net, batch)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self(batch), sync_dist=True)


class Swapped(pl.Callback):
    """What was swapped while training."""

    def __init__(self) -> None:
        self.number = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.number = sum(is_swapped(m) for m in pl_module.modules())


def loader(world: int, rank: int) -> DataLoader[Tensor]:
    rows = torch.randint(0, V, (STEPS, ROWS, 9), generator=torch.Generator().manual_seed(5))
    return DataLoader(rows[:, rank::world], batch_size=None)  # type: ignore[arg-type]


def whole(tensor: Tensor) -> np.ndarray:  # a tensor would travel between processes as a file handle
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().numpy().copy()


def fit(
    strategy: Callable[[], Any],
    case: str,
    world: int = 1,
    kernels: bool = True,
    module: type[Lit] = Lit,
    precision: Any = None,
) -> dict[str, Any]:
    torch.manual_seed(1)
    lit, swapped = module(case), Swapped()
    callback = TritonKernels(linear_cross_entropy=True, rms_norm=True)
    DeferredLogits.materialisations = 0
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy(),
        precision=precision,
        max_epochs=1,
        callbacks=[callback, swapped] if kernels else [swapped],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    data = loader(world, trainer.strategy.global_rank if world > 1 else 0)
    trainer.fit(lit, data, data)
    return {
        "loss": lit.losses,
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "weights": {n: whole(p) for n, p in lit.named_parameters()},
        "materialised": DeferredLogits.materialisations,
        "swapped": swapped.number,
        "left": sum(is_swapped(m) or "forward" in m.__dict__ for m in lit.net.modules()),
        "report": callback.report,
    }


def plain(case: str, **options: Any) -> dict[str, Any]:
    return fit(lambda: "auto", case, kernels=False, **options)


def mean_loss(ranks: list[dict[str, Any]]) -> list[float]:
    return torch.tensor([r["loss"] for r in ranks]).mean(0).tolist()


def assert_same_training(ranks: list[dict[str, Any]], reference: dict[str, Any], tolerance: float) -> None:
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(mean_loss(ranks), reference["loss"], **close)
    for rank in ranks:
        assert rank["materialised"] == 0
        assert rank["left"] == 0
        torch.testing.assert_close(rank["val_loss"], reference["val_loss"], **close)
        for name, weight in reference["weights"].items():
            np.testing.assert_allclose(rank["weights"][name], weight, **close, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_one_device(case: str) -> None:
    run = fit(lambda: "auto", case)
    assert_same_training([run], plain(case), 1e-5)
    assert run["swapped"] == CASES[case][3] + 1


@pytest.mark.parametrize("case", CASES)
def test_ddp_on_two_processes(case: str) -> None:
    assert_same_training(run_world(fit, 2, DDPStrategy, case, 2), plain(case), 1e-5)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_the_suites_strategy(case: str, world: int) -> None:
    runs = run_world(fit, world, FSDPCompileStrategy, case, world)
    assert_same_training(runs, plain(case), 1e-5)
    assert runs[0]["swapped"] == CASES[case][3] + 1


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("case", ["own", "tied", "transformers"])
def test_bf16_under_the_suites_strategy(case: str, world: int) -> None:
    runs = run_world(fit, world, FSDPCompileStrategy, case, world, True, Lit, "bf16-mixed")
    assert_same_training(runs, plain(case), 5e-2)


def test_bf16_autocast() -> None:
    reference = plain("own")
    run = fit(lambda: "auto", "own", precision="bf16-mixed")
    assert_same_training([run], reference, 5e-2)


def test_modules_built_in_configure_model() -> None:
    reference = plain("own", module=Late)
    (ours,) = run_world(fit, 1, FSDPCompileStrategy, "own", 1, True, Late)
    for run in (ours, fit(lambda: "auto", "own", module=Late)):
        assert_same_training([run], reference, 1e-5)
        assert run["swapped"] == 5


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # a Linear with a bias returns a view, ours or not
def test_a_head_whose_group_is_resharded_before_the_loss_gives_real_logits() -> None:
    strategy = partial(ModelParallelStrategy, data_parallel_size=2, tensor_parallel_size=1)
    runs = run_world(fit, 2, strategy, "own", 2, True, Sharded)
    torch.testing.assert_close(mean_loss(runs), plain("own")["loss"], rtol=1e-5, atol=1e-5)
    assert all(run["materialised"] == 0 for run in runs)  # no deferred object was made in the first place


def stale_logits(world: int) -> str:
    strategy = partial(ModelParallelStrategy, data_parallel_size=world, tensor_parallel_size=1)
    with pytest.raises(RuntimeError) as error:
        fit(strategy, "own", world, True, ShardedWhole)
    return str(error.value)


def test_logits_from_before_a_step_are_an_error_under_stock_fsdp2() -> None:
    for message in run_world(stale_logits, 2, 2):
        assert "weight changed after these logits were made" in message


def test_after_an_error_the_module_is_its_own_again() -> None:
    class Failing(Lit):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            assert is_swapped(self.net.final)
            raise ValueError("mine")

    kept: list[nn.Module] = []

    class Keep(Failing):
        def __init__(self, case: str) -> None:
            super().__init__(case)
            kept.append(self)

    with pytest.raises(ValueError, match="mine"):
        fit(lambda: "auto", "own", module=Keep)
    assert not any(is_swapped(m) for m in kept[0].modules())
