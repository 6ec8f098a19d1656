"""Lets any Hydra app find the suite's configs: `defaults: [{data: quickstart}]` in a user's own app works."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

CONFIGS = "pkg://lightning_fms.conf"


class LightningFmsSearchPath(SearchPathPlugin):
    """Hydra finds this class by itself in the namespace package `hydra_plugins`."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append our configs behind the app's own, which win where both have a file of a name."""
        if all(element.path != CONFIGS for element in search_path.get_path()):
            search_path.append("lightning_fms", CONFIGS)
