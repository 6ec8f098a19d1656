"""Every Python that the tests start imports this first: torchmetrics then loads no transformers, matplotlib and torchvision.

It loads them where they are installed, for metrics and plots that no test has, and Lightning loads torchmetrics: a fifth of
the time that a process of the tests needs to its first line. Whoever wants them still imports them.
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_FLAGS = (
    "_MATPLOTLIB_AVAILABLE",
    "_SCIENCEPLOT_AVAILABLE",
    "_TORCHVISION_AVAILABLE",
    "_TRANSFORMERS_AVAILABLE",
    "_TRANSFORMERS_GREATER_EQUAL_4_4",
    "_TRANSFORMERS_GREATER_EQUAL_4_10",
)


class _NothingOptional:
    """Finds the module in which torchmetrics notes what is installed, and has it note that these are not."""

    def find_spec(self, name: str, path: list[str] | None = None, target: object = None) -> ModuleSpec | None:
        if name != "torchmetrics.utilities.imports":
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            vars(module).update(dict.fromkeys(_FLAGS, False))

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _NothingOptional())  # type: ignore[arg-type]
