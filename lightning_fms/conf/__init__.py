"""The configs; a package, because Hydra looks for them as `pkg://lightning_fms.conf`."""
