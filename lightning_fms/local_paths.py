"""Addresses of object stores are no places for checkpoints, and are refused before a run has anything to lose.

A checkpoint becomes visible by one rename, which object stores do not have, and `Path("s3://bucket/x")` is without a word the
folder `s3:/bucket/x` below the current one.
"""

import re
from pathlib import Path

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # `Path` makes one slash of two


def refuse_remote(path: str | Path) -> None:
    """Raise ValueError for an address such as `s3://bucket/folder`, also as a `Path`."""
    if _ADDRESS.match(str(path)):
        raise ValueError(
            f"checkpoint path {path}: checkpoints are written to and read from a folder that all ranks share, not an object store. "
            "Save to such a folder, and copy committed checkpoints away (`aws s3 sync`, `rclone copy`); copy one back to use it"
        )
