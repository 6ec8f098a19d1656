"""Validation in one pass, on any number of ranks; and validation rows that do not depend on the batch size.

Legend: W data ranks.
"""

import itertools
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lightning_fms.data import RescalableDataModule
from tests.data.chains import write_jsonl
from tests.data.fits import Bigram, fit
from tests.data.test_trainer import pytestmark  # noqa: F401
from tests.worlds import run_world

SEQ_LEN = 16


class Identity:
    """Token files hold ids that are all different, so that each one names its place."""

    vocab_size, eos_id, bos_id, fingerprint = 10_000, None, None, "identity"

    def encode(self, text: str) -> np.ndarray:
        raise NotImplementedError

    def decode(self, ids: object) -> str:
        raise NotImplementedError


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ids 2, 3, 4, ... in documents that end with 1; two files."""
    folder, number = tmp_path_factory.mktemp("tokens"), itertools.count(2)
    for name, documents in (("a", 60), ("b", 23)):
        ids = [i for d in range(documents) for i in [*(next(number) for _ in range(d * 37 % 41)), 1]]
        (folder / f"{name}.bin").write_bytes(np.array(ids, np.uint16).tobytes())
    return folder


def module(tokens: Path, rank: int = 0, world: int = 1, **options: object) -> RescalableDataModule:
    sources = {name: {"path": tokens / f"{name}.bin", "eos_id": 1} for name in ("a", "b")}
    options = {"global_batch_size": 6, "val_one_pass": True, "eos": False, **options}
    return RescalableDataModule(
        sources, SEQ_LEN, tokenizer=Identity(), val_sources=sources, rank=rank, world_size=world, **options
    )


def all_tokens(tokens: Path) -> list[int]:
    return sorted(np.concatenate([np.fromfile(path, np.uint16) for path in tokens.iterdir()]).tolist())


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.parametrize("micro", [None, 1])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_token_is_validated_once_and_all_ranks_take_equal_steps(
    tokens: Path, packing: str, world: int, micro: int | None
) -> None:
    seen, targets, lengths = [], [], set()
    for rank in range(world):
        data = module(tokens, rank, world, packing=packing, micro_batch_size=micro)
        data.setup("fit")
        for _ in range(2):  # the same at every validation
            batches = list(data.val_dataloader())
            mine = torch.cat(
                [b["input_ids"].flatten() for b in batches]
            )  # a row without targets says that it counts nothing
            learned = torch.cat([b["labels"][b["row_valid"]].flatten() for b in batches])
        lengths.add((len(batches), len(data.val_dataloader())))
        seen += mine[mine > 0].tolist()
        targets += learned[learned >= 0].tolist()
    assert sorted(seen) == all_tokens(tokens)
    assert len(set(targets)) == len([t for t in targets if t != 1]) + 1
    (length,) = lengths
    assert length[0] == length[1]


def validated(data: dict, strategy: str) -> dict[int, float]:
    return fit(data, strategy, 4).val_losses


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> dict:
    root = tmp_path_factory.mktemp("corpus")
    write_jsonl(root / "train", "p", 40)
    write_jsonl(root / "val", "v", 31)
    return {
        "sources": {"p": root / "train"}, "val_sources": {"v": root / "val"}, "seq_len": 24, "global_batch_size": 6,
        "val_one_pass": True, "val_every_n_steps": 2,
    }  # fmt: skip


@pytest.fixture(scope="module")
def alone(text: dict) -> dict[int, float]:
    losses = validated(text, "one device")
    assert sorted(losses) == [2, 4]
    return losses


@pytest.mark.parametrize(("world", "strategy"), [(2, "ddp"), (3, "fsdp"), (5, "ddp")])
def test_the_loss_of_a_pass_is_that_of_one_process(text: dict, alone: dict, world: int, strategy: str) -> None:
    for losses in run_world(validated, world, {**text, "micro_batch_size": 1}, strategy):
        assert losses == pytest.approx(alone, rel=1e-6)


def test_the_loss_of_a_pass_is_the_mean_over_its_targets(text: dict) -> None:
    data = RescalableDataModule(**text)
    data.setup("validate")
    total, count, model = 0.0, 0, Bigram()
    for batch in data.val_dataloader():
        labels = torch.where(batch["row_valid"][:, None], batch["labels"], -100)
        logits = model.head(model.embed(batch["input_ids"]))
        total += F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
        count += int((labels >= 0).sum())
    assert count > 0
    assert total / count == pytest.approx(_untrained(text), rel=1e-9)


def _untrained(text: dict) -> float:
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    (result,) = trainer.validate(Bigram(), RescalableDataModule(**text), verbose=False)
    return result["val_loss"]


def _broken(data: dict) -> str:
    try:
        fit(data, "ddp", 2)
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_broken_document_is_an_error_on_all_ranks(text: dict, tmp_path: Path) -> None:
    broken = write_jsonl(tmp_path / "v", "v", 20) / "v-1.jsonl"
    broken.write_text(broken.read_text().replace('"text"', '"words"', 1))
    for message in run_world(_broken, 3, {**text, "val_sources": {"v": tmp_path / "v"}}):
        assert message.startswith(f"val_sources: source 'v': {broken}: the record at byte 0 has no key 'text'")


def test_rows_do_not_depend_on_the_batch_size_where_their_streams_are_fixed(tokens: Path) -> None:
    lines = []
    for batch, steps in ((4, 6), (6, 4), (3, 8)):
        data = module(tokens, val_one_pass=False, val_steps=steps, global_batch_size=batch, val_num_streams=12)
        data.setup("fit")
        lines.append(torch.cat([b["input_ids"] for b in data.val_dataloader()]).tolist())
    assert lines[0] == lines[1] == lines[2]


def test_what_does_nothing_is_refused(tokens: Path) -> None:
    for option in ({"val_one_pass": True}, {"val_num_streams": 3}):
        with pytest.raises(ValueError, match="do nothing without val_sources"):
            RescalableDataModule({"a": tokens}, SEQ_LEN, 4, **option)
    with pytest.raises(ValueError, match="val_sources: num_streams=1 is smaller than the number of data ranks 2"):
        module(tokens, world=2, val_num_streams=1).setup("fit")
