"""A trace on request: of the steps asked for, on any device, and a word where there is none."""

import gzip
import json
from pathlib import Path

import lightning as L
import pytest
import torch
from callback_runs import RandomTokens, tiny_module, trainer
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg

from lightning_fms.callbacks import MemorySnapshot, Overlap, Profiler
from lightning_fms.callbacks.profiler import shares


def test_it_writes_a_trace_and_a_table_of_the_steps_asked_for(tmp_path: Path, capsys) -> None:
    profiler = Profiler(tmp_path / "profile", at_step=2, steps=2)
    trainer(tmp_path, profiler, accumulate_grad_batches=2).fit(tiny_module(), datamodule=RandomTokens())
    path = tmp_path / "profile" / "step-4.rank-0.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "Optimizer.step#AdamW.step" for event in events) == 2
    assert "aten::" in path.with_name("step-4.rank-0.txt").read_text()
    assert f"profiler: 2 steps in {path}" in capsys.readouterr().out


def test_on_a_gpu_a_kernel_counts_once_and_the_gaps_of_a_range_do_not() -> None:
    def event(key: str, us: float, device: DeviceType = DeviceType.CPU, is_range: bool = False) -> FunctionEventAvg:
        average = FunctionEventAvg()
        average.key, average.device_type, average.is_user_annotation = key, device, is_range
        average.self_device_time_total = us
        return average

    events = [
        event("aten::mm", 30.0),
        event("nvjet_sm90", 30.0, DeviceType.CUDA),
        event("Optimizer.step", 500.0, DeviceType.CUDA, is_range=True),
        event("Optimizer.step", 0.0, is_range=True),
        event("aten::add", 10.0),
        event("vectorized_add", 10.0, DeviceType.CUDA),
    ]
    assert shares(events, "cuda") == [("aten::mm", 0.75), ("aten::add", 0.25)]


def test_it_says_so_where_a_run_is_too_short(tmp_path: Path) -> None:
    fit = trainer(tmp_path, Profiler(tmp_path / "profile", at_step=50))
    with pytest.warns(UserWarning, match=r"no trace: the run had 6 optimizer steps, .* lower at_step"):
        fit.fit(tiny_module(), datamodule=RandomTokens())
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize("numbers", [{"at_step": 0}, {"steps": 0}])
def test_numbers_below_one_are_refused(numbers, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"=0: must be at least 1"):
        Profiler(tmp_path, **numbers)


def test_a_second_profiler_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Profiler beside Overlap: a process has one profiler"):
        trainer(tmp_path, Profiler(tmp_path), Overlap(at_step=3)).fit(tiny_module(), datamodule=RandomTokens())


def test_without_a_gpu_there_is_no_snapshot_of_memory_to_take(tmp_path: Path) -> None:
    class Full(L.Callback):
        def on_train_batch_start(self, *_: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    snapshot = MemorySnapshot(tmp_path / "memory", history=True)
    with pytest.raises(torch.OutOfMemoryError):
        trainer(tmp_path, snapshot, Full()).fit(tiny_module(), datamodule=RandomTokens())
    assert snapshot.written is None
    assert not (tmp_path / "memory").exists()
