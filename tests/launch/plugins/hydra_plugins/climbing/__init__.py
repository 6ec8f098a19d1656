"""Found by Hydra, which looks for plugins in the packages below `hydra_plugins`."""
