"""Throughput, FLOPs, memory, gradient norm and data mix: the numbers are right, and taken only when they are logged."""

from typing import Any

import lightning as L
import pytest
import torch
from callback_runs import ROWS, SEQ_LEN, RandomTokens, tiny_module, trainer
from lightning.pytorch.callbacks import Callback
from torch import nn

from lightning_fms.callbacks import DataMix, GradNorm, Memory, Throughput, grad_norm, memory, throughput
from lightning_fms.callbacks.flops import count_train_flops, matmul_weights
from lightning_fms.callbacks.peaks import peak_of, peak_tflops
from lightning_fms.models import CausalLM, Llama


class Logged(Callback):
    """What the loggers would get, by step."""

    def __init__(self) -> None:
        self.at: dict[int, dict[str, float]] = {}

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.at[trainer.global_step] = {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("tie", [False, True])
def test_flops_of_a_decoder_are_six_n_plus_attention(tie: bool) -> None:
    net = Llama(257, dim=64, n_layers=3, n_heads=4, n_kv_heads=2, tie_embeddings=tie)
    linears = sum(p.numel() for name, p in net.named_parameters() if p.ndim == 2 and "embedding" not in name)
    expected = linears + (257 * 64 if tie else 0)
    assert matmul_weights(net) == expected
    counted = count_train_flops(CausalLM(net, torch.optim.SGD))
    assert counted.counts_attention
    assert counted.at(1000) == pytest.approx(6 * expected + 12 * 3 * 64 * 1000)
    assert not next(net.parameters()).is_meta


def test_flops_of_a_module_with_another_forward_are_those_of_its_linear_layers() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, one: Any, other: Any) -> None:
            raise AssertionError

    counted = count_train_flops(Odd())
    assert counted.at(1000) == 6 * 32
    assert not counted.counts_attention


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
        ("Tesla V100-SXM2-32GB", None),
        ("NVIDIA A1000 Laptop GPU", None),
    ],
)
def test_the_dense_peak_follows_from_the_name_or_is_unknown(name: str, tflops: float | None) -> None:
    assert peak_tflops(name) == tflops
    assert peak_of(torch.device("cpu")) is None


def test_tokens_per_second_counts_every_token_of_the_window_and_nothing_else(tmp_path, monkeypatch) -> None:
    clock = iter(range(0, 10_000, 2))
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: float(next(clock)))
    logged = Logged()
    fit = trainer(tmp_path, Throughput(), logged, accumulate_grad_batches=3)
    fit.fit(tiny_module(), datamodule=RandomTokens())
    # The clock goes on by 2 s each time it is read; it starts after step 1 and is read at steps 2, 4 and 6.
    assert "tokens_per_second" not in logged.at[1]
    assert logged.at[2]["tokens_per_second"] == 3 * ROWS * SEQ_LEN / 2
    assert logged.at[4]["tokens_per_second"] == 2 * 3 * ROWS * SEQ_LEN / 2
    assert logged.at[4]["step_seconds"] == 1.0
    assert "mfu" not in logged.at[6]
    flops = count_train_flops(tiny_module()).at(SEQ_LEN)
    assert logged.at[4]["tflops_per_device"] == pytest.approx(logged.at[4]["tokens_per_second"] * flops / 1e12)


def test_rows_that_fill_up_a_micro_batch_are_no_throughput(tmp_path, monkeypatch) -> None:
    clock = iter(range(0, 10_000, 2))
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: float(next(clock)))
    logged = Logged()
    trainer(tmp_path, Throughput(), logged).fit(tiny_module(), datamodule=RandomTokens(with_filler=True))
    assert logged.at[4]["tokens_per_second"] == 2 * (ROWS // 2) * SEQ_LEN / 2


def test_validation_stops_the_clock(tmp_path, monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now[0])

    class Slow(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            now[0] += 1

        def on_validation_batch_end(self, *_: Any) -> None:
            now[0] += 1000

    logged = Logged()
    fit = trainer(tmp_path, Slow(), Throughput(), logged, val_check_interval=3, limit_val_batches=2)
    fit.fit(tiny_module(), datamodule=RandomTokens())
    assert logged.at[4]["step_seconds"] == 1.0
    assert logged.at[6]["step_seconds"] == 1.0


def test_the_device_is_not_synchronised_between_logging_steps(tmp_path, monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(throughput, "synchronize", calls.append)
    trainer(tmp_path, Throughput(), max_steps=40, log_every_n_steps=20).fit(tiny_module(), datamodule=RandomTokens())
    assert len(calls) <= 1 + 2 * 2


def test_the_gradient_norm_is_that_before_clipping_on_logged_steps_only(tmp_path, monkeypatch) -> None:
    norms, taken = [], []

    class Reference(Callback):
        def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
            norms.append(torch.cat([p.grad.flatten() for p in module.parameters()]).norm().item())

    real = grad_norm.total_norm
    monkeypatch.setattr(grad_norm, "total_norm", lambda gradients: taken.append(1) or real(gradients))
    logged = Logged()
    fit = trainer(tmp_path, Reference(), GradNorm(), logged, gradient_clip_val=1e-3)
    fit.fit(tiny_module(), datamodule=RandomTokens())
    assert [logged.at[step]["grad_norm"] for step in (2, 4, 6)] == pytest.approx(norms[1::2], rel=1e-5)
    assert len(taken) == 3


def test_memory_is_logged_and_plausible(tmp_path) -> None:
    logged = Logged()
    trainer(tmp_path, Memory(), logged).fit(tiny_module(), datamodule=RandomTokens())
    assert 0.05 < logged.at[2]["memory_gib"] < 100
    before = memory.peak_resident_bytes()
    held = torch.ones(64 * 2**20)
    assert memory.peak_resident_bytes() >= before
    del held


def test_the_mix_is_logged_by_source(tmp_path) -> None:
    logged = Logged()
    trainer(tmp_path, DataMix(), logged).fit(tiny_module(), datamodule=RandomTokens())
    assert logged.at[2]["data/noise/share"] == 1.0
    assert logged.at[2]["data/noise/epoch"] == 0.5


def test_the_mix_is_asked_for_on_logging_steps_only_and_on_every_rank(tmp_path, monkeypatch) -> None:
    asked = []

    class Asked(RandomTokens):
        def mix_report(self) -> dict[str, dict[str, float]]:
            asked.append(fit.global_step)
            return super().mix_report()

    fit = trainer(tmp_path, DataMix())
    monkeypatch.setattr(type(fit), "is_global_zero", False)  # As on any other rank.
    fit.fit(tiny_module(), datamodule=Asked())
    assert asked == [2, 4, 6]


@pytest.mark.filterwarnings("ignore:.*but have no `val_dataloader`")
def test_a_mix_without_sources_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="mix_report"):
        trainer(tmp_path, DataMix()).fit(tiny_module(), RandomTokens().train_dataloader())
