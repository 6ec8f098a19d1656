import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
import torch._inductor.config as inductor_config
from fp8_runs import STEPS, THIRD_PARTY_WARNINGS, Counting, TransformersModule, causal_lm, fit, plugin, trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch.utils.data import DataLoader

from lightning_fms.distributed import FSDPCompileStrategy
from lightning_fms.kernels import TritonKernels
from lightning_fms.precision import FP8Precision
from lightning_fms.precision.recipes import RECIPES
from lightning_fms.precision.selection import computes_in_fp8

pytestmark = THIRD_PARTY_WARNINGS


@pytest.mark.parametrize("recipe", RECIPES)
def test_loss_follows_bf16(recipe: str) -> None:
    curves = []
    for fp8 in (None, plugin(recipe)):
        torch.manual_seed(0)
        curves.append(fit(fp8, causal_lm()))
    bf16, got = curves
    assert got.float8_layers == 14
    assert got.dtypes == {torch.bfloat16} == bf16.dtypes
    assert bf16.losses[-1] < bf16.losses[0] - 1
    differences = [abs(a - b) for a, b in zip(bf16.losses, got.losses, strict=True)]
    assert 0 < max(differences) < 0.1, differences  # in nats; not 0, or FP8 would not be there


def test_module_of_transformers_trains_and_comes_back_plain() -> None:
    torch.manual_seed(0)
    module, fp8 = TransformersModule(), plugin()
    names = list(module.state_dict())
    losses = fit(fp8, module)
    assert losses.float8_layers == 14
    assert losses.losses[-1] < losses.losses[0] - 1
    assert list(module.state_dict()) == names
    assert not any(computes_in_fp8(m) for m in module.modules())


def test_checkpoint_goes_from_bf16_to_fp8_and_back(tmp_path: Path) -> None:
    module, data = causal_lm(), DataLoader(Counting(), batch_size=4)
    path: str | None = None
    for step, fp8 in enumerate((None, plugin(), None), 1):
        run, losses = trainer(fp8=fp8, max_epochs=step)
        run.fit(module, data, ckpt_path=path, weights_only=True)
        assert len(losses.losses) == STEPS
        path = str(tmp_path / f"{step}.ckpt")
        run.save_checkpoint(path)
    states = [torch.load(tmp_path / f"{step}.ckpt", weights_only=True)["state_dict"] for step in (1, 2, 3)]
    assert list(states[0]) == list(states[1]) == list(states[2])
    assert {value.dtype for state in states for value in state.values()} == {torch.float32}


def test_report_says_what_was_converted_and_why_not() -> None:
    fp8 = plugin(skip=["*.k_proj"], all_gather=True)
    fit(fp8, causal_lm(), fast_dev_run=1, enable_checkpointing=None)
    assert fp8.report[0].startswith("FP8 tensorwise (emulated): 12 of 15 linear layers (")
    assert any("net.layers.*.attention.k_proj" in line and "bf16: skipped by name" in line for line in fp8.report)
    assert any("net.head" in line and "bf16: output head" in line for line in fp8.report)
    assert fp8.report[-1] == "FP8: all_gather=True does nothing here, it needs FSDPCompileStrategy"


@pytest.mark.parametrize("head", [None, "net.head"])
def test_head_with_deferred_logits_stays_in_bf16_and_both_reports_say_so(head: str | None) -> None:
    fp8, kernels = plugin(head=True), TritonKernels(backend="reference", rms_norm=False, head=head)
    fit(fp8, causal_lm(), callbacks=[kernels], strategy=FSDPCompileStrategy(compile=False), max_steps=1)
    assert any("net.head" in line and "bf16: its forward is replaced" in line for line in fp8.report)
    assert [line.split(" (")[0] for line in kernels.report] == [
        "linear cross-entropy: deferred logits at net.head",
        "not swapped: rms_norm=False",
    ]


def test_import_of_torchao_logs_nothing_and_leaves_the_log_as_it_was() -> None:
    code = """
import logging
import lightning_fms.precision
log = logging.getLogger("torch.utils._pytree")
assert not log.filters
log.warning("KernelPreference is heard again")
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert found.stderr.count("KernelPreference") == 1


def test_nothing_to_convert_is_said() -> None:
    fp8 = FP8Precision(emulate=True)
    fit(fp8, causal_lm(), fast_dev_run=1, enable_checkpointing=None)
    assert "nothing to convert" in fp8.report[-1]


def test_machine_without_fp8_is_one_clear_error() -> None:
    with pytest.raises(ValueError, match=r"FP8 needs a GPU.*the run is on 'cpu'"):
        fit(FP8Precision(), causal_lm())


def test_compiler_setting_for_row_scales_is_set_for_the_run_and_put_back() -> None:
    seen: list[bool] = []

    class Look(L.Callback):
        def on_train_start(self, *_: object) -> None:
            seen.append(inductor_config.emulate_precision_casts)

    before = inductor_config.emulate_precision_casts
    for recipe in RECIPES:
        fit(plugin(recipe), causal_lm(), callbacks=[Look()], fast_dev_run=1, enable_checkpointing=None)
        assert inductor_config.emulate_precision_casts == before
    assert seen == [before, True, True, before]  # in the order of RECIPES; fused casts in kernels of its own


@pytest.mark.parametrize("strategy", [SingleDeviceStrategy(), DDPStrategy(), ModelParallelStrategy()])
def test_trainer_accepts_the_plugin_with_stock_strategies(strategy: object) -> None:
    fp8 = plugin()
    run, _ = trainer(fp8=fp8, strategy=strategy)
    assert run.precision_plugin is fp8
    assert run.strategy.precision_plugin is fp8
    assert run.precision == "bf16-mixed"


def test_fit_then_validate_then_fit_again() -> None:
    module = causal_lm()
    run, losses = trainer(fp8=plugin(), max_epochs=1)
    data = DataLoader(Counting(), batch_size=4)
    run.fit(module, data)
    run.validate(module, data, verbose=False)
    run.fit_loop.max_epochs = 2
    run.fit(module, data)
    assert len(losses.losses) == 2 * STEPS
