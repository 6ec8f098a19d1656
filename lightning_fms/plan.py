"""`fms-plan`: what fits, how long it takes and what it costs, before a GPU is rented.

Usage: `fms-plan experiment=llama_8b hardware=h200 trainer.devices=8`; everything else as for `fms-train`, and the group `plan`.
It needs no GPU. A mistake in the config is one line and exit code 2.
"""

import os
import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lightning_fms.command_line import with_own_sources, with_size
from lightning_fms.launch.words import flags_in, overrides_in
from lightning_fms.train import CONFIG_PATH, VERSION_BASE, explained, report


@hydra.main(config_path=CONFIG_PATH, config_name="plan", version_base=VERSION_BASE)
def task(cfg: DictConfig) -> None:
    """One plan."""
    # Torch and Lightning take seconds to import, which a misspelled override should not cost.
    from lightning_fms.planning.plan import plan  # noqa: PLC0415

    try:
        plan(cfg, dict(HydraConfig.get().runtime.choices))
    except Exception as error:
        report(error, cfg.debug.traceback, "fms-plan")


def main() -> None:
    """The console script."""
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        words = with_size(with_own_sources(sys.argv[1:]))
        sys.argv[1:] = [*flags_in(words), *overrides_in(words)]
        task()
    except Exception as error:
        report(explained(error, sys.argv[1:], "plan"), command="fms-plan")


if __name__ == "__main__":
    main()
