"""Ranks that share the parts of a matrix (tensor parallelism) are one data rank: they read the same rows, counted once."""

import hashlib
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lightning_fms.data import RescalableDataModule
from lightning_fms.distributed import FSDPCompileStrategy
from tests.data.chains import two_sources
from tests.data.fits import Bigram, Ledger, Record, fit, merged
from tests.data.test_trainer import check
from tests.data.test_trainer import pytestmark as warnings_of_lightning
from tests.worlds import run_world

STEPS = 4
pytestmark = [*warnings_of_lightning, pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")]


class SplitHead(Bigram):
    """The head's outputs are split over the tensor ranks, and every parameter over the data ranks."""

    def configure_model(self) -> None:
        mesh = self.device_mesh
        parallelize_module(self.head, mesh["tensor_parallel"], ColwiseParallel(output_layouts=Replicate()))
        for part in (self.embed, self.head):
            fully_shard(part, mesh=mesh["data_parallel"])


def fit_split(
    data: dict[str, Any], kind: str, data_ranks: int, steps: int, save: Path | None = None, resume: Path | None = None
):
    """Train with two tensor ranks, under Lightning's own strategy or ours; return the rank's record and what it has read."""
    stock = kind == "stock"
    strategy = (
        ModelParallelStrategy(data_parallel_size=data_ranks, tensor_parallel_size=2, process_group_backend="gloo")
        if stock
        else FSDPCompileStrategy(tensor=2, tensor_plan={"head": "colwise_gather_output", "embed": "embedding_rowwise"})
    )
    ledger, module = Ledger(), RescalableDataModule(**data)
    trainer = pl.Trainer(
        max_steps=steps, accelerator="cpu", devices=2 * data_ranks, strategy=strategy, callbacks=[ledger],
        num_sanity_val_steps=0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(SplitHead() if stock else Bigram(), module, ckpt_path=resume)
    mix, counters, state = module.mix_report(), module.counters(), module.state_dict()
    if save is not None:
        trainer.save_checkpoint(save)
    dist.destroy_process_group()
    digest = hashlib.blake2b(state["rows"].numpy().tobytes()).hexdigest()
    return ledger.record, mix, counters, digest


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("corpus")
    return {
        "sources": two_sources(root),
        "seq_len": 24,
        "global_batch_size": 6,
        "micro_batch_size": 2,
        "val_sources": {"c": root / "c"},
        "val_one_pass": True,
        "val_every_n_steps": 2,
        "mask_first": True,
    }


@pytest.fixture(scope="module")
def reference(data: dict[str, Any]) -> Record:
    return fit({**data, "micro_batch_size": None}, "one device", STEPS)


@pytest.mark.parametrize(("kind", "data_ranks"), [("stock", 1), ("stock", 2), ("ours", 2)])
def test_tensor_ranks_read_the_same_rows_and_count_once(
    data: dict[str, Any], reference: Record, kind: str, data_ranks: int
) -> None:
    results = run_world(fit_split, 2 * data_ranks, data, kind, data_ranks, STEPS)
    records = [record for record, *_ in results]
    for first, second in zip(records[::2], records[1::2], strict=True):
        assert first.rows == second.rows
    check(records[::2], reference, last=STEPS)
    check(records[1::2], reference, last=STEPS)
    alone = RescalableDataModule(**data)
    alone.setup("fit")
    batches = iter(alone.train_dataloader())
    for _ in range(STEPS * alone.loader.slots.accumulate):
        next(batches)
    for _, mix, counters, digest in results:
        assert mix.keys() == alone.mix_report().keys()
        for name, entry in alone.mix_report().items():
            assert mix[name] == pytest.approx(entry)
        assert counters == alone.counters()
        assert digest == hashlib.blake2b(alone.state_dict()["rows"].numpy().tobytes()).hexdigest()


def test_a_run_goes_on_with_another_number_of_data_ranks_beside_tensor_ranks(
    data: dict[str, Any], reference: Record, tmp_path: Path
) -> None:
    run_world(fit_split, 2, data, "ours", 1, 2, tmp_path / "two")
    records = [record for record, *_ in run_world(fit_split, 4, data, "ours", 2, STEPS, None, tmp_path / "two")]
    assert merged(records[::2]) == {step: sorted(reference.rows[step]) for step in range(2, STEPS)}
    for record in records:
        assert record.losses == pytest.approx({step: reference.losses[step] for step in range(2, STEPS)})
