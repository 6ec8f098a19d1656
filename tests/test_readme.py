"""The README's Python runs as it stands there, and its commands are those that exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
SHELL = "\n".join(re.findall(r"^```(?:bash|sh|shell|console)?\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_python_block_runs_in_an_empty_folder(block: str, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(block)
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr


def test_it_has_at_most_600_words() -> None:
    assert len(README.split()) <= 600


def test_the_commands_name_experiments_that_exist() -> None:
    experiments = {path.stem for path in (Path(__file__).parents[1] / "conf" / "experiment").glob("*.yaml")}
    assert set(re.findall(r"experiment=(\w+)", SHELL)) <= experiments
