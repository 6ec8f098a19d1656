"""D11: where rows are not full, targets are added up by one asynchronous all-reduce a step ahead, and never otherwise."""

import os
import signal
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy

from lightning_fms.data import RescalableDataModule
from lightning_fms.data.target_count import TargetCount
from tests.data.chains import write_jsonl
from tests.data.fits import Bigram, Ledger, fit, merged
from tests.data.test_trainer import check, pytestmark  # noqa: F401
from tests.worlds import run_world

STEPS = 5


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict:
    root = tmp_path_factory.mktemp("corpus")
    return {
        "sources": {"p": write_jsonl(root / "p", "p", 60)},
        "seq_len": 24,
        "global_batch_size": 6,
        "val_sources": {"p": root / "p"},
        "val_steps": 1,
        "val_every_n_steps": 2,
    }


class Reductions(Callback):
    """Writes down, by the trainer's step, the all-reduces that Python starts: `"ahead"` for asynchronous ones."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.all_reduce = dist.all_reduce

        def all_reduce(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
            self.seen.append((trainer.global_step, "ahead" if kwargs.get("async_op") else "now"))
            return self.all_reduce(tensor, *args, **kwargs)

        dist.all_reduce = all_reduce

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        dist.all_reduce = self.all_reduce


def counted(data: dict, strategy: str) -> tuple[Ledger, list]:
    reductions = Reductions()
    record = fit(data, strategy, STEPS, callbacks=(reductions,))
    return record, [step for step, kind in reductions.seen if kind == "ahead"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "options", [{"mask_first": True}, {"packing": "best_fit"}, {"mask_first": True, "micro_batch_size": 1}], ids=str
)
def test_one_reduction_a_step_and_a_step_ahead(data: dict, strategy: str, options: dict) -> None:
    results = run_world(counted, 2, {**data, **options}, strategy)
    for _, steps in results:
        assert steps == [0, *range(STEPS)]  # that of step 0, and in each step that of the next
    reference = fit({**data, **options, "micro_batch_size": None}, "one device", STEPS)
    check([record for record, _ in results], reference, 0, STEPS)


def test_no_reduction_where_all_rows_are_full(data: dict) -> None:
    for _, steps in run_world(counted, 2, data, "ddp"):
        assert steps == []


# -- it never stands in the way ----------------------------------------------------------------------------------------


class SkipsBackward(Bigram):
    """Manual optimization without a backward pass in some batches, and with two in others."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range((2, 0, 0, 1, 1)[batch_idx % 5]):
            self.manual_backward(self.loss(batch))
        optimizer.step()
        optimizer.zero_grad()


def skipping(data: dict) -> list[int]:
    reductions = Reductions()
    trainer = pl.Trainer(
        max_steps=7, accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="gloo"), logger=False,
        callbacks=[reductions], enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(SkipsBackward(), RescalableDataModule(**{**data, "mask_first": True, "val_sources": None}))
    dist.destroy_process_group()
    return [step for step, kind in reductions.seen if kind == "ahead"]


def test_steps_without_a_backward_pass_or_with_two_make_one_reduction_too(data: dict) -> None:
    first, second = run_world(skipping, 2, {**data, "val_every_n_steps": None})
    assert first == second
    assert len(first) == 7 + 1


def broken_data(data: dict, folder: str) -> tuple[dict, str]:
    """Let rank 1's third step meet a broken line: the two steps before it are trained."""
    if os.environ["RANK"] == "1":
        data = {**data, "sources": {"p": Path(folder) / "broken"}}
    ledger = Ledger()
    try:
        fit({**data, "mask_first": True, "num_streams": 6}, "ddp", 50, ledger=ledger)
    except Exception as error:
        return merged([ledger.record]), f"{type(error).__name__}: {error}"
    return merged([ledger.record]), "no error"


def test_an_error_in_the_data_ahead_comes_when_its_step_does(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "whole", "p", 60)
    write_jsonl(tmp_path / "broken", "p", 60)
    for path in (tmp_path / "broken").iterdir():
        lines = path.read_text().splitlines()
        path.write_text("\n".join(line if i < 12 else "x" + line[1:] for i, line in enumerate(lines)) + "\n")
    data = {"sources": {"p": tmp_path / "whole"}, "seq_len": 24, "global_batch_size": 6, "shuffle_window": 1}
    start = time.monotonic()
    (steps, lost), (fewer, error) = run_world(broken_data, 2, data, str(tmp_path))
    assert "is not valid JSON" in error
    assert "RuntimeError" in lost  # rank 0 hears that its peer is gone
    assert set(fewer) <= set(steps)
    assert time.monotonic() - start < 60


def ahead_of_its_peer(data: dict) -> str:
    """Rank 1 stays away; rank 0 waits for it and is interrupted."""
    dist.init_process_group("gloo")
    counts = TargetCount()
    if os.environ["RANK"] == "1":
        time.sleep(4)
        return "away"
    counts.start(0, 5)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(1)
    try:
        counts.wait(0)
    except KeyboardInterrupt:
        return "interrupted"
    return "done"


def test_waiting_can_be_interrupted(data: dict) -> None:
    assert run_world(ahead_of_its_peer, 2, data) == ["interrupted", "away"]


def fits_in_a_row(data: dict) -> int:
    threads = []
    for _ in range(3):
        dist.is_initialized() or dist.init_process_group("gloo")
        counts = TargetCount()
        counts.start(0, 1)
        assert counts.wait(0) == 2
        counts.start(1, 4)
        counts.start(1, 4)
        counts.start(7, 10)
        assert counts.wait(7) == 20
        counts.start(8, 1)
        counts.close()
        threads.append(len(dist.distributed_c10d._world.pg_map))
    assert len(set(threads)) == 1
    return threads[0]


def test_groups_do_not_pile_up(data: dict) -> None:
    assert run_world(fits_in_a_row, 2, data) == [1, 1]
