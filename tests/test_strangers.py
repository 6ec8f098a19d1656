"""Three strangers follow their page as it is written: one with a Trainer, one with a Hydra project, one with parquet and GPUs."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hydra import compose, initialize_config_module

from lightning_fms.command_line import with_own_sources, with_size
from lightning_fms.commands.data import main as fms_data
from lightning_fms.run_check import check

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text()
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [block for kind, block in fenced if kind == language]


def run(folder: Path, *command: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LIGHTNING_FMS_", "PYTEST", "HYDRA"))}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_one_with_a_trainer_adds_one_plugin_at_a_time(tmp_path: Path) -> None:
    parts = blocks("own-trainer.md", "python")
    assert len(parts) == 6
    (tmp_path / "steps.py").write_text("\n".join(parts))
    out = run(tmp_path, "steps.py")
    assert "blocks" in out
    assert (tmp_path / "run/checkpoints/step-6.ckpt").is_dir()


def test_the_one_with_a_hydra_project_takes_our_groups(tmp_path: Path) -> None:
    for language in ("yaml", "python"):
        for block in blocks("own-hydra.md", language):
            name, _, text = block.partition("\n")
            path = tmp_path / name.removeprefix("# ")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    commands = [shlex.split(line)[1:] for line in blocks("own-hydra.md", "")[0].splitlines()]
    assert len(commands) == 2
    # The second is the first with more.
    assert float(run(tmp_path, *commands[1]).split("loss ")[-1]) > 0


def commands_of(program: str) -> list[list[str]]:
    lines = [line for block in blocks("parquet.md", "") for line in block.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith(program)]


def test_the_one_with_parquet_types_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in commands_of("fms-train"):
        given = [word for word in words if word != "resume=auto"]
        overrides = with_size(with_own_sources(given))
        with initialize_config_module("lightning_fms.conf", version_base="1.3"):
            cfg = compose("train", overrides=overrides)
        cfg.paths.root = str(tmp_path)
        check(cfg)
    assert len(commands_of("fms-train")) == 5
    with initialize_config_module("lightning_fms.conf", version_base="1.3"):
        compose("plan", overrides=with_size(commands_of("fms-plan")[0]))
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    pq.write_table(pa.table({"text": [f"a document, number {n}" for n in range(200)]}), corpus / "a.parquet")
    monkeypatch.chdir(tmp_path)
    inspect = [str(corpus) if word.startswith("/corpus/web") else word for word in commands_of("fms-data inspect")[0]]
    inspect = [*inspect[: inspect.index("--tokenizer")]]
    assert fms_data(inspect) in (0, None)
    small = ("trainer.accelerator=cpu", "trainer.devices=1", "precision=fp32", "data.seq_len=32", "data.num_workers=0")
    typed = [
        f"data.sources.web={corpus}" if word.startswith("data.sources.web=") else word
        for word in commands_of("fms-train")[0]
    ]
    typed = [word for word in typed if not word.startswith(("data.tokenizer", "depth", "trainer.devices"))]
    out = run(tmp_path, "-m", "lightning_fms.train", *typed, "depth=1", "data.global_batch_size=4", *small)
    assert "source web: 1 files" in out
    assert "4 steps" in out
