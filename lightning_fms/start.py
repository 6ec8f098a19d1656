"""What the console scripts call: nothing is imported yet, so a Ctrl-C in the first second is answered in one line, too."""

import sys
from importlib import import_module
from typing import NoReturn


def _start(program: str, module: str) -> NoReturn:
    try:
        import_module(module).main()
    except KeyboardInterrupt:  # Later ones are answered by the program itself.
        print(f"\n{program}: interrupted", file=sys.stderr, flush=True)
        sys.exit(130)
    sys.exit(0)


def train() -> NoReturn:
    """`fms-train`."""
    _start("fms-train", "lightning_fms.train")


def plan() -> NoReturn:
    """`fms-plan`."""
    _start("fms-plan", "lightning_fms.plan")
