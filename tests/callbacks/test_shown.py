"""Progress, sample, summary and checkpoints: what a user sees and keeps."""

import io
import time
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from callback_runs import Letters, RandomTokens, tiny_module, trainer

from lightning_fms.callbacks import GradNorm, Memory, Progress, Sample, StepCheckpoint, Summary, Throughput
from lightning_fms.callbacks.progress import columns_for, short_count, short_time
from lightning_fms.models import generate


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(tmp_path: Any, stream: io.StringIO, *others: L.Callback, **changes: Any) -> list[str]:
    fit = trainer(tmp_path, *others, Progress(every_n_steps=2, stream=stream), **changes)
    fit.fit(tiny_module(), datamodule=RandomTokens())
    return stream.getvalue().splitlines()


def test_a_log_file_gets_one_line_every_n_steps_with_the_columns_named_above(tmp_path) -> None:
    head, *rows = shown(tmp_path, io.StringIO(), GradNorm(), Throughput(), Memory())
    assert head.split() == ["step", "loss", "lr", "grad", "norm", "tokens/s", "memory", "data", "wait", "left"]
    assert [row.split()[0] for row in rows] == ["1", "2", "4", "6"]
    assert len({len(row) for row in (head, *rows)}) == 1
    assert float(rows[0].split()[1]) == pytest.approx(3.4, abs=0.3)
    assert rows[1].split()[2] == "1.00e-02"


def test_columns_without_a_figure_stay_empty(tmp_path) -> None:
    _, first, row, *_ = shown(tmp_path, io.StringIO())
    assert len(row.split()) == 5  # step, loss, lr, data wait, left
    assert len(first.split()) == 4  # nothing to tell the time left from


def test_figures_of_another_step_are_not_shown_beside_this_one(tmp_path, monkeypatch) -> None:
    changes = {"log_every_n_steps": 4, "max_steps": 8}
    _, *rows = shown(tmp_path, io.StringIO(), GradNorm(), Memory(), **changes)
    # Step, loss of this micro-batch, lr, grad norm, memory, GiB, data wait, left.
    assert {row.split()[0]: len(row.split()) for row in rows} == {"1": 4, "2": 5, "4": 8, "6": 5, "8": 8}
    monkeypatch.setattr("lightning_fms.callbacks.progress.REFRESH_SECONDS", 0.0)
    stream = Terminal()
    shown(tmp_path, stream, GradNorm(), Memory(), **changes)
    live = {text.split()[0]: text.rstrip() for text in stream.getvalue().split("\r") if text.strip()}
    assert live["5"].endswith("(logged at step 4)")
    assert "logged at" not in live["3"]


def test_the_loss_is_not_that_divided_for_accumulation(tmp_path) -> None:
    _, row, *_ = shown(tmp_path, io.StringIO(), accumulate_grad_batches=4)
    assert float(row.split()[1]) == pytest.approx(3.4, abs=0.3)


def test_a_terminal_gets_a_live_line_that_leaves_nothing_behind(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("lightning_fms.callbacks.progress.REFRESH_SECONDS", 0.0)
    stream = Terminal()
    shown(tmp_path, stream, max_steps=5)
    assert "\r        3" in stream.getvalue()
    assert stream.getvalue().endswith("\r") or stream.getvalue().endswith("\n")


def test_a_loss_is_read_only_for_a_line_that_is_shown(tmp_path, monkeypatch) -> None:
    reads = []
    monkeypatch.setattr("lightning_fms.callbacks.progress.metrics_of", lambda *_, **__: reads.append(1) or {})
    shown(tmp_path, io.StringIO(), max_steps=20)
    assert len(reads) == 11  # the first step, and every second one


class Slow(RandomTokens):
    """Data that takes a while."""

    def train_dataloader(self) -> Any:
        for batch in super().train_dataloader():
            time.sleep(0.05)
            yield batch


class Pause(L.Callback):
    """So does a validation."""

    def on_validation_start(self, *_: object) -> None:
        time.sleep(0.5)


def test_the_wait_for_data_is_shown_without_that_for_a_validation(tmp_path) -> None:
    stream, options = io.StringIO(), {"max_steps": 4, "val_check_interval": 2, "limit_val_batches": 1}
    trainer(tmp_path, Pause(), Progress(2, stream), **options).fit(tiny_module(), datamodule=Slow())
    rows = [line.split() for line in stream.getvalue().splitlines() if "%" in line]
    waited = {row[0]: float(cell[:-1]) for row in rows for cell in row if cell.endswith("%")}
    assert waited["2"] > 50  # 0.05 s, and a step of milliseconds
    assert waited["4"] < 30  # beside half a second


@pytest.mark.parametrize(
    ("device", "name", "columns"),
    [("cpu", "", set()), ("cuda", "NVIDIA H100 80GB HBM3", {"TFLOP/s", "MFU"}), ("cuda", "Brand new", {"TFLOP/s"})],
)
def test_mfu_is_shown_where_the_peak_is_known_and_tflops_on_gpus(device, name, columns, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: name)
    assert {title for title, *_ in columns_for(torch.device(device))} & {"TFLOP/s", "MFU"} == columns


def test_validation_gets_a_line_of_its_own(tmp_path) -> None:
    lines = shown(tmp_path, io.StringIO(), val_check_interval=4, limit_val_batches=2)
    assert any(line.strip().startswith("4  val_loss 3.") for line in lines)


def test_figures_are_short() -> None:
    assert [short_count(n) for n in (7.25, 999, 12_345, 1_234_567)] == ["7.25", "999", "12.3k", "1.23M"]
    assert [short_time(s) for s in (0, 61, 4000)] == ["0:00", "1:01", "1:06:40"]


def test_a_sample_is_generated_printed_and_kept(tmp_path, capsys) -> None:
    sample = Sample(partial(generate, context=8, max_new_tokens=5), prompt="abc")
    module = tiny_module()
    trainer(tmp_path, sample).fit(module, datamodule=RandomTokens())
    assert module.training
    assert f"abc{sample.text}" in capsys.readouterr().out
    expected = generate(module, RandomTokens().tokenizer.encode("abc"), 5, context=8, eos_id=0)
    assert sample.text == RandomTokens().tokenizer.decode(expected)


@pytest.mark.filterwarnings("ignore:.*but have no `val_dataloader`")
def test_a_sample_without_a_tokenizer_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="no tokenizer"):
        trainer(tmp_path, Sample(generate)).fit(tiny_module(), RandomTokens().train_dataloader())
    with pytest.raises(ValueError, match="prompt"):
        Sample(generate, prompt="")


class Unknown(Letters):
    """Knows no letter."""

    def encode(self, text: str) -> list[int]:
        return []


@pytest.mark.parametrize(
    ("context", "temperature", "tokenizer", "message"),
    [
        (1, 0.0, Letters(), "context=1"),
        (8, -1.0, Letters(), "temperature"),
        (8, 0.0, Unknown(), "has no tokens"),
        (8, 0.0, None, "no tokenizer"),
    ],
)
def test_a_sample_that_cannot_be_made_is_refused_before_training(
    context, temperature, tokenizer, message, tmp_path
) -> None:
    data = RandomTokens()
    data.tokenizer = tokenizer
    sample = Sample(partial(generate, context=context, max_new_tokens=5, temperature=temperature), prompt="abc")
    fit = trainer(tmp_path, sample)
    with pytest.raises(ValueError, match=message):
        fit.fit(tiny_module(), datamodule=data)
    assert fit.global_step == 0


def test_the_summary_collects_the_report_of_every_part_once(tmp_path, capsys) -> None:
    class Kernels(L.Callback):
        report = ["swapped: nothing"]

    trainer(tmp_path, Kernels(), Kernels.__new__(type("Other", (Kernels,), {})), Summary()).fit(
        tiny_module(), datamodule=RandomTokens()
    )
    out = capsys.readouterr().out
    assert "CausalLM, 0.0" in out
    assert "data: random tokens" in out
    assert out.count("swapped: nothing") == 1


def test_checkpoints_are_named_by_step_the_last_step_among_them_and_the_oldest_gone(tmp_path) -> None:
    checkpoint = StepCheckpoint(str(tmp_path / "checkpoints"), every_n_steps=2, keep=2)
    fit = trainer(tmp_path, checkpoint, enable_checkpointing=True, max_steps=7)
    fit.fit(tiny_module(), datamodule=RandomTokens())
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-6.ckpt", "step-7.ckpt"]


def test_a_run_resumed_at_its_end_saves_nothing_twice(tmp_path) -> None:
    def fit(ckpt_path: Any) -> None:
        checkpoint = StepCheckpoint(str(tmp_path / "checkpoints"), every_n_steps=4)
        trainer(tmp_path, checkpoint, enable_checkpointing=True, max_steps=4).fit(
            tiny_module(), datamodule=RandomTokens(), ckpt_path=ckpt_path
        )

    fit(None)
    fit(tmp_path / "checkpoints" / "step-4.ckpt")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-4.ckpt"]


@pytest.mark.parametrize("arguments", [{"every_n_steps": 0}, {"keep": 0}, {"keep": -2}])
def test_checkpoint_settings_that_save_nothing_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        StepCheckpoint(**arguments)
