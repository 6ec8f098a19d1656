"""What a run says of its data: shares, epochs and how far apart the streams are, documents lost to another tokenizer."""

import logging
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback

from lightning_fms.callbacks import DataMix
from lightning_fms.data import RescalableDataModule, StreamLoader
from lightning_fms.data.tokenizer import ByteTokenizer
from tests.data.chains import write_jsonl
from tests.data.fits import Bigram, dist_size, fit
from tests.data.test_trainer import pytestmark  # noqa: F401
from tests.worlds import run_world


class OtherBytes(ByteTokenizer):
    fingerprint = "other bytes"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict:
    root = tmp_path_factory.mktemp("corpus")
    sources = {"large": write_jsonl(root / "large", "l", 60), "small": write_jsonl(root / "small", "s", 7, files=1)}
    return {"sources": sources, "mixture": {"large": 1, "small": 1}, "seq_len": 24, "global_batch_size": 6}


def test_the_slowest_and_the_fastest_stream_of_a_source(data: dict) -> None:
    loader = StreamLoader(**data)
    for _, _ in zip(range(12), loader, strict=False):
        pass
    state = loader.state_dict()
    for place, name in enumerate(state["header"]["sources"]):
        epochs = state["rows"][:, place * 5].tolist()
        entry = loader.mix_report()[name]
        assert (entry["epoch_min"], entry["epoch_max"]) == (min(epochs), max(epochs))
        assert entry["epoch"] == pytest.approx(sum(epochs) / len(epochs))
    assert entry["epoch_max"] > entry["epoch_min"]  # the small source has segments with few documents and with none


class Reports(Callback):
    def __init__(self) -> None:
        self.mixes: list[dict] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        self.mixes.append(trainer.datamodule.mix_report())


def reports(data: dict, strategy: str) -> list[dict]:
    reports = Reports()
    fit(data, strategy, 8, callbacks=(reports,))
    return reports.mixes


def test_the_epochs_of_all_ranks_are_those_of_one(data: dict) -> None:
    alone = reports(data, "one device")
    for mixes in run_world(reports, 3, data, "ddp"):
        for ours, theirs in zip(mixes, alone, strict=True):
            assert {name: pytest.approx(entry) for name, entry in ours.items()} == theirs


def counters(data: dict, strategy: str) -> dict[str, int]:
    module = RescalableDataModule(**data, packing="best_fit", max_document_tokens=40)
    trainer = pl.Trainer(
        max_steps=8, accelerator="cpu", devices=dist_size(), strategy="ddp" if strategy == "ddp" else "auto", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[Reports()],
    )  # fmt: skip
    trainer.fit(Bigram(), module)
    return module.counters()


def test_the_counters_of_all_ranks_are_those_of_one(data: dict) -> None:
    alone = counters(data, "one device")
    assert alone["skipped"] == 0
    assert min(alone["padding"], alone["split"], alone["cut"]) > 0
    assert run_world(counters, 2, data, "ddp") == [alone, alone]


def test_data_mix_logs_how_far_apart_the_streams_are(data: dict) -> None:
    trainer = pl.Trainer(
        max_steps=10, accelerator="cpu", callbacks=[DataMix()], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=2,
    )  # fmt: skip
    module = RescalableDataModule(**data)
    trainer.fit(Bigram(), module)
    logged = trainer.callback_metrics
    for name, entry in module.mix_report().items():
        for key in ("share", "target", "tokens", "epoch", "epoch_min", "epoch_max"):
            assert float(logged[f"data/{name}/{key}"]) == pytest.approx(entry[key], rel=1e-6)
    for key, count in module.counters().items():
        assert float(logged[f"data/{key}"]) == count
    (line,) = (line for line in module.report if "source small" in line)
    assert f"(streams from {entry['epoch_min']:.0f} to {entry['epoch_max']:.0f})" in line


def test_documents_lost_to_another_tokenizer_are_reported_and_logged_once(
    data: dict, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(data, "one device", 4, save=tmp_path / "a.ckpt")
    told = "document(s) that were begun lost their rest at the resume: tokenizer, packing or sources changed"
    seen = []

    class Look(Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            seen.extend(trainer.datamodule.report)

    for tokenizer, count in ((OtherBytes(), 1), ("bytes", 0)):
        seen.clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING):  # what fms-train leaves of it, too
            fit({**data, "tokenizer": tokenizer}, "one device", 6, tmp_path / "a.ckpt", callbacks=(Look(),))
        assert sum(told in line for line in seen) == count
        assert sum(told in record.getMessage() for record in caplog.records) == count
