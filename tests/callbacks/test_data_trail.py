"""The data's position is kept every so many steps, and an audit finds a step's documents from it."""

from pathlib import Path

import lightning as L
import pytest
import torch

from lightning_fms.callbacks import DataTrail
from lightning_fms.data import StreamLoader
from lightning_fms.data.audit import readings
from tests.callbacks.callback_runs import RandomTokens, tiny_module
from tests.data.chains import write_jsonl
from tests.data.fits import fit
from tests.worlds import run_world


def _fit(data: dict, folder: Path) -> None:
    fit(data, "ddp", 7, callbacks=(DataTrail(str(folder), every_n_steps=3),))


def test_d12_the_trail_answers_which_documents_a_step_has_seen(tmp_path: Path) -> None:
    data = {"sources": {"p": write_jsonl(tmp_path / "p", "p", 60)}, "seq_len": 16, "global_batch_size": 5}
    run_world(_fit, 2, data, tmp_path / "trail")
    assert sorted(file.name for file in (tmp_path / "trail").iterdir()) == ["step-0.pt", "step-3.pt", "step-6.pt"]
    uninterrupted = StreamLoader(**data)
    expected = list(readings(uninterrupted, 4 * 5, 5 * 5))
    kept = StreamLoader(**data, state=torch.load(tmp_path / "trail" / "step-3.pt", weights_only=True))
    assert list(readings(kept, 4 * 5, 5 * 5)) == expected
    assert {reading.row for reading in expected} == set(range(20, 25))


@pytest.mark.filterwarnings("ignore:.*but have no `val_dataloader`")
def test_a_data_module_without_a_position_is_refused(tmp_path: Path) -> None:
    trail = DataTrail(str(tmp_path))
    trainer = L.Trainer(
        max_steps=1, accelerator="cpu", callbacks=[trail], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = tiny_module()
    with pytest.raises(ValueError, match="DataTrail with the data module NoneType"):
        trainer.fit(module, RandomTokens().train_dataloader())
    with pytest.raises(ValueError, match="every_n_steps=0"):
        DataTrail(str(tmp_path), 0)
