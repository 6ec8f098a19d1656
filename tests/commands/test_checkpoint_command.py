"""`fms-checkpoint`: what it lists, what it says of one, and that it finds damage."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from lightning_fms.commands.checkpoint import main
from lightning_fms.distributed import commit
from tests.chaos.workload import Plan, start, write_corpus


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    said = capsys.readouterr()
    return int(stop.value.code or 0), said.out, said.err


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    plan = Plan(write_corpus(folder / "corpus"), folder / "run", steps=4, every=2)
    run = start(plan, "x", 2)
    assert run.codes() == [0, 0], run.output()
    return plan.store


@pytest.fixture
def run(made, tmp_path) -> Path:
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


def test_list_shows_the_newest_first_and_what_is_not_complete(run, capsys) -> None:
    (run / "checkpoints" / "scores.json").write_text('{"step-2.ckpt": 1.25}')
    shutil.copytree(run / "checkpoints" / "step-4.ckpt", run / "checkpoints" / "step-6.ckpt")
    (run / "checkpoints" / "step-6.ckpt" / "COMMIT").unlink()
    os.truncate(run / "checkpoints" / "step-2.ckpt" / "state.pt", 10)
    code, out, _ = call(capsys, "list", run)
    head, newest, older, torn = out.splitlines()
    assert code == 0
    assert head.split() == ["step", "name", "time", "(UTC)", "ranks", "size", "score", "state"]
    assert newest.split()[:2] == ["4", "step-4.ckpt"]
    assert newest.endswith("complete")
    assert "1.25" in older
    assert "10 bytes instead of" in older
    assert "was never committed" in torn
    code, out, _ = call(capsys, "list", run / "checkpoints", "--json")
    assert [one["step"] for one in json.loads(out)] == [4, None, None]
    assert json.loads(out)[0]["ranks"] == 2


def test_inspect_says_what_a_checkpoint_holds(run, capsys) -> None:
    code, out, _ = call(capsys, "inspect", run)
    assert code == 0
    assert "step-4.ckpt: complete" in out
    assert "24 rows read" in out
    code, out, _ = call(capsys, "inspect", run / "checkpoints" / "step-2.ckpt", "--json")
    found = json.loads(out)
    assert (found["global_step"], found["row"], found["ranks"]) == (2, 12, 2)
    assert found["model_elements"] == 257 * 8 + 2 * (64 + 8) + 257 * 8 + 257
    assert found["dtypes"] == {"float32": found["model_tensors"]}


def test_verify_reads_every_byte(run, capsys) -> None:
    code, out, _ = call(capsys, "verify", run)
    assert code == 0
    assert out.count("every byte is as it was written") == 2
    file = run / "checkpoints" / "step-4.ckpt" / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    code, out, _ = call(capsys, "verify", run)
    assert code == 1
    assert "step-4.ckpt: the content of __1_0.distcp has changed since it was saved" in out
    assert out.count("every byte") == 1
    assert call(capsys, "verify", run / "checkpoints" / "step-2.ckpt")[0] == 0


def test_plain_files_are_looked_at_too(tmp_path, capsys) -> None:
    torch.save({"state_dict": {"w": torch.ones(2, 3)}, "global_step": 7}, tmp_path / "a.ckpt")
    assert call(capsys, "verify", tmp_path)[0] == 0
    _, out, _ = call(capsys, "inspect", tmp_path / "a.ckpt", "--json")
    assert (json.loads(out)["global_step"], json.loads(out)["model_elements"]) == (7, 6)
    os.truncate(tmp_path / "a.ckpt", 200)
    assert call(capsys, "verify", tmp_path)[0] == 1
    assert "damaged" in call(capsys, "inspect", tmp_path / "a.ckpt")[2]


def test_mistakes_are_one_line(tmp_path, capsys) -> None:
    code, _, err = call(capsys, "list", tmp_path / "nowhere")
    assert (code, err.count("\n")) == (2, 1)
    assert "does not exist" in err
    assert "holds no checkpoint" in call(capsys, "verify", tmp_path)[2]
    assert call(capsys, "frobnicate")[0] == 2
    (tmp_path / "x.ckpt").mkdir()
    (tmp_path / "x.ckpt" / commit.MANIFEST).write_text("{}")
    code, _, err = call(capsys, "inspect", tmp_path)
    assert code == 1
    assert "none of its checkpoints is complete" in err


def test_weights_go_out_and_come_in(run, tmp_path, capsys) -> None:
    code, out, _ = call(capsys, "export", run, tmp_path / "out", "--dtype", "bfloat16")
    assert code == 0
    assert "step-4.ckpt" in out
    assert "no config.json" in out
    code, out, _ = call(capsys, "import", tmp_path / "out", tmp_path / "again.ckpt")
    assert (code, f"fms-train weights={tmp_path}/again.ckpt" in out) == (0, True)
    code, out, _ = call(capsys, "inspect", tmp_path / "again.ckpt", "--json")
    held = json.loads(out)
    assert set(held["dtypes"]) == {"bfloat16"}
    assert held["model_tensors"] == json.loads(call(capsys, "inspect", run, "--json")[1])["model_tensors"]
    code, _, err = call(capsys, "export", run, tmp_path / "out")
    assert code == 2
    assert "out exists; give a new folder" in err
    code, _, err = call(capsys, "import", tmp_path / "nowhere", tmp_path / "other.ckpt")
    assert code == 1
    assert not (tmp_path / "other.ckpt").exists()
