"""SIGKILL of this process right before one of its file operations below a folder.

An audit hook sees each `open` for writing, `mkdir`, `rename`, `remove`, `rmdir` before it happens; `fsync`, which has no
audit event, is wrapped. Hooks cannot be removed, so this is for processes that a test has forked.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


class CrashPoints:
    """Counts operations below `folder`, and kills the process before number `fatal`.

    Args:
        folder: Operations elsewhere do not count.
        fatal: Which operation is not made; -1 for none.
    """

    def __init__(self, folder: Path, fatal: int = -1) -> None:
        self.folder, self.fatal, self.count = str(folder), fatal, 0
        self.seen: list[str] = []
        fsync = os.fsync

        def counted(descriptor: int) -> None:
            self._event(f"fsync {os.readlink(f'/proc/self/fd/{descriptor}')}")
            fsync(descriptor)

        os.fsync = counted  # type: ignore[assignment]
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in _EVENTS:
            return
        if event == "open" and not (
            set(str(args[1] or "")) & set("wax+") or (args[2] or 0) & (os.O_WRONLY | os.O_RDWR)
        ):
            return  # reading harms nothing
        paths = [os.fspath(a) for a in args[:2] if isinstance(a, str | os.PathLike)]
        self._event(f"{event} {paths[0] if paths else ''}", paths)

    def _event(self, what: str, paths: list[str] | None = None) -> None:
        concerned = paths if paths is not None else [what.split(" ", 1)[1]]
        if not any(path.startswith(self.folder) for path in concerned):
            return
        if self.count == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1
        self.seen.append(what)


def with_crash(function: Callable[..., None], folder: Path, rank: int, fatal: int, note: Path, *args: Any) -> None:
    """Call `function(*args)`; the given rank dies before its operation `fatal`, the others leave how many they made."""
    own = int(os.environ["RANK"])
    points = CrashPoints(folder, fatal if own == rank else -1)
    try:
        function(*args)
    finally:
        note.with_name(f"{note.name}.{own}").write_text("\n".join(points.seen))
