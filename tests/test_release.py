"""What is released: one place for the version, every file of the package in the wheel; tools/check_release.py does the rest."""

import re
import subprocess
import sys
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

import lightning_fms

TREE = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = spec_from_file_location("check_release", TREE / "tools" / "check_release.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_version_stands_in_one_place(release: ModuleType) -> None:
    project = tomllib.loads((TREE / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "lightning_fms.__version__"}
    assert release.version_of(TREE) == lightning_fms.__version__
    elsewhere = re.compile(rf'^\s*(__version__|version) = "{re.escape(lightning_fms.__version__)}"', re.MULTILINE)
    found = [path for path in (TREE / "lightning_fms").rglob("*.py") if elsewhere.search(path.read_text())]
    assert found == [TREE / "lightning_fms" / "__init__.py"]
    assert not elsewhere.search((TREE / "pyproject.toml").read_text())


def test_a_wheel_without_a_config_or_with_a_test_is_found_out(release: ModuleType) -> None:
    folders = ("lightning_fms", "hydra_plugins")
    files = [path for folder in folders for path in (TREE / folder).rglob("*") if path.suffix in (".py", ".yaml")]
    names = [str(path.relative_to(TREE)) for path in files] + ["lightning_fms/py.typed", "x.dist-info/licenses/LICENSE"]
    assert release.lacking(names, TREE) == []
    lost = "lightning_fms/conf/train.yaml"
    assert release.lacking([*(n for n in names if n != lost), "tests/x.py"], TREE) == [
        f"lacks {lost}",
        "holds tests/x.py",
    ]
    assert release.lacking(names[:-1], TREE) == ["lacks LICENSE"]


def test_the_python_that_a_release_claims_is_the_one_it_asks_for() -> None:
    project = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]
    oldest = min(c.rpartition(" ")[2] for c in project["classifiers"] if re.search(r"Python :: 3\.\d+$", c))
    assert project["requires-python"] == f">={oldest}"


def test_another_python_takes_dependencies_of_its_own() -> None:
    command = [sys.executable, str(TREE / "tools" / "check_release.py"), "--python", "python3.12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "add --dependencies pip" in done.stderr


def test_a_ctrl_c_before_anything_is_imported_is_one_line() -> None:
    late = (
        "import lightning_fms.start as start\n"
        "def interrupted(name): raise KeyboardInterrupt\n"
        "start.import_module = interrupted\n"
        "start.train()"
    )
    done = subprocess.run([sys.executable, "-c", late], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "\nfms-train: interrupted\n")
