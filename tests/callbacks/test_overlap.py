"""Exposed communication: right on any intervals, and measured once, between whole optimizer steps, on request."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from callback_runs import RandomTokens, tiny_module, trainer
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PyTorchProfiler
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from lightning_fms.callbacks import Overlap, overlap
from lightning_fms.callbacks.exposed import Exposure, difference, exposure, kernels_of, length, union

NCCL = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
spans = st.lists(st.tuples(st.integers(0, 40), st.integers(-3, 12)).map(lambda p: (p[0], p[0] + p[1])), max_size=12)


def cells(intervals: list[tuple[int, int]]) -> set[int]:
    """The unit cells that integer intervals cover."""
    return {cell for start, end in intervals for cell in range(start, end)}


@given(spans, spans)
def test_union_and_difference_are_those_of_sets(one, other) -> None:
    for found, expected in ((union(one), cells(one)), (difference(one, other), cells(one) - cells(other))):
        assert cells(found) == expected
        assert length(found) == len(expected)
        assert all(a[1] < b[0] for a, b in pairwise(found)), "disjoint, in order, none touch"


@given(spans, spans, spans)
def test_exposed_is_communication_without_compute_whatever_the_streams_and_copies(sent, computed, copied) -> None:
    def named(name: str, intervals: Any) -> list[tuple[str, int, int]]:
        return [(name, start, end) for start, end in intervals]

    kernels = named(NCCL, sent) + named("nvjet_tst_128x64", computed) + named("Memcpy HtoD (Pinned -> Device)", copied)
    found = exposure(kernels, total=60)
    assert found == Exposure(len(cells(sent)), len(cells(sent) - cells(computed)), 60)
    assert 0 <= found.share <= 1
    assert found == exposure(kernels[::-1], total=60)
    assert exposure(named(NCCL, computed) + named("gemm", computed)).exposed == 0, "hidden by itself"


def test_a_trace_of_two_streams() -> None:
    trace = [(NCCL, 0, 4), ("gemm", 2, 9), (NCCL, 8, 14), ("gemm", 12, 16)]
    assert exposure(trace) == Exposure(communication=10, exposed=2 + 3, total=16)
    assert exposure(trace).share == 0.5
    assert (exposure([]).share, exposure([]).of_step) == (0, 0)


def test_kernels_are_the_events_of_the_device_that_are_no_marked_range() -> None:
    def event(name: str, where: DeviceType, **more: Any) -> FunctionEvent:
        return FunctionEvent(0, name, 0, 10, 20, device_type=where, **more)

    events = [
        event(NCCL, DeviceType.CUDA),
        event("nccl:all_gather", DeviceType.CUDA, is_user_annotation=True),
        event("aten::mm", DeviceType.CPU),
    ]
    assert kernels_of(events) == [(NCCL, 10, 20)]


class Trace:
    """Kernels as from a device; the real one needs a GPU."""

    running: "list[Trace]" = []

    def start(self) -> None:
        self.running.append(self)

    def stop(self) -> list[tuple[str, float, float]]:
        self.running.remove(self)
        return [(NCCL, 0.0, 4000.0), ("gemm", 1000.0, 10000.0)]


class Seen(L.Callback):
    def __init__(self) -> None:
        self.profiled: list[int] = []

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if Trace.running and trainer.global_step not in self.profiled:
            self.profiled.append(trainer.global_step)


@pytest.fixture
def device(monkeypatch) -> None:
    monkeypatch.setattr(overlap, "nothing_to_measure", lambda trainer: None)
    monkeypatch.setattr(overlap, "DeviceTrace", Trace)
    Trace.running = []


def test_it_is_measured_once_over_whole_steps_and_logged(device, tmp_path) -> None:
    seen, asked, logger = Seen(), Overlap(at_step=2, steps=2), CSVLogger(tmp_path)
    options = {"accumulate_grad_batches": 2, "max_steps": 7, "logger": logger, "log_every_n_steps": 100}
    trainer(tmp_path, seen, asked, **options).fit(tiny_module(), datamodule=RandomTokens())
    assert seen.profiled == [2, 3]
    assert asked.found == Exposure(4000, 1000, 10000)
    head, row = Path(logger.experiment.metrics_file_path).read_text().splitlines()
    logged = dict(zip(head.split(","), row.split(","), strict=True))
    assert logged == {"exposed_communication": "0.25", "exposed_share_of_step": "0.1", "step": "4"}


def test_a_validation_is_left_out_and_a_run_too_short_says_so(device, tmp_path, caplog) -> None:
    seen, asked = Seen(), Overlap(at_step=2, steps=2)
    options = {"val_check_interval": 3, "limit_val_batches": 1}
    trainer(tmp_path, seen, asked, **options).fit(tiny_module(), datamodule=RandomTokens())
    assert asked.found is not None
    assert seen.profiled == [2, 4, 5], "begun at 2, dropped by the validation at 3, begun again"
    caplog.set_level("INFO", logger="lightning.pytorch")  # a run of the app in this process has silenced it
    trainer(tmp_path, short := Overlap(at_step=5, steps=2)).fit(tiny_module(), datamodule=RandomTokens())
    assert short.found is None
    assert "nothing was measured: 2 optimizer steps without a validation after step 5 are needed" in caplog.text
    assert not Trace.running


def test_without_gpus_it_says_why_nothing_is_measured(tmp_path, caplog) -> None:
    caplog.set_level("INFO", logger="lightning.pytorch")  # a run of the app in this process has silenced it
    trainer(tmp_path, Overlap(at_step=1), max_steps=1).fit(tiny_module(), datamodule=RandomTokens())
    assert "overlap: nothing is measured: collectives on cpu" in caplog.text


def test_what_cannot_be_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="at_step=0"):
        Overlap(at_step=0)
    asked = Overlap(at_step=1)
    fit = trainer(tmp_path, asked, profiler=PyTorchProfiler(dirpath=tmp_path, filename="trace"))
    with pytest.raises(ValueError, match="a process has one profiler"):
        asked.setup(fit, tiny_module(), "fit")  # in a fit, Lightning's profiler fails once more when it is deleted
