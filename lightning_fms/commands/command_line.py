"""How a command of several subcommands says what is wrong: one line, and an exit code."""

import argparse
import sys
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Says a wrong argument in the form of all errors."""

    def error(self, message: str) -> NoReturn:
        """End with exit code 2."""
        fail(self.prog.partition(" ")[0], f"{message}; see {self.prog} --help", 2)


def fail(program: str, message: str, code: int) -> NoReturn:
    """End with a message in one line.

    Raises:
        SystemExit: with the exit code.
    """
    print(f"{program}: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def fail_of_system(program: str, error: OSError) -> NoReturn:
    """The same for what the system refused, which names a file if it can."""
    fail(program, f"{error.filename or ''}: {error.strerror or error}".removeprefix(": "), 1)
