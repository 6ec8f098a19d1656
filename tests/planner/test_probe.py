"""Probes of the suite's own steps: exact where memory can be counted by hand."""

from typing import Any

import pytest

from lightning_fms.planner.memory import at_size
from lightning_fms.planner.space import Configuration
from lightning_fms.planning.jobs import probe, scratch_bytes, structure_of, variant_of

DIM, LAYERS, VOCAB, FFN, TOKENS = 64, 6, 512, 192, 32
# Untied: embedding and head, the last norm; per block attention, feed-forward, two norms.
BLOCK = 4 * DIM * DIM + 3 * DIM * FFN + 2 * DIM
PARAMETERS = 2 * VOCAB * DIM + DIM + LAYERS * BLOCK


def job(**model: Any) -> dict[str, Any]:
    net = {
        "_target_": "lightning_fms.models.Llama", "vocab_size": VOCAB, "dim": DIM, "n_layers": LAYERS, "n_heads": 4,
        "ffn_dim": FFN, **model,
    }  # fmt: skip
    adamw = {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 1e-3, "fused": True}
    config = {
        "model": {"_target_": "lightning_fms.models.CausalLM", "net": net, "optimizer": adamw},
        "strategy": {"checkpoint_every": 2}, "data": {"seq_len": TOKENS},
    }  # fmt: skip
    fused = {"_target_": "lightning_fms.precision.FP8Precision", "recipe": "fused", "keep_small": False}
    precisions = {"bf16": {"name": "bf16-mixed"}, "fused": fused}
    return {"config": config, "precision": precisions, "kernels": {"none": {}}, "rows": [2, 3]}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    kinds = {
        "one": Configuration(micro_batch_size=2),
        "shard": Configuration(shard=4, micro_batch_size=2),
        "full": Configuration(shard=4, activation_checkpointing="full", micro_batch_size=2),
        "fused": Configuration(precision="fused", micro_batch_size=2),
    }
    probed = probe(job(), list(kinds.values()), 1)
    for known in probed.values():
        assert known.error is None
    return {name: (c, probed[structure_of(c)]) for name, c in kinds.items()}


def peaks(found: dict[str, Any], name: str) -> dict[str, tuple[int, int]]:
    configuration, known = found[name]
    return at_size(known.grids[variant_of(configuration)], 2, LAYERS)


def test_the_optimizer_step_holds_what_adamw_needs_and_nothing_else(found: dict[str, Any]) -> None:
    # Masters and two moments in fp32, gradients and copies in bf16; sharded without copies, and gradients are fp32.
    assert peaks(found, "one")["optimizer"][0] == pytest.approx(PARAMETERS * (12 + 2 + 2), rel=0.02)
    assert peaks(found, "shard")["optimizer"][0] == pytest.approx(PARAMETERS * 16 / 4, rel=0.05)


def test_fp8_weights_in_both_layouts_lie_beside_masters_and_copies(found: dict[str, Any]) -> None:
    in_fp8 = LAYERS * (BLOCK - 2 * DIM)
    extra = peaks(found, "fused")["optimizer"][0] - peaks(found, "one")["optimizer"][0]
    assert extra == pytest.approx(2 * in_fp8, rel=0.2)  # less what a step of bf16 holds longer


def test_offload_could_move_all_of_it(found: dict[str, Any]) -> None:
    peak, movable = peaks(found, "shard")["optimizer"]
    assert movable == peak


def test_recomputation_keeps_less(found: dict[str, Any]) -> None:
    assert peaks(found, "full")["forward -1"][0] < peaks(found, "shard")["forward -1"][0]


def test_what_a_block_leaves_for_the_next_to_reduce_does_not_grow_with_depth(found: dict[str, Any]) -> None:
    configuration, known = found["full"]
    deep = {name: peak for name, (peak, _) in at_size(known.grids[variant_of(configuration)], 2, 40).items()}
    middle, ends = (max(deep[f"backward {block}"] for block in blocks) for blocks in ((1, -2), (0, -1)))
    assert middle <= 1.05 * ends


def test_a_model_that_cannot_be_built_is_a_result_with_its_reason() -> None:
    configuration = Configuration()
    known = probe(job(dim=65), [configuration], 1)[structure_of(configuration)]
    assert known.error is not None
    assert "dim must be a multiple of 2 * n_heads" in known.error


def test_scratch_is_a_chunk_of_logits_and_a_wide_gradient_where_chunks_are_many() -> None:
    assert scratch_bytes(128, 1000, 64) == 128 * 1000 * 2
    few, larger, many = (scratch_bytes(tokens, 128_256, 4096) for tokens in (8192, 16_384, 65_536))
    assert few <= 512 * 2**20
    assert larger == pytest.approx(2 * few, rel=0.05)  # less than the wide gradient would take
    assert many == pytest.approx(few + 4 * 128_256 * 4096, rel=0.05)
