"""The space of configurations: what it holds, what it leaves out, and that it covers the published one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fms.planner.space import (
    Configuration,
    enumerate_space,
    micro_batch_sizes,
    ours,
    published_space,
    rows_per_device,
)


@pytest.mark.parametrize(("devices", "count"), [(1, 12), (2, 22), (8, 22)])
def test_the_published_space_has_22_combinations_and_12_on_one_device(devices: int, count: int) -> None:
    assert len(published_space(devices)) == len(set(published_space(devices))) == count


@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("accumulates", [False, True])
def test_the_published_space_is_covered(devices: int, accumulates: bool) -> None:
    batch = devices * (4 if accumulates else 1)
    space = set(enumerate_space(devices, batch))
    for choice in published_space(devices):
        assert ours(choice, devices, batch // devices) in space, choice


@pytest.mark.parametrize(("devices", "images"), [(1, 4), (8, 14)])
def test_combinations_that_are_one_thing_here_are_counted_once(devices: int, images: int) -> None:
    # On 8: checkpointing x (copies, or {ZeRO-1, ZeRO-2, ZeRO-3} x offload) = 2 x 7; DeepSpeed's ZeRO-2 and 3 are FSDP's two.
    mapped = {ours(c, devices, micro_batches=2) for c in published_space(devices)}
    assert len(mapped) == images


def test_counts() -> None:
    # One micro-batch: no way to accumulate. Checkpointing 3 x kernels 2 x (copies + keep or not x offload or not).
    assert len(enumerate_space(8, 8)) == 3 * 2 * (1 + 2 * 2)
    # Two sizes, 2 rows at once and 1 row twice; the second has two ways to accumulate, copies too.
    assert len(enumerate_space(8, 16)) == 3 * 2 * (1 + 4) + 3 * 2 * (1 + 8)
    assert len(enumerate_space(1, 2)) == 2 * 3 * 2 * 2
    assert len(enumerate_space(1, 1, precisions=("bf16", "fp8"))) == 2 * len(enumerate_space(1, 1))


def test_nodes_add_a_copy_in_each() -> None:
    layouts = {(c.replicate, c.shard) for c in enumerate_space(16, 16, nodes=2)}
    assert layouts == {(16, 1), (1, 16), (2, 8)}


@given(st.integers(1, 300), st.integers(1, 64))
def test_tokens_a_step_are_constant_and_no_micro_batch_is_only_padding(batch: int, devices: int) -> None:
    if batch < devices:
        with pytest.raises(ValueError, match=f"data.global_batch_size={batch}: fewer rows than {devices} devices"):
            rows_per_device(batch, devices)
        return
    rows = rows_per_device(batch, devices)
    for size in micro_batch_sizes(rows):
        count = -(-rows // size)
        assert size * count >= rows > size * (count - 1)
        assert -(-rows // count) == size


@given(st.integers(1, 200), st.integers(1, 200))
def test_a_power_of_two_is_never_better_than_what_is_listed(rows: int, size: int) -> None:
    count = -(-rows // size)
    assert any(listed <= size and -(-rows // listed) == count for listed in micro_batch_sizes(rows))


def test_micro_batches_need_not_be_powers_of_two() -> None:
    assert micro_batch_sizes(12) == [12, 6, 4, 3, 2, 1]


def test_overrides_say_everything_that_a_configuration_chooses() -> None:
    overrides = Configuration(2, 4, "full", False, False, True, "fp8", "all", 3, 5).overrides()
    assert overrides == [
        "strategy.replicate=2", "strategy.shard=4", "strategy.activation_checkpointing=full",
        "strategy.reshard_after_forward=false", "strategy.accumulate_without_reduce=false", "strategy.cpu_offload=true",
        "strategy.activation_offload=false", "precision=fp8", "kernels=all", "data.micro_batch_size=3",
    ]  # fmt: skip
