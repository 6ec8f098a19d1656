"""`fms-train`: trains what its config says.

Usage: `fms-train experiment=quickstart`, `torchrun --nproc-per-node=8 -m lightning_fms.train experiment=llama_8b ...`;
`fms-train --help` lists the groups. A mistake of the user is one line and exit code 2, with a traceback where the config
says `debug=trace`; anything else is our mistake, and shows where.
"""

import os
import sys
import traceback
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

CONFIG_PATH, CONFIG_NAME, VERSION_BASE = "pkg://lightning_fms.conf", "train", "1.3"
# Said in Hydra's messages for programs, of no use to people.
_NOISE = ("full_key:", "object_type=", "reference_type=", "Config search path:", "provider=", "Set the environment")


def one_line(error: BaseException) -> str:
    """The message of an error without Hydra's wrapping, in one line."""
    place = ""
    cause: BaseException | None = error
    while cause is not None and type(cause).__name__ == "InstantiationException":
        place = place or next((line.split(": ")[1] for line in str(cause).splitlines() if "full_key" in line), "")
        error, cause = cause, cause.__cause__
    lines = [line.strip() for line in str(cause or error).splitlines()]
    text = " ".join(line for line in lines if line and not line.startswith(_NOISE)) or type(cause or error).__name__
    return f"{place}: {text}" if place and not text.startswith(place) else text


def is_mistake_of_user(error: BaseException) -> bool:
    """Whether a message is enough: bad configs and bad values, missing files. Other errors need a traceback."""
    if isinstance(error, HydraException) and error.__cause__ is not None and type(error).__name__.startswith("Inst"):
        return is_mistake_of_user(error.__cause__)
    kinds = (HydraException, OmegaConfBaseException, ValueError, OSError, NotImplementedError)
    return isinstance(error, kinds) or type(error).__name__ == "MisconfigurationException"


def report(error: Exception) -> NoReturn:
    """Say what went wrong, and exit: code 2 for a mistake of the user, 1 for ours."""
    if not is_mistake_of_user(error):
        traceback.print_exception(error)
        sys.exit(1)
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"
    print(f"fms-train: error{f' on rank {rank}' if rank != '0' else ''}: {one_line(error)}", file=sys.stderr)
    sys.exit(2)


@hydra.main(config_path=CONFIG_PATH, config_name=CONFIG_NAME, version_base=VERSION_BASE)
def task(cfg: DictConfig) -> None:
    """One job: a run, or one of a multirun."""
    # Torch and Lightning take seconds to import, which a misspelled override should not cost.
    from lightning_fms.app import train  # noqa: PLC0415

    try:
        train(cfg, list(HydraConfig.get().overrides.task))
    except Exception as error:
        if cfg.debug.traceback:
            traceback.print_exc()
        # Not raised on: Hydra would add a line of its own.
        report(error)


def main() -> None:
    """The console script."""
    # Hydra raises what is wrong with a config instead of printing it, so that all errors have one form.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        task()
    except Exception as error:
        report(error)


if __name__ == "__main__":
    main()
