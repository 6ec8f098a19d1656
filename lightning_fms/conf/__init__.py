"""The configs; a package, because Hydra looks for them as `pkg://lightning_fms.conf`.

Whoever composes them imports this, so here the one resolver that they use becomes known: `${of_depth:width,${depth}}`.
"""

from omegaconf import OmegaConf

from lightning_fms.depth import of_depth

OmegaConf.register_new_resolver("of_depth", of_depth, replace=True)
