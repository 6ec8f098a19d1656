"""Files that an earlier release wrote: what is promised, and the one way to keep it.

What is written carries the version of its layout, a whole number that goes up with each change of it. Whoever changes a layout
adds one function to a table, `{version it was: function}`, which turns content as that version had it into content as the next one
has it. Reading applies them one after the other, in memory; files are never rewritten. So the rest of the code knows the newest
layout only.

A version above ours is refused: what a later release means by it cannot be known.
"""

from collections.abc import Callable, Mapping
from typing import Any

Migration = Callable[[dict[str, Any]], dict[str, Any]]
"""Content of one version -> content of the next. May change the dict that it is given, and not the tensors in it."""


def check_version(version: object, first: int, newest: int, what: str) -> int:
    """The version, if it can be read.

    Args:
        version: as it was found.
        first: the first version that was in a release.
        newest: the version that is written.
        what: whose version, for the message, e.g. `the data state`.

    Raises:
        ValueError: it is newer than `newest`, older than `first`, or no version.
    """
    if isinstance(version, int) and not isinstance(version, bool):
        if first <= version <= newest:
            return version
        if version > newest:
            raise ValueError(
                f"{what} has format version {version}, and this lightning_fms reads up to {newest}: a newer one wrote it. "
                "Install that (pip install --upgrade lightning-fms)"
            )
    raise ValueError(
        f"{what} has format version {version!r}; the first released format is {first}, so no release reads it. Start anew "
        "without it"
    )


def migrate(content: dict[str, Any], version: int, newest: int, migrations: Mapping[int, Migration]) -> dict[str, Any]:
    """Content as the newest version has it.

    Args:
        content: as `version` has it.
        version: a readable one, see `check_version`.
        newest: the version that is written.
        migrations: by the version that they start from; where there is none, nothing changed in this content.
    """
    for older in range(version, newest):
        content = migrations[older](content) if older in migrations else content
    return content
