"""Addresses of object stores are no places for what has to be a file of this machine, and are refused before it is lost.

Checkpoint folders may be addresses (see `remote_path`). A run's folder (its config, record, logs, attempts, data states, reports)
and single files may not: they are appended to, renamed, or mapped into memory, and `Path("s3://bucket/x")` is without a word the
folder `s3:/bucket/x` below the current one.
"""

from pathlib import Path

from lightning_fms.remote_path import is_remote


def refuse_remote(path: str | Path, what: str) -> None:
    """Raise ValueError for an address such as `s3://bucket/folder`, also as a `Path`.

    Args:
        path: what was given.
        what: of what it was to be the place, as the user names it.
    """
    if is_remote(path):
        raise ValueError(
            f"{what}: {path} is an address, and this needs a folder on a file system. Only checkpoint folders can be addresses: "
            "fms-train callbacks.checkpoint.dirpath=s3://..., or StepCheckpoint('s3://...')"
        )


def local_path(path: str | Path, what: str) -> Path:
    """The path, which is no address; else a ValueError as of `refuse_remote`."""
    refuse_remote(path, what)
    return Path(path)
