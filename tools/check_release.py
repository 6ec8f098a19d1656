"""Build what is released from what is committed, look into it, install it elsewhere, and train with it.

    python tools/check_release.py [--python python3.12] [--dependencies pip] [--out dist]

Everything happens on a copy of the last commit in a temporary folder, so nothing that lies around in the tree can slip in. In
order: wheel and sdist by `python -m build`; `twine check --strict`; the wheel holds every config, `py.typed`, the plugins for Hydra
and the licence, and nothing else; the version is that of the package; the wheel is installed, not editable, in a fresh
environment; there all experiments compose and `fms-train experiment=quickstart` trains a few steps.

The environment borrows the dependencies of the running Python; `--dependencies pip` installs them anew, as a user does (gigabytes).
Needs `pip install 'lightning_fms[release]'`.
"""

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from zipfile import ZipFile

TREE = Path(__file__).parents[1]
QUICK = ("experiment=quickstart", "trainer.max_steps=4", "callbacks.checkpoint.every_n_steps=2", "data.val_steps=1")
COMPOSE = """
from pathlib import Path
import lightning_fms, lightning_fms.conf
from hydra import compose, initialize_config_module
assert Path(lightning_fms.__file__).is_relative_to({environment!r}), lightning_fms.__file__
names = sorted(path.stem for path in Path(lightning_fms.conf.__file__).parent.glob("experiment/*.yaml"))
with initialize_config_module("lightning_fms.conf", version_base="1.3"):
    for name in names:
        assert compose("train", overrides=["experiment=" + name]).name == name
print(lightning_fms.__version__, *names)
"""


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    """A command that must succeed; its output."""
    print(f"+ {' '.join(map(str, command[:6]))}{' ...' if len(command) > 6 else ''}", flush=True)
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def last_commit(folder: Path) -> Path:
    """What is committed, in `<folder>/tree`, with no trace of the working tree."""
    packed, tree = folder / "tree.tar", folder / "tree"
    run("git", "archive", "--format=tar", "-o", packed, "HEAD", cwd=TREE)
    with tarfile.open(packed) as archive:
        archive.extractall(tree, filter="fully_trusted")  # a link at the top leads to the configs
    return tree


def version_of(tree: Path) -> str:
    """The version, from the one place where it stands."""
    found = re.findall(
        r'^__version__ = "(.+)"$', (tree / "lightning_fms" / "__init__.py").read_text(), flags=re.MULTILINE
    )
    if len(found) != 1:
        sys.exit(f"__version__ stands {len(found)} times in lightning_fms/__init__.py")
    return str(found[0])


def lacking(names: Sequence[str], tree: Path) -> list[str]:
    """What a wheel with these files lacks, or has too much."""
    wanted = [path for folder in ("lightning_fms", "hydra_plugins") for path in (tree / folder).rglob("*")]
    wanted = [path for path in wanted if path.suffix in (".py", ".yaml") or path.name == "py.typed"]
    expected = {str(path.relative_to(tree)) for path in wanted}
    held = {name for name in names if ".dist-info/" not in name}
    problems = [f"lacks {name}" for name in sorted(expected - held)] + [
        f"holds {name}" for name in sorted(held - expected)
    ]
    return problems + ([] if any(name.endswith("licenses/LICENSE") for name in names) else ["lacks LICENSE"])


def new_environment(folder: Path, python: str | None, dependencies: str) -> Path:
    """A fresh environment; the path of its Python."""
    environment = folder / "environment"
    if python is None:
        venv.create(environment, with_pip=True)
    else:
        run(python, "-m", "venv", environment, cwd=folder)
    if dependencies == "here":
        (site,) = environment.glob("lib/python*/site-packages")
        here = [path for path in sys.path if path.endswith("site-packages")]
        # A path in a .pth file comes behind what is installed here, and its own .pth files (an editable install) do not count.
        (site / "dependencies.pth").write_text("\n".join(here) + "\n")
    return environment / "bin" / "python"


def main() -> None:
    """The whole check; exits with 1 at the first thing that is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", help="which Python to install for; default: this one")
    parser.add_argument(
        "--dependencies", choices=["here", "pip"], default="here", help="borrow those of this Python, or install"
    )
    parser.add_argument("--out", type=Path, help="keep wheel and sdist in this folder")
    given = parser.parse_args()
    if given.python and given.dependencies == "here":
        parser.error("--python: the dependencies of this Python are no use to another; add --dependencies pip")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tree, out = last_commit(folder), (given.out or folder / "dist").absolute()
        version = version_of(tree)
        run(sys.executable, "-m", "build", "--outdir", out, cwd=tree)
        (wheel,), (sdist,) = out.glob(f"*-{version}-py3-none-any.whl"), out.glob(f"*-{version}.tar.gz")
        run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, cwd=folder)
        if problems := lacking(ZipFile(wheel).namelist(), tree):
            sys.exit(f"{wheel.name}: {'; '.join(problems)}")
        python = new_environment(folder, given.python, given.dependencies)
        plain = [] if given.dependencies == "pip" else ["--no-deps", "--no-index"]
        run(python, "-m", "pip", "install", "--quiet", *plain, wheel, cwd=folder)
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "LIGHTNING_FMS", "HYDRA"))
        }
        said = run(python, "-c", COMPOSE.format(environment=str(folder.resolve())), cwd=folder, env=clean).split()
        if said[0] != version:
            sys.exit(f"the wheel says {said[0]}, the tree {version}")
        print(run(python.with_name("fms-train"), *QUICK, cwd=folder, env=clean)[-600:])
        for program in ("fms-data", "fms-checkpoint", "fms-supervise"):
            run(python.with_name(program), "--help", cwd=folder, env=clean)
        print(f"{version}: {wheel.name} and {sdist.name} are good; experiments: {', '.join(said[1:])}")


if __name__ == "__main__":
    main()
