"""Times: the measured steps, and how a bound moves with what a configuration does."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_fms.planner.hardware import Hardware
from lightning_fms.planner.space import Configuration
from lightning_fms.planner.throughput import Work, step_time

CONF = Path(__file__).parents[2] / "conf" / "hardware"
GIB = 2**30
GPU = Hardware(
    "test", bf16_tflops=1000, memory_gib=80, bandwidth_gbps=4000, link_gbps=400, host_gbps=50, fp8_tflops=2000
)


def shipped(name: str) -> Hardware:
    fields = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    assert isinstance(fields, dict)
    assert fields.pop("_target_") == "lightning_fms.planner.hardware.Hardware"
    return Hardware(**fields)  # type: ignore[arg-type]


# docs/performance.md: 16 layers of Llama 8B at 8,192 tokens, and Llama 1B (untied) at 4,096; activations as predicted.
LLAMA_8B16 = Work(
    4.54e9, 3.489e9, 24.09e9 + 12 * 16 * 4096 * 8192, 6 * 3.489e9 + 12 * 16 * 4096 * 8192, 8192, 128256, 18.4 * GIB
)
LLAMA_1B = Work(
    1.499e9, 0.973e9, 7.41e9 + 12 * 16 * 2048 * 4096, 6 * 0.973e9 + 12 * 16 * 2048 * 4096, 4096, 128256, 4.64 * GIB
)
MEASURED = [
    (LLAMA_8B16, Configuration(precision="bf16"), 401.0),
    (LLAMA_8B16, Configuration(precision="fused"), 301.2),
    (LLAMA_8B16, Configuration(precision="fused", micro_batch_size=2), 562.2),
    (LLAMA_1B, Configuration(micro_batch_size=4), 257.3),
    (LLAMA_1B, Configuration(micro_batch_size=4, precision="fused"), 203.1),
    (LLAMA_1B, Configuration(micro_batch_size=4, activation_checkpointing="selective"), 288),
    (LLAMA_1B, Configuration(micro_batch_size=4, activation_checkpointing="full"), 312),
    (LLAMA_1B, Configuration(micro_batch_size=4, activation_offload=True), 744),
]


@pytest.mark.parametrize(("work", "configuration", "milliseconds"), MEASURED)
def test_measured_steps_lie_within_8_percent(work: Work, configuration: Configuration, milliseconds: float) -> None:
    found = step_time(work, replace(configuration, kernels="all"), shipped("h200"))
    assert found.estimate * 1e3 == pytest.approx(milliseconds, rel=0.08)
    assert found.bound * 1e3 < milliseconds * 1.08  # activations are rounded up, and the bus was used to its full rate
    assert found.interval[0] * 1e3 < milliseconds < found.interval[1] * 1e3


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_hardware_file_is_complete_and_says_where_its_peak_is_from(path: Path) -> None:
    hardware = shipped(path.stem)
    lines = path.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("bf16_tflops"))
    assert lines[at - 1].startswith("# ")
    assert hardware.rent is not None
    assert hardware.fp8_tflops is None or hardware.fp8_tflops == pytest.approx(2 * hardware.bf16_tflops, rel=0.02)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"memory_gib": 0}, r"hardware\.memory_gib=0: give a number above 0"),
     ({"matmul_efficiency": 1.2}, r"hardware\.matmul_efficiency=1\.2: a share of the peak")],
)  # fmt: skip
def test_impossible_hardware_is_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(GPU, **change)  # type: ignore[arg-type]


def test_fp8_needs_fp8() -> None:
    with pytest.raises(ValueError, match=r"precision=fp8: test has no FP8"):
        step_time(LLAMA_1B, Configuration(precision="fp8"), replace(GPU, fp8_tflops=None))


SHARDED = Configuration(shard=8, micro_batch_size=2, micro_batches=4)


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        (replace(SHARDED, activation_checkpointing="full"), replace(SHARDED, activation_checkpointing="selective")),
        (replace(SHARDED, activation_checkpointing="selective"), SHARDED),
        (replace(SHARDED, cpu_offload=True), SHARDED),
        (replace(SHARDED, kernels="none"), replace(SHARDED, kernels="all")),
        (SHARDED, replace(SHARDED, precision="fp8", kernels="none")),
    ],
)
def test_what_costs_time(slower: Configuration, faster: Configuration) -> None:
    assert step_time(LLAMA_1B, slower, GPU).estimate > step_time(LLAMA_1B, faster, GPU).estimate


def test_slow_links_make_gathers_and_reductions_show() -> None:
    slow = replace(GPU, link_gbps=5)
    layouts = [
        Configuration(
            shard=8, micro_batch_size=1, micro_batches=8, reshard_after_forward=r, accumulate_without_reduce=a
        )
        for r, a in [(True, False), (False, False), (False, True)]
    ]
    times = [step_time(LLAMA_1B, layout, slow).estimate for layout in layouts]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == 3
    assert step_time(LLAMA_1B, layouts[0], GPU).parts["links"] == 0


def test_over_machines_the_network_counts() -> None:
    one, two = (step_time(LLAMA_1B, Configuration(shard=n), GPU).parts["links"] for n in (8, 16))
    assert two > one


def test_recomputation_is_not_counted_in_mfu() -> None:
    plain, again = (
        step_time(LLAMA_1B, Configuration(activation_checkpointing=mode, micro_batch_size=4), GPU)
        for mode in ("none", "full")
    )
    assert again.mfu < plain.mfu


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_each_number_of_a_device_has_a_comment_that_says_where_it_is_from(path: Path) -> None:
    numbers = [
        pair for pair in pairwise(path.read_text().splitlines()) if not pair[1].startswith(("#", "_target_", "name"))
    ]
    assert len(numbers) == 11
    assert not [line for above, line in numbers if not above.startswith("#")]
