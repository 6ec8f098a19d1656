"""Plain commands beside the Hydra apps: `fms-data`."""
