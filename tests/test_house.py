"""The house rules, as tests: style, types, one-way imports, sizes, and an import that costs nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

TREE = Path(__file__).parents[1]
OURS = ("lightning_fms", "hydra_plugins", "tests", "examples", "benchmarks", "tools")
MAX_FILE, MAX_FUNCTION = 400, 60
# Longer with a reason: path::function, and why.
LONG_FUNCTIONS: dict[str, str] = {}
LONG_FILES: dict[str, str] = {}


def check(*command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=TREE, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (TREE / folder).rglob("*.py"))


def test_ruff_has_nothing_to_say() -> None:
    check("ruff", "check", *OURS)


def test_the_format_is_ruffs() -> None:
    check("ruff", "format", "--check", *OURS)


def test_types_are_right() -> None:
    check("mypy")


def test_imports_go_one_way() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports"))], cwd=TREE, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", sources(*OURS), ids=lambda path: str(path.relative_to(TREE)))
def test_files_and_functions_are_short_or_say_why_not(path: Path) -> None:
    text, name = path.read_text(), str(path.relative_to(TREE))
    assert name in LONG_FILES or len(text.splitlines()) <= MAX_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.body[0].lineno + 1
            assert lines <= MAX_FUNCTION or f"{name}::{node.name}" in LONG_FUNCTIONS, f"{node.name}: {lines} lines"


def test_importing_the_package_loads_neither_torch_nor_lightning() -> None:
    loaded = "import sys, lightning_fms; print(sorted({'torch', 'lightning', 'hydra', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_every_public_name_loads_on_first_use_and_none_loads_the_compiler() -> None:
    names = (
        "import sys, lightning_fms as f, lightning_fms.models; print(len([getattr(f, name) for name in f.__all__])); "
        "print('torch._inductor.compile_fx' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", names], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    count, compiler = done.stdout.split()
    assert int(count) >= 4
    assert compiler == "False"


def test_the_configs_at_the_top_are_those_of_the_package() -> None:
    assert (TREE / "conf").resolve() == TREE / "lightning_fms" / "conf"
