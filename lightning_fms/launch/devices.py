"""Which devices there are, asked anew each time: a GPU that has failed is gone from the list of the next process that looks."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_COUNT = "import torch; print(torch.cuda.device_count())"
# An import of torch from a cold file system takes a minute at worst; a driver that hangs never answers.
_COUNT_S = 120.0
_KILLED_S = 5.0


def visible_gpus() -> list[str]:
    """What to put into CUDA_VISIBLE_DEVICES for each GPU that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "" or (not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/kfd").exists()):
        return []
    count = count_gpus()
    names = [name.strip() for name in visible.split(",")] if visible is not None else list(map(str, range(count)))
    return names[:count]


def count_gpus() -> int:
    """How many GPUs a new process sees; 0 if it fails, or has no answer in two minutes, which is said."""
    counting = subprocess.Popen(
        [sys.executable, "-c", _COUNT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        said, _ = counting.communicate(timeout=_COUNT_S)
    except subprocess.TimeoutExpired:
        print(
            f"GPUs could not be counted in {_COUNT_S:g} s: going on as if there were none", file=sys.stderr, flush=True
        )
        counting.kill()
        with suppress(subprocess.TimeoutExpired):  # `subprocess.run` waits for ever for what a driver holds.
            counting.communicate(timeout=_KILLED_S)
        return 0
    return int(said.strip() or 0) if counting.returncode == 0 else 0


def devices_of(asked: object, there: int) -> int | list[int]:
    """What `trainer.devices` means: a number of devices, or these.

    Args:
        asked: a number, a list of indices, both also as a text, or `auto`.
        there: how many there are; 0 where all is done on a CPU.

    Raises:
        ValueError: for anything else.
    """
    text = str(asked).strip()
    if text in ("auto", "-1", "None"):
        return max(1, there)
    indices = re.fullmatch(r"\[?\s*(\d+(?:\s*,\s*\d+)*)\s*,?\s*\]?", text)
    if indices and (not isinstance(asked, str) or "," in text) and not isinstance(asked, int):
        return [int(index) for index in indices[1].split(",")]
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise ValueError(f"trainer.devices={asked}: give a number of devices, a list of their indices, or auto")


class Pool:
    """Devices that jobs take and give back.

    Args:
        names: of the devices, none for a CPU, which all jobs share.
        jobs: how many may run at once. `None` = as many as there are devices for; one on a CPU.
    """

    def __init__(self, names: Sequence[str], jobs: int | None) -> None:
        if jobs is not None and jobs < 1:
            raise ValueError(
                f"hydra.launcher.jobs={jobs}: give at least 1, or null for as many as there are devices for"
            )
        self.names = list(names)
        self.most = jobs or max(1, len(self.names))
        self._taken: list[list[int]] = []

    def take(self, wanted: int | list[int]) -> list[int] | None:
        """Indices of devices that nobody has, `None` if the job has to wait; on a CPU always an empty list."""
        if len(self._taken) >= self.most:
            return None
        if not self.names:
            found: list[int] = []
        else:
            free = [index for index in range(len(self.names)) if not any(index in taken for taken in self._taken)]
            if isinstance(wanted, list):
                found = wanted if set(wanted) <= set(free) else []
            else:
                found = free[:wanted] if len(free) >= wanted else []
            if not found:
                return None
        self._taken.append(found)
        return found

    def fits(self, wanted: int | list[int]) -> bool:
        """Whether a job can ever get what it wants."""
        return not self.names or (
            max(wanted) < len(self.names) if isinstance(wanted, list) else wanted <= len(self.names)
        )

    def give_back(self, devices: list[int]) -> None:
        """Let others have them."""
        self._taken.remove(devices)

    def visible(self, devices: list[int]) -> dict[str, str]:
        """The environment in which a job sees these devices only."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.names[index] for index in devices)} if devices else {}
