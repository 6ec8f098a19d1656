"""The Python of README and docs runs as it stands there, and the commands are those that exist."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TREE = Path(__file__).parents[1]
README, DATA = (TREE / "README.md").read_text(), (TREE / "docs" / "data.md").read_text()
SHELL = "\n".join(re.findall(r"^```(?:bash|sh|shell|console)?\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL))


def blocks_of(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def run(script: str, folder: Path) -> str:
    (folder / "script.py").write_text(script)
    environment = {**os.environ, "LIGHTNING_FMS_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("block", blocks_of(README), ids=range(len(blocks_of(README))))
def test_a_python_block_runs_in_an_empty_folder(block: str, tmp_path: Path) -> None:
    run(block, tmp_path)


# What follows the blocks of docs/data.md: every batch is what the text says.
USE = """
first = next(iter(StreamLoader({"web": "corpus/web"}, 64, global_batch_size=4, packing="best_fit")))
documents = first["document_ids"]
q = torch.randn(4, 2, 64, 8)
assert sdpa(q, q, q, documents).shape == q.shape
assert block_mask(documents).shape == (4, 1, 64, 64)
assert torch.isfinite(module.loss(first))
packed, apart = loss_of(first), []
for row in range(4):
    for document in documents[row].unique():
        of = documents[row] == document
        one = {name: first[name][row][of][None] for name in ("input_ids", "labels", "position_ids")}
        if (count := int((one["labels"] != -100).sum())):
            apart.append((count, float(loss_of(one))))
assert len(apart) > 4
mean = sum(count * loss for count, loss in apart) / sum(count for count, _ in apart)
assert abs(mean - float(packed)) < 1e-5, (mean, float(packed))
pairs = next(iter(StreamLoader({"pairs": "corpus/pairs.jsonl"}, None, 4, packing="none", reader=read)))
assert bytes(pairs["labels"][0][pairs["labels"][0] >= 0][:-1].tolist()) == b"It is."
assert next(iter(third))["input_ids"].shape == (4, 256)
"""


def test_the_blocks_of_the_data_page_run_one_after_another(tmp_path: Path) -> None:
    (tmp_path / "corpus" / "web").mkdir(parents=True)
    (tmp_path / "corpus" / "books").mkdir()
    texts = [json.dumps({"text": f"page {n} " * (n % 13 + 1)}) for n in range(200)]
    (tmp_path / "corpus" / "web" / "a.jsonl").write_text("\n".join(texts))
    for n in range(3):
        (tmp_path / "corpus" / "books" / f"{n}.txt.gz").write_bytes(gzip.compress(f"book {n}, line\n".encode() * 9000))
    pairs = [json.dumps({"question": f"What is {n}?\n", "answer": "It is."}) for n in range(20)]
    (tmp_path / "corpus" / "pairs.jsonl").write_text("\n".join(pairs))
    lines = run("\n".join(blocks_of(DATA)) + USE, tmp_path).splitlines()
    assert {line.split()[0] for line in lines} == {str(row) for row in range(24, 36)}


def test_it_has_at_most_600_words() -> None:
    assert len(README.split()) <= 600


def test_the_commands_name_experiments_that_exist() -> None:
    experiments = {path.stem for path in (TREE / "conf" / "experiment").glob("*.yaml")}
    assert set(re.findall(r"experiment=(\w+)", SHELL)) <= experiments
