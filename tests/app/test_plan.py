"""`fms-plan` from the command line to a run of what it planned."""

import json
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from lightning_fms.plan import main
from lightning_fms.planning.experiment import write_experiment
from lightning_fms.planning.jobs import Progress, remaining
from tests.app.app_runs import SHORT, call

# One structure, so one probe.
NARROW = ("plan.checkpointing=[none]", "plan.offload=[false]", "plan.precisions=[fp32]", "plan.kernels=[none]")


def planned(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> int:
    """`fms-plan <overrides>` in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["fms-plan", *overrides])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_a_plan_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    asked = (*SHORT, "trainer.max_steps=2", "trainer.devices=1", "hardware=rtx3090", "plan.device_counts=[1,2]")
    assert planned(monkeypatch, *asked, *NARROW) == 0
    shown = capfd.readouterr().out
    assert "on 1 x RTX 3090 (23.7 GiB" in shown
    assert "->  FIT" in shown
    assert "fms-train --config-dir runs/plans/quickstart experiment=planned" in shown
    found = json.loads(Path("runs/plans/quickstart/plan.json").read_text())
    assert found["chosen"]["verdict"] == "FIT"
    assert found["chosen"]["configuration"]["micro_batch_size"] * found["chosen"]["configuration"]["micro_batches"] >= 4
    assert {c["configuration"]["micro_batch_size"] for c in found["candidates"]} == {4, 2, 1}
    assert found["run"]["tokens"] == 2 * 4 * 32
    assert all(Path(f"runs/plans/quickstart/{name}.png").stat().st_size > 5000 for name in ("memory", "cost"))
    assert call(monkeypatch, "--config-dir", "runs/plans/quickstart", "experiment=planned") == 0
    assert "2 steps" in capfd.readouterr().out
    cfg = OmegaConf.load("runs/quickstart/001/config.yaml")
    assert cfg.data.micro_batch_size == found["chosen"]["configuration"]["micro_batch_size"]
    assert (cfg.model.net.dim, cfg.data.seq_len, cfg.kernels) == (32, 32, {})


def test_a_plan_is_measured_in_real_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    only = ("plan.measure=true", "plan.measure_steps=[3]", "plan.measure_first=1", "plan.largest_micro_batch=2")
    asked = (*SHORT, "trainer.devices=1", "hardware=rtx3090", "plan.device_counts=[1]", "plan.plots=false")
    assert planned(monkeypatch, *asked, *NARROW, *only) == 0
    shown = capfd.readouterr().out
    assert "s a step, over 3 steps" in shown
    assert "Step times of 1 configurations are measured on this machine" in shown
    found = json.loads(Path("runs/plans/quickstart/plan.json").read_text())
    assert found["chosen"]["step_seconds"]["measured"] > 0
    times = [c["step_seconds"]["measured"] for c in found["candidates"]]
    assert len(times) == 2
    assert times.count(None) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert not Path("runs/quickstart").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("hardware=h300",), "h300"),
        (("plan.tokenz=3",), "plan.tokenz=3: no such key; did you mean plan.tokens?"),
        (("hardware.bandwidth_gbps=fast",), "hardware.bandwidth_gbps=fast: Hardware wants a number"),
        (("plan.probe_rows=[3,2]",), "plan.probe_rows=[3, 2]: give two numbers, the smaller one first"),
        (("plan.precisions=[fp8]", "hardware=a100"), "A100 80 GB has no FP8; leave fp8 out"),
        (("trainer.devices=64",), "data.global_batch_size=4: fewer rows than 64 devices"),
        (("strategy=ddp",), "only FSDPCompileStrategy can be planned; give strategy=fsdp_compile"),
        (("trainer.max_steps=-1",), "trainer.max_steps=-1: give the number of steps, or plan.tokens=<value>"),
        (("model.net.dim=wide",), "model.net.dim=wide: Llama wants a whole number"),
    ],
)
def test_a_mistake_is_one_line(
    overrides: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert planned(monkeypatch, "experiment=quickstart", *overrides) == 2
    shown = capfd.readouterr().err
    assert message in shown
    assert shown.startswith("fms-plan: error: ")
    assert len(shown.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_source_of_ones_own_is_planned_as_it_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # What is refused is refused behind the sources.
    assert planned(monkeypatch, "data.sources.mine=jl/*.jsonl", "model=llama_tiny", "trainer.max_steps=-1") == 2
    shown = capfd.readouterr()
    assert "trains on mine alone: data=text data.tokenizer=bytes" in shown.out
    assert "trainer.max_steps=-1: give the number of steps" in shown.err


def test_a_plan_says_how_far_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = [tmp_path / "0.jsonl", tmp_path / "1.jsonl"]
    progress = Progress(results, total=3)
    progress.say()
    results[1].write_text("{}\n{}\n")
    progress.say()
    progress.say()
    assert capsys.readouterr().out == "  0 of 3 structures\n  2 of 3 structures, about 10 s left\n"
    assert (remaining(44), remaining(130)) == ("40 s", "2 min")


def test_an_experiment_holds_what_differs_from_the_options_that_it_names(tmp_path: Path) -> None:
    with initialize_config_module("lightning_fms.conf", version_base="1.3"):
        given = ["experiment=llama_8b", "data.sources={web: x}", "data.tokenizer=bytes", "optimizer.lr=1e-5"]
        cfg = compose("plan", overrides=given)
        choices = {
            "data": "text",
            "model": "llama_8b",
            "precision": "bf16",
            "kernels": "none",
            "experiment": "llama_8b",
        }
        path = tmp_path / "experiment" / "planned.yaml"
        added = ["precision=fp8", "kernels=all", "strategy.cpu_offload=true", "data.micro_batch_size=3"]
        write_experiment(path, cfg, choices, added, "fms-train experiment=planned", "remark")
        written = OmegaConf.load(path)
    assert path.read_text().splitlines()[:2] == ["# @package _global_", "# fms-train experiment=planned"]
    assert {"override /precision": "fp8"} in [
        {str(k).replace(" /", " /"): v for k, v in entry.items()} for entry in written.defaults
    ]
    assert "precision" not in written
    assert written.data == {
        "sources": {"web": "x"}, "tokenizer": "bytes", "seq_len": 8192, "micro_batch_size": 3
    }  # fmt: skip
    assert written.strategy == {"cpu_offload": True}
    assert written.optimizer == {"lr": 1e-5}
    assert (written.meta_init, written.name) == (True, "llama_8b")
    assert not {"plan", "hardware", "paths"} & set(written)
