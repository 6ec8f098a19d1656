"""`fms-data`: look at data, prepare it, plan a mixture, and ask which documents a step has seen.

A mistake of the user is one line and exit code 2; a document that cannot be read is one line and exit code 1. Anything else is a
mistake in code, and shows where.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from lightning_fms.commands import audit, inspect, mix, prepare
from lightning_fms.commands.command_line import Parser, fail, fail_of_system
from lightning_fms.commands.processes import WorkerDied
from lightning_fms.data.sources import DocumentError
from lightning_fms.distributed.commit import CheckpointError

PROGRAM = "fms-data"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = Parser(
        prog=PROGRAM,
        description="Look at data, prepare it, plan a mixture, and ask which documents a training step has seen.",
        epilog=f"{PROGRAM} COMMAND --help says more of a command.",
    )
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    for command in (inspect, prepare, mix, audit):
        command.add_parser(commands)
    return top


def main(words: Sequence[str] | None = None) -> None:
    """The console script."""
    arguments = parser().parse_args(words)
    try:
        arguments.run_command(arguments)
    except BrokenPipeError:  # whoever reads us, `head` for one, has enough
        sys.stderr.close()
        sys.exit(0)
    except KeyboardInterrupt:
        _fail("stopped", 130)
    except (DocumentError, CheckpointError) as error:
        hint = "; --on-error skip leaves such documents out" if getattr(arguments, "on_error", "") == "raise" else ""
        _fail(f"{error}{hint if isinstance(error, DocumentError) else ''}", 1)
    except ValueError as error:
        _fail(str(error), 2)
    except WorkerDied as error:
        _fail(f"{error}; give the same command with fewer --workers, and it goes on", 1)
    except OSError as error:
        fail_of_system(PROGRAM, error)


def _fail(message: str, code: int) -> NoReturn:
    fail(PROGRAM, " ".join(message.split()).replace("set text_key to", "give --text-key"), code)


if __name__ == "__main__":
    main()
