"""Where documents that cannot be read are written down: a folder of JSON lines.

Every process has a file of its own, so that ranks and workers never wait for each other; a line is appended whole, under a
lock. Another epoch, or a run that goes on, comes to the same documents again, perhaps in another process: the folder is read
once an epoch, when there is something to write, and what any process has written by then is not written again.
"""

import fcntl
import json
import os
from pathlib import Path
from typing import NamedTuple

from torch.utils.data import get_worker_info

KNOWN = 1 << 18
"""What was left out and is remembered, at most: 25 MB."""

_MANY_FILES = 1024  # beyond so many a process reads only its own: thousands of ranks would each read all


class Where(NamedTuple):
    """What is left out.

    source: name. file: path or address. start: first byte of the document, or of the range in which none can be found. stop: end
    of that range; `None` for a document. ref: of a document, what `Source.read` needs beside (its bytes, or its row in the
    file). stream, epoch: which stream came to it, in which epoch of the source.
    """

    source: str
    file: str
    start: int
    stop: int | None
    ref: int | None
    stream: int
    epoch: int

    @property
    def key(self) -> int:
        """What tells it from others in this process: a file counts once, whatever ranges of it are come to."""
        return _key(self.source, self.file, self.start, self.ref)


def _key(source: str, file: str, start: int, ref: int | None) -> int:
    return hash((source, file, start, ref) if ref is not None else (source, file))


class Quarantine:
    """Writes down what is left out.

    Args:
        folder: Where to, in `rank-<rank>.worker-<worker>.jsonl`; the worker is `main` where a rank has none.
        rank: The data rank.

    Raises:
        ValueError: If the folder cannot be made.
    """

    def __init__(self, folder: str | Path, rank: int) -> None:
        self.folder, self._rank = Path(folder).expanduser(), rank
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"quarantine={str(folder)!r}: the folder cannot be made ({error.strerror})") from None
        self._written: set[int] = set()
        self._read: dict[Path, int] = {}  # bytes of each file that are known
        self._epochs: set[tuple[str, int]] = set()

    def write(self, where: Where, reason: str) -> None:
        """Write a line, unless it is there already.

        Raises:
            ValueError: If the file cannot be written.
        """
        worker = get_worker_info()
        who = {"rank": self._rank, "worker": None if worker is None else worker.id}
        path = self.folder / f"rank-{self._rank}.worker-{'main' if worker is None else worker.id}.jsonl"
        line = json.dumps({**where._asdict(), **who, "reason": reason}).encode() + b"\n"
        try:
            self._append(path, line, where)
        except OSError as error:
            raise ValueError(
                f"quarantine={str(self.folder)!r}: {path.name} cannot be written ({error.strerror}); make room, or set "
                "on_error='skip'"
            ) from None

    def _append(self, path: Path, line: bytes, where: Where) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # processes that share a rank share its file
            self._learn(path, (where.source, where.epoch))
            if where.key in self._written:
                return
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line  # whoever wrote last was killed
            os.write(descriptor, line)
            self._written.add(where.key)
            self._read[path] = size + len(line)
        finally:
            os.close(descriptor)

    def _learn(self, mine: Path, epoch: tuple[str, int]) -> None:
        """Read what has been written since: to this file, and, once an epoch of a source, to those of others."""
        files = [mine]
        if epoch not in self._epochs:
            self._epochs.add(epoch)
            found = [path for path in self.folder.iterdir() if path.suffix == ".jsonl"]
            files = found if len(found) <= _MANY_FILES else files
        for path in files:
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                lines = file.read()
            end = lines.rfind(b"\n") + 1  # the rest is being written
            self._read[path] = self._read.get(path, 0) + end
            for line in lines[:end].splitlines():
                if len(self._written) < KNOWN:
                    self._note(line)

    def _note(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
            self._written.add(_key(entry["source"], entry["file"], entry["start"], entry["ref"]))
        except (ValueError, KeyError, TypeError):  # cut by a kill, or somebody else's
            return

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_written": set(), "_read": {}, "_epochs": set()}  # hashes differ between processes
