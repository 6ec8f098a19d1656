"""`fms-train -m hydra/sweeper=plan`: what may fit is run in rounds, and a second start runs nothing twice."""

import json
from pathlib import Path

import pytest
from app_runs import SHORT, call, start
from omegaconf import OmegaConf

from lightning_fms.config_check import ConfigError
from lightning_fms.launch.jobs import read_record
from lightning_fms.planner.space import Configuration
from lightning_fms.planning.search import overrides_of, remembered

ONLY = (
    "hydra.sweeper.hardware=rtx3090", "hydra.sweeper.checkpointing=[none]", "hydra.sweeper.offload=[false]",
    "hydra.sweeper.precisions=[fp32]", "hydra.sweeper.kernels=[none]", "hydra.sweeper.steps=[3,4]",
    "hydra.sweeper.largest_micro_batch=1", "hydra.sweep.dir=swept", "trainer.devices=1", "trainer.accelerator=cpu",
)  # fmt: skip


def test_a_config_is_measured_in_rounds_and_the_fastest_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = start(tmp_path, "-m", "lightning_fms.train", "-m", "hydra/sweeper=plan", *SHORT, *ONLY)
    assert done.returncode == 0, done.stdout + done.stderr
    record = read_record(tmp_path / "swept")
    assert record is not None
    assert [job.status for job in record.jobs] == ["done"] * 2  # 3 steps, and 4
    assert all(job.result is not None and job.result.objective == "step_seconds" for job in record.jobs)
    assert "1 are measured" in done.stdout
    planned = OmegaConf.load(tmp_path / "swept/experiment/planned.yaml")
    assert planned.data.micro_batch_size == 1
    assert not list((tmp_path / "swept").glob("*/checkpoints/*"))

    again = start(tmp_path, "-m", "lightning_fms.train", "-m", "hydra/sweeper=plan", *SHORT, *ONLY)
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("done before") == 2
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "-m", "hydra/sweeper=plan", *SHORT, "optimizer.lr=1e-3,1e-4") == 2


def test_a_trial_keeps_what_was_typed_but_for_what_it_decides() -> None:
    cfg = OmegaConf.create({"scheduler": {"warmup_steps": 5}, "callbacks": {"checkpoint": {}, "progress": {}}})
    typed = ["experiment=x", "kernels=none", "trainer.max_steps=100", "callbacks.checkpoint.every_n_steps=2"]
    found = overrides_of(Configuration(precision="fused", kernels="all"), cfg, typed, 5)
    assert found[0] == "experiment=x"
    assert [o for o in found if o.startswith(("kernels=", "precision", "trainer.max"))] == [
        "precision=fp8", "precision.recipe=fused", "kernels=all", "trainer.max_steps=5"
    ]  # fmt: skip
    assert [o for o in found if "checkpoint." in o or "~" in o] == ["~callbacks.checkpoint"]


def test_a_second_start_takes_the_space_on_record(tmp_path: Path) -> None:
    asked = {"command": ["optimizer.lr=1e-3"], "hardware": "h200"}
    record = {"asked": asked, "left": [{"micro_batch_size": 3}]}
    (tmp_path / "space.json").write_text(json.dumps(record))
    assert remembered(tmp_path, lambda: ([], 0), None, asked) == [Configuration(micro_batch_size=3)]


def test_another_command_in_the_folder_of_a_search_is_refused(tmp_path: Path) -> None:
    record = {"asked": {"command": ["a=1"], "hardware": "h200"}, "left": [{"micro_batch_size": 3}]}
    (tmp_path / "space.json").write_text(json.dumps(record))
    with pytest.raises(
        ConfigError, match=r"begun with command=\['a=1'\], and this command has \['a=2'\].*hydra.sweep.dir"
    ):
        remembered(tmp_path, lambda: ([], 0), None, {"command": ["a=2"], "hardware": "h200"})
    with pytest.raises(ConfigError, match="begun with hardware=h200, and this command has h100"):
        remembered(tmp_path, lambda: ([], 0), None, {"command": ["a=1"], "hardware": "h100"})


@pytest.mark.parametrize(
    "record",
    [
        '[{"micro_batch_size": 3}]',
        '{"left": []}',
        '{"asked": [], "left": []}',
        '{"asked": {}, "left": [{"rows": 3}]}',
        "{",
    ],
)
def test_a_record_of_another_form_is_refused(tmp_path: Path, record: str) -> None:
    (tmp_path / "space.json").write_text(record)
    with pytest.raises(ConfigError) as refused:
        remembered(tmp_path, lambda: ([], 0), None, {"hardware": "h200"})
    said = str(refused.value)
    assert said.startswith(f"{tmp_path / 'space.json'}: '{record}' is not a record")
    assert "give another hydra.sweep.dir" in said
