"""What ships works: a wheel, built from the tree and installed in an empty folder, composes and trains."""

import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from app_runs import SHORT, clean_environment

TREE = Path(__file__).parents[2]
COMPOSE_ALL = """
from pathlib import Path
import lightning_fms, lightning_fms.conf
from hydra import compose, initialize_config_module
assert str(Path(lightning_fms.__file__).parents[1]) == {installed!r}, lightning_fms.__file__
experiments = sorted(p.stem for p in Path(lightning_fms.conf.__file__).parent.glob("experiment/*.yaml"))
with initialize_config_module("lightning_fms.conf", version_base="1.3"):
    for experiment in experiments:
        assert compose("train", overrides=[f"experiment={{experiment}}"]).name == experiment
print(*experiments)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because setuptools leaves a build folder where it builds."""
    copy, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for folder in ("lightning_fms", "hydra_plugins"):
        shutil.copytree(TREE / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(TREE / name, copy)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out)]
    subprocess.run([*pip, str(copy)], check=True, timeout=240)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*pip, str(wheel)], check=True, timeout=240)
    return target


def run(installed: Path, cwd: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = clean_environment() | {"PYTHONPATH": str(installed)}
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240
    )


def test_the_wheel_holds_configs_plugins_types_and_licence_and_no_tests(wheel: Path) -> None:
    names = ZipFile(wheel).namelist()
    for expected in ("conf/train.yaml", "conf/experiment/quickstart.yaml", "lightning_fms/search_path.py", "py.typed"):
        assert any(name.endswith(expected) for name in names), expected
    assert any(name.endswith("LICENSE") for name in names)
    assert not any(name.startswith(("tests", "conf/", "examples", "benchmarks")) for name in names)


def test_it_composes_every_experiment_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, "-c", COMPOSE_ALL.format(installed=str(installed)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["llama_1b", "llama_8b", "quickstart"]


def test_it_runs_the_quickstart_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, "-m", "lightning_fms.train", *SHORT)
    assert done.returncode == 0, done.stderr
    assert "Next:" in done.stdout
    assert (tmp_path / "runs/quickstart/001/run.yaml").is_file()
