"""What the pages in docs/ say is so: the table of errors is that of the code, links lead somewhere, and the
tutorial's commands compose."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from lightning_fms.command_line import with_own_sources, with_size
from lightning_fms.run_check import check

TREE = Path(__file__).parents[1]


def test_the_table_of_errors_is_that_of_the_code() -> None:
    """Else: python tools/errors_table.py"""
    done = subprocess.run(
        [sys.executable, str(TREE / "tools" / "errors_table.py"), "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_links_between_the_pages_lead_somewhere() -> None:
    for page in [TREE / "README.md", TREE / "CONTRIBUTING.md", *sorted((TREE / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def modules_by_room() -> dict[str, list[str]]:
    """Names of modules by their folder in the package; those of Hydra's plugins too."""
    rooms: dict[str, list[str]] = {}
    for path in sorted([*(TREE / "lightning_fms").rglob("*.py"), *(TREE / "hydra_plugins").rglob("*.py")]):
        if path.stem != "__init__":
            folder = path.parent.relative_to(TREE).as_posix().removeprefix("lightning_fms").strip("/")
            rooms.setdefault(folder.removesuffix("/lightning_fms"), []).append(path.stem)
    return rooms


@pytest.mark.parametrize(("room", "modules"), modules_by_room().items())
def test_every_module_is_named_in_the_architecture(room: str, modules: list[str]) -> None:
    """In the row of its room; what is in no room anywhere, with its suffix."""
    lines = (TREE / "docs" / "architecture.md").read_text().splitlines()
    text = "\n".join(line for line in lines if line.startswith(f"| `{room}` |") or not room)
    suffix = "" if room else ".py"
    missing = [name for name in modules if f"`{name}{suffix}`" not in text]
    assert not missing, f"{room or 'the package'}: {', '.join(missing)}"


def commands_of(page: str, program: str) -> list[list[str]]:
    blocks = re.findall(r"^```\n(.*?)^```", (TREE / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [line.rpartition("&& ")[2] for block in blocks for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith(program)]


@pytest.mark.parametrize("program", ["fms-train", "fms-plan"])
def test_the_commands_of_the_tutorial_compose_and_are_checked(program: str, tmp_path: Path) -> None:
    name = program.removeprefix("fms-")
    for words in commands_of("docs/tutorial.md", program):
        # A sweep is tried with its first values; what `resume=` adds is that of a run.
        given = [re.sub(r"=([^\[{,]+),.*", r"=\1", word) for word in words if word not in ("-m", "resume=auto")]
        overrides = with_size(with_own_sources(given)) if program == "fms-train" else given
        with initialize_config_module("lightning_fms.conf", version_base="1.3"):
            cfg = compose(name, overrides=overrides)
        if program == "fms-train":
            cfg.paths.root = str(tmp_path)
            check(cfg)
    assert len(commands_of("docs/tutorial.md", program)) >= 1
