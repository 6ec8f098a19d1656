"""Every example runs, as its first lines say."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from examples import rescale
from tests.worlds import run_world

ROOT = Path(__file__).parents[2]


def run(*command: str, cwd: Path, timeout: int = 280) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment = {k: v for k, v in environment.items() if not k.startswith(("PYTEST_XDIST", "COV_"))}
    finished = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout


def run_here(example: Path, *words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in this process, which has everything imported already."""
    monkeypatch.setattr(sys, "argv", [str(example), *words])
    monkeypatch.syspath_prepend(str(example.parent))
    runpy.run_path(str(example), run_name="__main__")


@pytest.mark.filterwarnings("ignore")
def test_minimal_is_short_and_learns(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    example = ROOT / "examples" / "minimal.py"
    assert len(example.read_text().splitlines()) <= 40
    run_here(example, monkeypatch=monkeypatch)
    assert float(capsys.readouterr().out.split("loss ")[-1]) < 4.5  # from 5.55 = ln 257


def test_rescale_repeats_and_skips_nothing(tmp_path, monkeypatch, capsys):
    by_torchrun = rescale.launch

    def launch(folder: Path, name: str, world: int, last_step: int, resume: str) -> None:
        """As a user starts it where two go on; the other phases in ranks that have everything imported."""
        if name == "2-ranks":
            by_torchrun(folder, name, world, last_step, resume)
        else:
            run_world(rescale.train, world, folder, name, last_step, resume, quiet=True)

    monkeypatch.setattr(rescale, "launch", launch)
    monkeypatch.setattr(sys, "argv", ["rescale.py", str(tmp_path / "out")])
    rescale.main()
    lines = capsys.readouterr().out.splitlines()
    documents, _, verdict = lines[-1].partition(" documents: ")
    assert verdict == "0 repeated, 0 skipped"
    assert int(documents) > 100
    difference = next(line for line in lines if line.startswith("largest difference"))
    assert float(difference.rsplit(maxsplit=1)[-1]) < 1e-3  # fp32, summed in another order
    assert sum(line.startswith("steps ") and "finished" in line for line in lines) == 3
    assert (tmp_path / "out" / "rescale.png").stat().st_size > 10_000


@pytest.mark.timeout(600)  # It starts ten processes.
def test_the_supervisor_goes_from_4_to_2_to_3_processes_by_itself(tmp_path):
    finished = run(str(ROOT / "examples" / "supervised.py"), str(tmp_path / "out"), cwd=tmp_path, timeout=580)
    assert [int(count) for count in re.findall(r"parameters on (\d) x CPU", finished)] == [4, 2, 3]
    # Losses of fp32, summed in another order.
    assert float(finished.rsplit(maxsplit=1)[-1]) < 1e-3


@pytest.mark.filterwarnings("ignore")
def test_sft_learns_the_answers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    example = ROOT / "examples" / "sft.py"
    assert len(example.read_text().splitlines()) <= 80
    run_here(example, str(tmp_path), monkeypatch=monkeypatch)
    before, after = re.findall(r"(\d\.\d+) (?:before|after)", capsys.readouterr().out)
    assert float(before) > 5
    assert float(after) < 3


@pytest.mark.filterwarnings("ignore")
def test_image_folder_learns_both_classes_from_equal_shares(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    example = ROOT / "examples" / "image_folder.py"
    assert len(example.read_text().splitlines()) <= 80
    run_here(example, str(tmp_path), monkeypatch=monkeypatch)
    output = capsys.readouterr().out
    assert "shares of the rows {'one': '50%', 'seven': '50%'}" in output
    assert float(output.split("accuracy ")[-1]) > 0.95
    assert len(list(tmp_path.rglob("*.png"))) == 225


@pytest.mark.filterwarnings("ignore")
def test_a_transformers_model_learns_in_a_plain_module(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_here(ROOT / "examples" / "huggingface.py", monkeypatch=monkeypatch)
    out = capsys.readouterr().out
    assert float(out.split("loss ")[-1]) < 4.5  # from 5.55 = ln 257


@pytest.mark.filterwarnings("ignore")
def test_images_from_an_own_dataloader_train_with_the_same_plugins(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_here(ROOT / "examples" / "vision.py", monkeypatch=monkeypatch)
    assert float(capsys.readouterr().out.split("accuracy ")[-1]) > 0.9  # of four classes


@pytest.mark.filterwarnings("ignore")
def test_a_project_of_its_own_trains_and_resumes_with_its_own_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train = ROOT / "examples" / "own_project" / "train.py"
    short = ("trainer.max_steps=6", "data.val_every_n_steps=3", "data.val_steps=1", "callbacks.target.loss=0")
    for words in (("experiment=mine", *short), ("resume=auto", "trainer.max_steps=8")):
        for name in [name for name in os.environ if name.startswith("LIGHTNING_FMS_")]:
            monkeypatch.delenv(name)  # each is a command of its own
        with pytest.raises(SystemExit, match="0"):
            run_here(train, *words, monkeypatch=monkeypatch)
    out = capsys.readouterr().out
    assert "Recurrent" in out
    assert f"python {train} resume=auto" in out
    assert "goes on from runs/own_project/001/checkpoints/step-6.ckpt" in out
    assert (tmp_path / "runs/own_project/001/checkpoints/step-8.ckpt").exists()
