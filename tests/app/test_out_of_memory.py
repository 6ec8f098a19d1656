"""Out of memory: what was asked for, and three settings to try, cheapest first, each with its next value."""

from pathlib import Path
from typing import Any

import pytest
import torch
from app_runs import SHORT, call
from hydra import compose, initialize_config_module
from lightning.pytorch.callbacks import Callback
from omegaconf import OmegaConf

from lightning_fms.command_line import with_size
from lightning_fms.out_of_memory import cause_of, ways_out


def ways(*words: str, devices: int = 1, on_gpu: bool = True) -> list[str]:
    own = (
        "data=text",
        "data.sources={web: x.jsonl}",
        "data.tokenizer=bytes",
        "model.net.vocab_size=128256",
        "paths.run=x",
    )
    with initialize_config_module("lightning_fms.conf", version_base="1.3"):
        cfg: Any = OmegaConf.to_container(compose("train", overrides=with_size([*own, *words])), resolve=True)
    return [way for way, _ in ways_out(cfg, devices, on_gpu)]


@pytest.mark.parametrize(
    ("words", "devices", "first"),
    [
        (
            ("data.micro_batch_size=8",),
            1,
            ["data.micro_batch_size=4", "kernels=all", "strategy.activation_checkpointing=selective"],
        ),
        (("data.micro_batch_size=null", "data.global_batch_size=32"), 2, ["data.micro_batch_size=8"]),
        (
            ("kernels=all", "strategy.activation_checkpointing=selective"),
            4,
            ["strategy.activation_checkpointing=full", "strategy.activation_offload=true", "trainer.devices=8"],
        ),
        (("strategy=ddp", "kernels=all"), 8, ["strategy=fsdp_compile"]),
        (("strategy.replicate=2", "kernels=all"), 8, ["strategy.replicate=1 strategy.shard=auto"]),
    ],
)  # fmt: skip
def test_the_cheapest_ways_come_first_with_their_next_value(words, devices, first) -> None:
    assert ways(*words, devices=devices)[: len(first)] == first


def test_on_a_cpu_nothing_that_takes_a_gpu_is_proposed() -> None:
    assert ways("data.micro_batch_size=2", on_gpu=False) == [
        "data.micro_batch_size=1", "strategy.activation_checkpointing=full", "data.seq_len=2048",
    ]  # fmt: skip


def test_memory_is_recognised_below_other_errors() -> None:
    outer = ValueError("while building")
    outer.__cause__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert cause_of(outer) is outer.__cause__
    assert (
        cause_of(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")) is not None
    )
    assert cause_of(MemoryError()) is not None
    assert cause_of(RuntimeError("shape mismatch")) is None


class Full(Callback):
    """A device that is full at the second step."""

    def on_train_batch_start(self, trainer: Any, *_: object) -> None:
        if trainer.global_step == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand a page of advice")


def test_a_run_out_of_memory_says_what_to_try_without_a_traceback(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, *SHORT, f"+callbacks.own._target_={__name__}.Full") == 1
    err = capsys.readouterr().err
    assert "fms-train: error: out of memory: CUDA out of memory. Tried to allocate 2.00 GiB." in err
    assert "data.micro_batch_size=2" in err
    assert "fms-plan experiment=quickstart" in err
    assert "Traceback" not in err
    assert "a page of advice" not in err


@pytest.mark.filterwarnings("ignore:.*saving step")
def test_a_save_that_fails_to_the_end_is_one_line(monkeypatch, tmp_path: Path, capsys) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.distributed.checkpoint.save", full)
    assert call(monkeypatch, *SHORT) == 1
    err = capsys.readouterr().err
    assert "fms-train: error: runs/quickstart/001/checkpoints/" in err
    assert "No space left on device" in err
    assert "Traceback" not in err
