"""Sweeps of `fms-train` itself: jobs on several devices, each trained by its own processes."""

import json
from pathlib import Path

import pytest
from app_runs import SHORT, start


def test_jobs_on_several_devices_train_what_they_are_asked_for(tmp_path: Path) -> None:
    # Lightning's launcher trained the second job on one process for the order 1,2, and crashed for 2,1.
    done = start(tmp_path, "-m", "lightning_fms.train", "-m", *SHORT, "trainer.devices=2,1", "hydra.sweep.dir=swept")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for number, devices in enumerate((2, 1)):
        assert f"on {devices} x CPU" in (tmp_path / f"swept/logs/{number:03}.log").read_text()
    results = [json.loads((tmp_path / f"swept/{number:03}/result.json").read_text()) for number in range(2)]
    assert results[0]["metrics"]["val_loss"] == pytest.approx(results[1]["metrics"]["val_loss"], rel=1e-3)
    assert done.stdout.count("Next:") == 0
    assert "best: job 00" in done.stdout
    assert not (tmp_path / "runs").exists()
