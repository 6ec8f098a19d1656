"""What computes after weights changed behind its back: averages, old graphs, held gradients, a second fit, FP8."""

import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from gloo_world import run_world
from lightning.pytorch.callbacks import EMAWeightAveraging
from tiny import D, Rows, Tiny, V, fit, trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_fms.distributed import FSDPCompileStrategy
from lightning_fms.distributed.materialize import Materializer
from lightning_fms.precision import FP8Precision

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*treespec.*",
    "ignore:The .grad attribute of a Tensor that is not a leaf",
)


def test_validation_runs_on_the_averaged_weights_of_lightnings_callback() -> None:
    options: dict[str, Any] = {"precision": "bf16-mixed", "val_check_interval": 2, "max_steps": 8}
    averaged = fit(callbacks=[EMAWeightAveraging(decay=0.99)], **options)
    stock = fit(callbacks=[EMAWeightAveraging(decay=0.99)], strategy="auto", **{**options, "precision": "32-true"})
    plain = fit(**options)
    assert averaged.losses == plain.losses, "training goes on with its own weights"
    error, effect = (
        abs(averaged.val_losses[-1] - stock.val_losses[-1]),
        abs(plain.val_losses[-1] - stock.val_losses[-1]),
    )
    assert error < 0.3 * effect


class KeepsOld(Tiny):
    """Manual optimization that tries to go backward through a graph older than the step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seen: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        view = self.head.weight.view(-1)
        old, loss = self.loss(batch), self.loss(batch)
        before = view._version
        self.manual_backward(loss)
        self.optimizers().step()
        self.seen.append(view._version > before)
        try:
            old.backward()
        except RuntimeError as error:
            self.seen.append("modified by an inplace operation" in str(error))
        else:
            self.seen.append(False)
        self.optimizers().zero_grad()


def old_graph() -> list[Any]:
    module = KeepsOld()
    trainer(max_steps=1).fit(module, Rows(1), Rows(1))
    return module.seen


class Still(Tiny):
    """Never moves; keeps the gradients of its last step."""

    def __init__(self) -> None:
        super().__init__()
        self.fail_after = -1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.fail_after:
            raise RuntimeError("in the middle of a window")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.last = {n: p.grad.full_tensor().clone() for n, p in self.named_parameters() if p.grad is not None}


def window_after_a_failure() -> float:
    """How far its gradients are from those of a run that never saw the window that was given up."""
    gradients = []
    for fail in (True, False):
        pl.seed_everything(7, verbose=False)
        module = Still()
        if fail:
            module.fail_after = 0
            with pytest.raises(RuntimeError, match="middle of a window"):
                trainer(accumulate_grad_batches=2, max_steps=1).fit(module, Rows(2), Rows(1))
            module.fail_after = -1
        trainer(accumulate_grad_batches=2, max_steps=1).fit(module, Rows(2, seed=3), Rows(1))
        gradients.append(module.last)
    return max(float((gradients[0][n] - g).abs().max()) for n, g in gradients[1].items())


class Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).view(x.shape)


class Views(Tiny):
    """Blocks that return views, and saves in the middle of an automatic step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Viewing() for _ in range(2))
        self.based: list[bool] = []
        self.path: Path | None = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.based.append(self.layers[0](torch.ones(1, 2, D))._base is not None)
        loss = super().training_step(batch, batch_idx)
        if self.path is not None:
            self.trainer.save_checkpoint(self.path)
        return loss


def two_fits_with_a_save_in_the_step(path: Path) -> list[Any]:
    module = Views()
    trainer(max_steps=1).fit(module, Rows(1), Rows(1))
    module.path = path
    trainer(max_steps=1).fit(module, Rows(1), Rows(1))
    return [module.based, "forward" in module.layers[0].__dict__, path.is_dir()]


def in_a_world(folder: Path) -> dict[str, Any]:
    filters = list(warnings.filters)
    return {
        "old graph": old_graph(),
        "failure": window_after_a_failure(),
        "twice": two_fits_with_a_save_in_the_step(folder / "x"),
        "filters": [f for f in warnings.filters if f not in filters and "view tensor" in str(f)],
        "mixed": broadcast_of_mixed(),
    }


class Mixed(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(D, V)
        self.head.bias = nn.Parameter(torch.full((V,), 1.0 + int(os.environ["RANK"])))
        self.head.weight = nn.Parameter(self.head.weight.detach().to("meta"))


def broadcast_of_mixed() -> Tensor:
    module = Mixed()

    class Look(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            bias = pl_module.head.bias
            assert isinstance(bias, DTensor)
            self.bias = bias.full_tensor().detach().clone()

    look = Look()
    trainer(look, max_steps=1).fit(module, Rows(1), Rows(1))
    return look.bias


def test_changed_weights_on_two_processes(tmp_path: Path) -> None:
    for result in run_world(2, in_a_world, tmp_path, tmp_path):
        assert result["old graph"] == [True, True]
        assert result["failure"] < 1e-6, "gradients of a window that was given up leak into the next"
        assert result["twice"] == [[False, False], False, True]
        assert result["filters"] == []
        assert torch.equal(result["mixed"], torch.ones(V))


def test_an_instances_own_forward_survives_a_fit() -> None:
    module = Tiny()
    own = module.layers[0].forward
    module.layers[0].forward = own
    strategy = FSDPCompileStrategy(activation_checkpointing="full")
    trainer(strategy=strategy, max_steps=1).fit(module, Rows(1), Rows(1))
    assert module.layers[0].__dict__["forward"] is own
    assert "forward" not in module.layers[1].__dict__


def test_a_tied_weight_is_drawn_once_and_real_tensors_are_kept() -> None:
    first, second = nn.Linear(3, 3, device="meta"), nn.Linear(3, 3, device="meta")
    second.weight = first.weight
    materializer = Materializer(torch.device("cpu"), seed=1)
    materializer.fill([("first", first)])
    drawn = first.weight.detach().clone()
    materializer.fill([("second", second)])
    assert second.weight is first.weight
    assert torch.equal(first.weight, drawn)


class Floats(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 7)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.b(self.a(batch)).float().square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("how", [{"precision": "bf16-mixed"}, {"plugins": [FP8Precision(emulate=True)]}])
def test_float_inputs_are_cast_for_every_plugin_that_computes_in_bf16(how: dict[str, Any]) -> None:
    t = trainer(max_steps=1, **how)
    t.fit(Floats(), DataLoader(torch.randn(16, 16), batch_size=16))  # type: ignore[arg-type]
    assert t.global_step == 1


def test_the_plugin_hears_of_loaded_weights(tmp_path: Path) -> None:
    class Hears(FP8Precision):
        heard: nn.Module | None = None

        def on_weights_loaded(self, module: nn.Module) -> None:
            self.heard = module

    fit(save=tmp_path / "x", max_steps=1)
    plugin = Hears(emulate=True)
    module = Tiny()
    trainer(plugins=[plugin]).fit(module, Rows(4), Rows(1), ckpt_path=tmp_path / "x")
    assert plugin.heard is module


def test_a_checkpoint_that_cannot_be_removed_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: Any) -> None:
        raise OSError("busy")

    monkeypatch.setattr(Path, "rename", busy)
    (tmp_path / "x").mkdir()
    with pytest.warns(UserWarning, match="busy"):
        FSDPCompileStrategy().remove_checkpoint(tmp_path / "x")
