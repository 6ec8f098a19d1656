"""The largest weights of FP8 layers: by family, on logging steps only, in the board. Shards: `test_fp8_ranks`."""

from pathlib import Path

import lightning as L
import pytest
import torch
from fp8_runs import THIRD_PARTY_WARNINGS, Counting, causal_lm, plugin
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader

from lightning_fms.callbacks import FP8Amax, TensorBoardLayout, fp8_amax
from lightning_fms.precision import FP8Precision

pytestmark = THIRD_PARTY_WARNINGS
STEPS = 4


class Seen(L.Callback):
    """What was logged at each step, and the plain truth at the last one."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.true: dict[str, float] = {}

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: object) -> None:
        values = {n: float(v) for n, v in trainer.callback_metrics.items() if n.startswith(fp8_amax.TAG)}
        self.logged.append({name.removeprefix(fp8_amax.TAG): value for name, value in values.items()})
        self.true = {}
        for name, weight in module.named_parameters():
            family = fp8_amax.family_of(name).removesuffix(".weight")
            self.true[family] = max(self.true.get(family, 0.0), weight.abs().max().item())


def fit(fp8: FP8Precision | None, logger: object = False, every: int = 2) -> Seen:
    torch.manual_seed(0)
    seen, module = Seen(), causal_lm()
    with torch.no_grad():
        module.net.layers[1].ffn.up_proj.weight[-1, -1] = 3.0  # type: ignore[index,union-attr]
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, logger=logger, log_every_n_steps=every, enable_checkpointing=False,
        callbacks=[FP8Amax(), TensorBoardLayout(), seen], plugins=[fp8] if fp8 else [], enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(Counting(), batch_size=4))
    return seen


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "fused"])
def test_the_largest_weight_of_each_family_is_logged_on_logging_steps_only(recipe: str) -> None:
    seen = fit(plugin(recipe))
    assert seen.logged[0] == {}
    assert seen.logged[1] == seen.logged[2] != seen.logged[3]
    last = seen.logged[-1]
    assert len(last) == 7
    assert {family: seen.true[family] for family in last} == pytest.approx(last)
    assert last["net.layers.ffn.up_proj"] > 2.9


def test_the_board_has_a_chart_of_it_and_only_where_there_is_fp8(tmp_path: Path) -> None:
    for name, fp8 in (("fp8", plugin()), ("plain", None)):
        fit(fp8, logger=TensorBoardLogger(tmp_path, name, version=""), every=1)
        (events,) = (tmp_path / name).glob("events*")
        assert (b"^fp8/weight_amax/" in events.read_bytes()) == (name == "fp8")
