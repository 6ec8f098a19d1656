"""Documents that cannot be read: the run ends, or they are left out, told of, and perhaps written down.

What is left out is a document, or a file in which documents cannot be found: it is gone, cut, or not what its name says. The
first thing that is wrong with each of the first few files is logged; the rest is counted in the state.
"""

import logging
from collections import Counter
from pathlib import Path
from typing import Literal, get_args

from lightning_fms.data.quarantine import KNOWN, Quarantine, Where
from lightning_fms.data.sources import DocumentError

OnError = Literal["raise", "skip", "quarantine"]

_TOLD = 5  # files that a process tells of

_log = logging.getLogger(__name__)


class LeftOut:
    """What the streams of a process do with documents that cannot be read.

    Args:
        on_error: `"raise"` ends the run; `"skip"` leaves them out; `"quarantine"` also writes them down.
        folder: Where to, for `"quarantine"`; else of no use.
        rank: The data rank.

    Raises:
        ValueError: For another `on_error`, or a folder that is missing or cannot be made.
    """

    def __init__(self, on_error: OnError = "raise", folder: str | Path | None = None, rank: int = 0) -> None:
        if on_error not in get_args(OnError):
            raise ValueError(f"on_error={on_error!r} must be one of {', '.join(map(repr, get_args(OnError)))}")
        if on_error == "quarantine" and folder is None:
            raise ValueError("on_error='quarantine' with quarantine=None: give the folder to write to")
        self.on_error = on_error
        self._quarantine = Quarantine(folder, rank) if on_error == "quarantine" and folder is not None else None
        self._known: set[int] = set()
        self._files: set[tuple[str, str]] = set()
        self._counts: Counter[str] = Counter()
        self._last: dict[str, str] = {}
        self._fruitless: set[str] = set()

    def give_up(self, where: Where, error: DocumentError) -> None:
        """Raise, or leave out, as `on_error` says.

        Raises:
            DocumentError: With the source's name before the message.
            ValueError: If the quarantine cannot be written.
        """
        if self.on_error == "raise":
            raise DocumentError(f"source {where.source!r}: {error}") from None
        self._last[where.source] = str(error)
        if where.key in self._known:  # another epoch, or another range of the file
            return
        if len(self._known) < KNOWN:
            self._known.add(where.key)
        self._counts[where.source] += 1
        self._tell(where, error)
        if self._quarantine is not None:
            self._quarantine.write(where, str(error))

    def found(self, source: str) -> str:
        """Say what the streams of this process could not read of a source."""
        if not self._counts[source]:
            return "its documents are empty"
        return f"{self._counts[source]:,} documents or files could not be read, the last: {self._last[source]}"

    def warn_fruitless(self, source: str, stream: int) -> None:
        """Warn, once a source, that a stream found nothing in a whole epoch because it could not be read."""
        if self._counts[source] and source not in self._fruitless:
            self._fruitless.add(source)
            _log.warning(
                "source %r: no document with a token in a whole epoch of stream %d: %s",
                source,
                stream,
                self.found(source),
            )

    def _tell(self, where: Where, error: DocumentError) -> None:
        file = (where.source, where.file)
        if file in self._files or len(self._files) == _TOLD:
            return
        self._files.add(file)
        further = "what follows is" if len(self._files) == _TOLD else "further ones of this file are"
        then = (
            f"all are written to {self._quarantine.folder}"
            if self._quarantine is not None
            else f"{further} only counted"
        )
        _log.warning("left out: source %r: %s; %s", where.source, error, then)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_known": set()}  # hashes differ between processes
