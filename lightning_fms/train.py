"""`fms-train`: trains what its config says.

Usage: `fms-train experiment=quickstart`, `torchrun --nproc-per-node=8 -m lightning_fms.train experiment=llama_8b ...`;
`fms-train --help` lists the groups. A mistake in the config is one line and exit code 2, with a traceback where the config
says `debug=trace`. Anything else is a mistake in code, the user's or ours, and shows where.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import NoReturn

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lightning_fms.command_line import with_own_sources, with_settings_of_sweep, with_size
from lightning_fms.launch.jobs import JobFailed
from lightning_fms.launch.report import closing
from lightning_fms.launch.words import flags_in, overrides_in, value_in
from lightning_fms.lost_rank import is_lost_connection
from lightning_fms.override_hints import NO_OPTION, explain

CONFIG_PATH, CONFIG_NAME, VERSION_BASE = "pkg://lightning_fms.conf", "train", "1.3"
# Said in Hydra's messages for programs, of no use to people.
_FOR_PROGRAMS = (
    "full_key:",
    "object_type=",
    "reference_type=",
    "Config search path:",
    "provider=",
    "Set the environment",
)
# Packages whose messages say what to change in a config,
_EXPLAIN = {"lightning_fms", "hydra_plugins", "hydra", "omegaconf", "lightning"}
# and those that are only passed through on the way there.
_PASSED_THROUGH = sys.stdlib_module_names | {
    "antlr4", "fsspec", "lightning_utilities", "litdata", "numpy", "tokenizers", "torch", "torchao", "triton", "yaml"
}  # fmt: skip


def one_line(error: BaseException) -> str:
    """The message of an error without Hydra's wrapping, in one line."""
    place = ""
    cause: BaseException | None = error
    while cause is not None and type(cause).__name__ == "InstantiationException":
        place = place or next((line.split(": ")[1] for line in str(cause).splitlines() if "full_key" in line), "")
        error, cause = cause, cause.__cause__
    lines = [line.strip() for line in str(cause or error).splitlines()]
    text = (
        " ".join(line for line in lines if line and not line.startswith(_FOR_PROGRAMS)) or type(cause or error).__name__
    )
    return f"{place}: {text}" if place and not text.startswith(place) else text


def explained(error: Exception, words: Sequence[str], config: str = "train") -> Exception:
    """An error of Hydra about a command line with what to type instead; any other error as it is.

    Args:
        error: what ended the program.
        words: of the command line.
        config: the one that they override.
    """
    # For a group without an option Hydra raises a plain ValueError.
    if not isinstance(error, HydraException) and NO_OPTION not in str(error):
        return error
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    return HydraException(explain(one_line(error), overrides, config))


def is_mistake_in_config(error: BaseException) -> bool:
    """Whether a message is enough: a bad config or value, a missing file. Other errors need a traceback.

    A `ValueError` of the user's own code is of a kind with ours, so it also counts who raised it.
    """
    if type(error).__name__ == "InstantiationException" and error.__cause__ is not None:
        return is_mistake_in_config(error.__cause__)
    kinds = (HydraException, OmegaConfBaseException, ValueError, OSError, NotImplementedError)
    of_kind = isinstance(error, kinds) or type(error).__name__ == "MisconfigurationException" or _names_an_extra(error)
    return of_kind and all(_explains_itself(cause) for cause in _chain(error))


def _names_an_extra(error: BaseException) -> bool:
    """Whether a package is missing that only a choice of the user's needs, and the message says how to install it."""
    return isinstance(error, ImportError) and "pip install" in str(error)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


def _explains_itself(error: BaseException) -> bool:
    """Whether an error was raised by us, Hydra or Lightning, and nobody else's code was on the way."""
    packages = [_package(frame) for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = all(package in _EXPLAIN | _PASSED_THROUGH for package in packages)
    # A file is opened by the standard library for somebody.
    raised_by = [package for package in packages if package not in sys.stdlib_module_names]
    return ours and (not raised_by or raised_by[-1] in _EXPLAIN)


def _package(frame: FrameType) -> str:
    name, spec = frame.f_globals.get("__name__", ""), frame.f_globals.get("__spec__")
    # `python -m lightning_fms.train` is called __main__.
    return (spec.name if name == "__main__" and spec is not None else name).partition(".")[0]


def _says_what_happened(error: Exception) -> bool:
    """Whether an error is no mistake in a config and yet needs no traceback: memory or a disk is full, a store is gone."""
    failed_save = type(error).__name__ == "CheckpointError" and error.__cause__ is not None
    return failed_save or type(error).__name__ in ("OutOfMemory", "StoreError")


def report(error: Exception, with_traceback: bool = False, command: str = "fms-train") -> NoReturn:
    """Say what went wrong, and exit: code 2 for a mistake in the config, 1 for one in code or a rank that is gone."""
    if is_lost_connection(error) and not with_traceback:
        print(f"{command}: rank {_rank()}: lost another rank, which says why if it could", file=sys.stderr, flush=True)
        sys.exit(1)
    if _says_what_happened(error):
        if with_traceback:
            traceback.print_exception(error)
        print(f"{command}: error{_on_rank()}: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    in_config = is_mistake_in_config(error)
    if with_traceback or not in_config:
        traceback.print_exception(error)
    if not in_config:
        sys.exit(1)
    print(f"{command}: error{_on_rank()}: {one_line(error)}", file=sys.stderr)
    sys.exit(2)


def _on_rank() -> str:
    return f" on rank {_rank()}" if _rank() != "0" else ""


def _rank() -> str:
    return os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"


@hydra.main(config_path=CONFIG_PATH, config_name=CONFIG_NAME, version_base=VERSION_BASE)
def task(cfg: DictConfig) -> float | None:
    """One job: a run, or one of a multirun; its objective."""
    # Torch and Lightning take seconds to import, which a misspelled override should not cost.
    from lightning_fms.app import train  # noqa: PLC0415

    try:
        return train(cfg)
    except Exception as error:
        # Not raised on: Hydra would add a line of its own.
        report(error, with_traceback=cfg.debug.traceback)


def run_app(task: Callable[[], object]) -> NoReturn:
    """Run a Hydra app as `fms-train` is run: `resume=`, errors in one line, and what a sweep says at its end.

    Args:
        task: a function decorated by `hydra.main`.
    """
    # Hydra raises what is wrong with a config instead of printing it, so that all errors have one form.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        sys.argv[1:] = _completed(sys.argv[1:])
        task()
    except JobFailed:  # The table says why.
        pass
    except KeyboardInterrupt as error:
        # Ranks other than the first have nothing to say.
        said = str(error) if type(error).__name__ == "Interrupted" else "interrupted"
        if said:
            print(f"\nfms-train: {said}", file=sys.stderr, flush=True)
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        report(explained(error, sys.argv[1:]))
    sys.exit(1 if closing() else 0)


def main() -> NoReturn:
    """The console script."""
    run_app(task)


def _completed(words: list[str]) -> list[str]:
    """A command line with the settings of what it goes on with, and with what a new source or a depth implies."""
    words = with_settings_of_sweep(words)
    if not set(words) & {"-m", "--multirun"} and value_in(words, "resume") == "auto":
        # Finding a run takes Torch too.
        from lightning_fms.resume import with_settings_of_run  # noqa: PLC0415

        words = with_settings_of_run(words)
    words = with_size(with_own_sources(words))
    # argparse takes `experiment=quickstart -m optimizer.lr=1,2` for a mistake.
    return [*flags_in(words), *overrides_in(words)]


if __name__ == "__main__":
    main()
