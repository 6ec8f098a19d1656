"""Whether a write failed because the disk is full.

PyTorch writes tensors through a zip writer. When a write ends short, the writer's own complaint ("unexpected pos 704 vs 598") takes
the place of the system's, which is then deeper in the chain of errors; and what another rank sends has lost its chain. So both are
asked: the chain, and the disk itself while the unfinished files still lie on it.
"""

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from lightning_fms.remote_path import RemotePath

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_NEARLY_NOTHING = 64 * 1024  # a block or two may stay free


def said_of_full_disk(error: BaseException, folder: Path) -> str:
    """What to say in front of an error if a full disk, or a used up quota, is its cause; else nothing.

    Args:
        error: what a write into `folder` raised.
        folder: where, with what was written still in it.
    """
    if any(isinstance(cause, OSError) and cause.errno in _NO_SPACE for cause in _causes(error)):
        found = True
    elif isinstance(folder, RemotePath) or not folder.is_dir():
        found = False
    else:
        found = shutil.disk_usage(folder).free < _NEARLY_NOTHING
    return (
        "the disk is full, or a quota is used up (No space left on device): free some, or keep fewer; " if found else ""
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what it came from, and what came in its way; those of all ranks where it is DCP's."""
    waiting, seen = [error], set[int]()
    while waiting:
        cause = waiting.pop()
        if cause is None or id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        waiting += [cause.__cause__, cause.__context__]
        if isinstance(cause, CheckpointException):
            waiting += [failure for failure, _ in cause.failures.values()]
