"""`fms-supervise`: keeps a run going on the devices that are left, with nobody at the keyboard.

    fms-supervise --nproc 1:4 -- experiment=llama_1b ...

Training dies of things that a training process cannot mend in itself: a rank that the kernel killed, a GPU that fell off the
bus, a collective that hung. So the supervisor is a program of its own, which loads none of what can fail: it starts
`fms-train` in a fresh process group, and when that ends with an error, it looks how many devices there are now, starts
another one there with `resume=auto`, and so on until the run has ended. It gives up where trying again is no use: a mistake in the
config, too many restarts in too short a time, no new checkpoint in several attempts.

Why no option of `fms-train`: what supervises must not share an interpreter, an import or a rendezvous with what it
supervises. Why not `torchrun --max-restarts`: it restarts on as many ranks as before, and keeps its rendezvous.
"""

import argparse
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from lightning_fms.launch.devices import visible_gpus
from lightning_fms.launch.process_group import RUN_FILE, Outcome, ProcessGroup, Signals
from lightning_fms.launch.words import override_of

PROGRAM = "fms-supervise"
MISTAKE = 2  # The exit code of a mistake in the config, and of `argparse`.
_LOOK_EVERY_S = 5.0
_LONGEST_PAUSE_S = 60.0
_STEP = re.compile(r"step[-=](\d+)")


@dataclass
class Patience:
    """When trying again is no use any more.

    Args:
        restarts: how many in `within_s` are too many from the next one on.
        within_s: seconds.
        stuck: attempts in a row without a new checkpoint.
    """

    restarts: int = 10
    within_s: float = 3600.0
    stuck: int = 3
    _at: list[float] = field(default_factory=list)
    _reached: int = -1
    _without: int = 0

    def give_up(self, outcome: Outcome, step: int, now: float, trained: bool = True) -> str | None:
        """Why not to try again after a failure; `None` to try.

        Args:
            outcome: of the attempt.
            step: of the newest checkpoint, -1 if there is none.
            now: seconds.
            trained: whether any attempt came as far as a first step. A config that has trained is right; what looks like a
                mistake in it afterwards may be a file system that is away.
        """
        if outcome.code == MISTAKE and not trained:
            return "a mistake in the config stays one"
        self._without = self._without + 1 if step <= self._reached else 0
        self._reached = max(self._reached, step)
        where = f"step {step}" if step >= 0 else "the start"
        if self._without >= self.stuck:
            return f"failed {self._without} times in a row from {where} on without a new checkpoint"
        self._at = [*(at for at in self._at if now - at < self.within_s), now]
        if len(self._at) > self.restarts:
            return f"more than {self.restarts} restarts in {self.within_s:g} s"
        return None

    @property
    def pause_s(self) -> float:
        """How long to wait before trying again: longer the longer nothing has moved."""
        return min(_LONGEST_PAUSE_S, 2.0**self._without - 1)


@dataclass(frozen=True)
class Processes:
    """How many to start: as many as there are devices for, within limits, or what a plan says.

    Args:
        least: fewer are waited for.
        most: more are not used.
        plan: the numbers of the first attempts instead, the last one also of those that follow.
        devices: file that says how many devices there are, or which: `3`, or `0,2,3`. `None` = the GPUs that can be seen.
    """

    least: int
    most: int
    plan: tuple[int, ...] = ()
    devices: Path | None = None

    def take(self, attempt: int) -> tuple[int, dict[str, str]] | None:
        """How many in an attempt, and the environment in which they see their devices; `None` if there are too few."""
        if self.plan:
            return self.plan[min(attempt, len(self.plan) - 1)], {}
        names = visible_gpus()
        if self.devices is not None:
            names = _listed(self.devices, names)
        elif not names:
            return self.most, {}
        taken = names[: self.most]
        return (len(taken), {"CUDA_VISIBLE_DEVICES": ",".join(taken)}) if len(names) >= self.least else None


def _listed(file: Path, visible: list[str]) -> list[str]:
    """The devices that a file lists, or as many as it says."""
    text = file.read_text().strip()
    if re.fullmatch(r"[\w-]+(\s*,\s*[\w-]+)*,?", text) and not text.isdecimal():
        return [name.strip() for name in text.split(",") if name.strip()]
    if not text.isdecimal():
        raise ValueError(f"--devices {file}: holds {text!r}; write how many devices there are, or which, as in 0,2,3")
    return (visible or list(map(str, range(int(text)))))[: int(text)]


def processes(text: str) -> Processes:
    """What `--nproc` says: `4`, `1:4`, or the plan `4,2,3`."""
    numbers = [int(part) for part in re.split(r"[:,]", text)] if re.fullmatch(r"\d+([:,]\d+)*", text) else []
    is_plan = "," in text and ":" not in text
    if not numbers or min(numbers) < 1 or (not is_plan and (len(numbers) > 2 or numbers[0] > numbers[-1])):
        raise argparse.ArgumentTypeError(
            f"{text!r}: give a number as 4, a range as 1:4, or one for each attempt as 4,2,3"
        )
    return Processes(min(numbers), max(numbers), tuple(numbers) if is_plan else ())


class Supervisor:
    """Runs a command again and again until it succeeds, or there is no use.

    Args:
        overrides: of `fms-train`.
        world: how many processes.
        patience: when to give up.
        logs: folder for what ranks other than the first write.
        program: what takes the overrides.
        grace_s: seconds that ranks have to save and end after a signal.
        say: what is told to the user.
    """

    def __init__(
        self, overrides: Sequence[str], world: Processes, patience: Patience, logs: Path, program: Sequence[str],
        grace_s: float, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.overrides, self.world, self.patience = list(overrides), world, patience
        self.logs, self.program, self.grace_s, self.say = logs, list(program), grace_s, say
        self.attempt = 0

    def run(self) -> int:
        """The exit code: 0, that of the last failure, or that of the ranks after a signal to us."""
        with Signals() as signals:
            while True:
                taken = self._wait_for_devices(signals)
                if taken is None:
                    return 128 + signals.received[0]
                outcome = self._once(*taken, signals)
                if outcome.code == 0:
                    return 0
                if signals.received:
                    self.say(f"stopped by {signal.Signals(signals.received[0]).name}{self._how_to_go_on()}")
                    return outcome.code
                self.say(f"{outcome}{_told(outcome)}")
                step, trained = newest_step(self._run_folder()), self._has_trained()
                if (why := self.patience.give_up(outcome, step, time.monotonic(), trained)) is not None:
                    self.say(f"given up: {why}{self._how_to_go_on()}")
                    return outcome.code
                self._pause(signals, self.patience.pause_s)
                self.attempt += 1

    def _wait_for_devices(self, signals: Signals) -> tuple[int, dict[str, str]] | None:
        told = False
        while not signals.received:
            if (taken := self.world.take(self.attempt)) is not None:
                return taken
            if not told:
                self.say(f"waiting for at least {self.world.least} devices")
                told = True
            self._pause(signals, _LOOK_EVERY_S)
        return None

    def _once(self, ranks: int, environment: dict[str, str], signals: Signals) -> Outcome:
        command = [*self.program, *self._words(ranks)]
        environment = environment | {RUN_FILE: str(self._run_file())}
        self.say(f"attempt {self.attempt + 1} on {ranks} process{'es' if ranks > 1 else ''}")
        logs = self.logs / f"attempt-{self.attempt + 1}"
        with ProcessGroup(
            command, ranks, logs, environment=environment, restart=self.attempt, grace_s=self.grace_s
        ) as group:
            while (outcome := group.poll()) is None:
                signals.pass_on([group])
                time.sleep(0.05)
        return outcome

    def _words(self, devices: int) -> list[str]:
        """The command line of an attempt: as given, in the folder of the one before, and from its checkpoint if it has trained."""
        kept = [word for word in self.overrides if not word.startswith("trainer.devices=")]
        folder = self._run_folder()
        if folder is not None:
            kept = [word for word in kept if not word.startswith("paths.run=")] + [override_of("paths.run", folder)]
        if self._has_trained():
            kept = [word for word in kept if not word.startswith("resume=")] + ["resume=auto"]
        return [*kept, f"trainer.devices={devices}"]

    def _run_file(self) -> Path:
        return self.logs / "run.json"

    def _run_folder(self) -> Path | None:
        try:
            return Path(json.loads(self._run_file().read_text())["run"])
        except FileNotFoundError:
            return None

    def _has_trained(self) -> bool:
        folder = self._run_folder()
        return folder is not None and (folder / "run.yaml").is_file()

    def _how_to_go_on(self) -> str:
        folder = self._run_folder()
        if folder is None or not self._has_trained():
            return ""
        return f"; go on with: {PROGRAM} ... -- resume=auto {override_of('paths.run', folder)}"

    def _pause(self, signals: Signals, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not signals.received:
            time.sleep(0.05)


def newest_step(run: Path | None) -> int:
    """The step of the newest complete checkpoint of a run, by its name or by what attempts say; -1 if there is none.

    Checkpoints on an object store are known by the records alone: to look there, what can fail would have to be loaded.
    """
    if run is None:
        return -1
    seals, files = run.glob("checkpoints/*/COMMIT"), run.glob("checkpoints/*.ckpt")
    names = [seal.parent.name for seal in seals] + [file.name for file in files if file.is_file()]
    named = [int(found[1]) for name in names if (found := _STEP.search(name))]
    return max([*named, *map(_committed_step, run.glob("attempts/*.json"))], default=-1)


def _committed_step(record: Path) -> int:
    try:
        return int(json.loads(record.read_text())["last_committed_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1


def _told(outcome: Outcome) -> str:
    return "".join(f"\n    {line}" for line in outcome.lines)


def _say(text: str) -> None:
    print(f"{PROGRAM}: {text}", file=sys.stderr, flush=True)


_OPTIONS: tuple[tuple[str, Any, Any, str, str], ...] = (
    ("--devices", Path, None, "FILE", "file with how many devices there are, or which (0,2,3), read at each start"),
    ("--restarts", int, 10, "N", "give up after more in --within (10)"),
    ("--within", float, 3600.0, "S", "seconds that --restarts counts (3600)"),
    ("--stuck", int, 3, "N", "give up after so many attempts in a row without a new checkpoint (3)"),
    (
        "--grace",
        float,
        150.0,
        "S",
        "seconds for ranks to save and end after a signal (150; the callback resilience takes 120)",
    ),
    ("--logs", Path, None, "DIR", "what ranks other than the first write (runs/supervised/<time>)"),
)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    own = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} --nproc N [options] -- <what fms-train takes>",
        description="Train, and after a failure go on with the devices that are left, from the newest checkpoint.",
    )
    own.add_argument(
        "--nproc",
        type=processes,
        required=True,
        metavar="N",
        help="processes: 4, 1:4, or one number for each attempt: 4,2,3",
    )
    for name, kind, default, metavar, text in _OPTIONS:
        own.add_argument(name, type=kind, default=default, metavar=metavar, help=text)
    own.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="of fms-train, behind --")
    return own


def main(words: Sequence[str] | None = None) -> NoReturn:
    """The console script."""
    given = parser().parse_args(words)
    world = replace(given.nproc, devices=given.devices)
    logs = given.logs or Path("runs", "supervised", datetime.now(UTC).strftime("%Y-%m-%d_%H-%M-%S"))
    logs.mkdir(parents=True, exist_ok=True)
    program = [sys.executable, "-m", "lightning_fms.train"]
    patience = Patience(given.restarts, given.within, given.stuck)
    try:
        code = Supervisor(given.overrides, world, patience, logs, program, given.grace, _say).run()
    except (OSError, ValueError) as error:
        _say(f"error: {error}")
        code = MISTAKE
    sys.exit(code)


if __name__ == "__main__":
    main()
