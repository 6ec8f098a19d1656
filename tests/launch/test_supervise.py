"""The supervisor: it goes on with what is left, gives up where that is no use, and ends with everything that it started."""

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launched import assert_gone, wait_for

from lightning_fms.launch.process_group import Outcome
from lightning_fms.supervise import MISTAKE, Patience, Processes, Supervisor, newest_step, processes

FAILED = Outcome(1, 0)

# Notes its world and words; then does what the file `do` says of this attempt: fail, move on by a checkpoint, kill a rank, ...
PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
rank, restart = os.environ.get("RANK", "0"), int(os.environ["LIGHTNING_FMS_RESTART"])
world, devices = os.environ.get("WORLD_SIZE", "1"), os.environ.get("CUDA_VISIBLE_DEVICES", "-")
note = f"{restart} {rank}/{world} {devices} {' '.join(sys.argv[1:])}"
Path(f"attempt.{restart}.{rank}.aside").write_text(f"{os.getpid()} {note}")
os.replace(f"attempt.{restart}.{rank}.aside", f"attempt.{restart}.{rank}")
if rank == "0":
    Path("my run").mkdir(exist_ok=True)
    Path(os.environ["LIGHTNING_FMS_RUN_FILE"]).write_text(json.dumps({"run": "my run"}))
steps = Path("do").read_text().split(",")
do = steps[min(restart, len(steps) - 1)]
if "train" in do and rank == "0":
    Path("my run/run.yaml").touch()
    folder = Path(f"my run/checkpoints/step-{restart + 1}")
    folder.mkdir(parents=True)
    (folder / "COMMIT").touch()
if "wait" in do:
    while True: time.sleep(600)
if "lose" in do:
    Path("devices").write_text(do[-1])
if "kill" in do:
    if rank == "1": os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
sys.exit({"f": 1, "m": 2}.get(do[0], 0))
"""


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    Path("program.py").write_text(PROGRAM)


def supervise(do: str, world: Processes, *words: str, patience: Patience | None = None) -> tuple[int, list[str]]:
    Path("do").write_text(do)
    said: list[str] = []
    program = [sys.executable, "program.py"]
    runner = Supervisor(words, world, patience or Patience(), Path("logs"), program, grace_s=60.0, say=said.append)
    return runner.run(), said


def note(attempt: int, rank: int = 0) -> str:
    return Path(f"attempt.{attempt}.{rank}").read_text().partition(" ")[2]


def test_it_goes_on_with_the_devices_that_are_left() -> None:
    Path("devices").write_text("4")
    world = Processes(1, 4, devices=Path("devices"))
    code, said = supervise(
        "train lose kill 2,train lose kill 3,train", world, "experiment=x", "resume=old.ckpt", "trainer.devices=8"
    )
    assert code == 0
    assert [line.partition(" on ")[2] for line in said if line.startswith("attempt")] == [
        "4 processes", "2 processes", "3 processes"
    ]  # fmt: skip
    assert said.count("rank 1 was ended by SIGKILL") == 2
    assert note(0, 3) == "0 3/4 0,1,2,3 experiment=x resume=old.ckpt trainer.devices=4"
    assert note(1, 1) == "1 1/2 0,1 experiment=x paths.run='my run' resume=auto trainer.devices=2"
    assert note(2, 2).startswith("2 2/3 0,1,2 experiment=x")
    assert not Path("attempt.2.3").exists()


def test_an_attempt_that_trained_nothing_is_repeated_as_it_was_given() -> None:
    code, said = supervise("f,good", Processes(1, 1, (1,)), "resume=old.ckpt")
    assert code == 0
    assert note(1) == "1 0/1 - resume=old.ckpt paths.run='my run' trainer.devices=1"
    assert said[1] == "rank 0 failed with exit code 1"


@pytest.mark.parametrize(
    ("do", "code", "attempts", "why"),
    [
        ("f", 1, 3, "failed 3 times in a row from the start on without a new checkpoint"),
        ("ftrain,f", 1, 4, "failed 3 times in a row from step 1 on without a new checkpoint"),
        ("m", MISTAKE, 1, "a mistake in the config stays one"),
    ],
)
def test_it_gives_up_where_trying_again_is_no_use(do: str, code: int, attempts: int, why: str) -> None:
    ended, said = supervise(do, Processes(1, 1, (1,)))
    assert ended == code
    assert len(list(Path().glob("attempt.*.0"))) == attempts
    hint = "; go on with: fms-supervise ... -- resume=auto paths.run='my run'" if "train" in do else ""
    assert said[-1] == f"given up: {why}{hint}"


def test_what_looks_like_a_mistake_after_training_is_tried_again() -> None:
    code, said = supervise("mtrain,good", Processes(1, 1, (1,)))
    assert (code, said[1]) == (0, "rank 0 failed with exit code 2")


def test_the_last_lines_of_a_rank_that_nobody_sees_are_told() -> None:
    reason = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('the reason')\ntime.sleep(600)"
    Path("program.py").write_text(reason)
    _, said = supervise("", Processes(2, 2, (2,)), patience=Patience(stuck=1))
    assert said[1] == "rank 1 failed with exit code 1\n    the reason"


def test_restarts_are_bounded_in_a_window_of_time() -> None:
    patience = Patience(restarts=2, within_s=100)
    assert [patience.give_up(FAILED, step, now=float(step)) for step in (1, 2)] == [None, None]
    assert patience.give_up(FAILED, 150, now=150.0) is None
    assert patience.give_up(FAILED, 151, now=151.0) is None
    assert patience.give_up(FAILED, 152, now=152.0) == "more than 2 restarts in 100 s"


def test_it_waits_the_longer_the_longer_nothing_moves() -> None:
    patience, waited = Patience(stuck=99), []
    for step in (3, 3, 3, 3, 7, 7):
        patience.give_up(FAILED, step, now=0.0)
        waited.append(patience.pause_s)
    assert waited == [0, 1, 3, 7, 0, 1]
    for _ in range(9):
        patience.give_up(FAILED, 7, now=0.0)
    assert patience.pause_s == 60


@pytest.mark.parametrize(
    ("text", "means"), [("4", Processes(4, 4)), ("1:4", Processes(1, 4)), ("4,2,3", Processes(2, 4, (4, 2, 3)))]
)
def test_what_nproc_says(text: str, means: Processes) -> None:
    assert processes(text) == means


@pytest.mark.parametrize("text", ["", "0", "4:1", "1:2:3", "a", "1:", "-1", "2,0"])
def test_what_nproc_cannot_be(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="give a number as 4, a range as 1:4"):
        processes(text)


def test_a_file_says_which_devices_there_are() -> None:
    world = Processes(2, 3, devices=Path("devices"))
    for text, taken in (
        ("0,2,5,7", (3, "0,2,5")),
        ("2", (2, "0,1")),
        ("1", None),
        ("GPU-a, GPU-b", (2, "GPU-a,GPU-b")),
    ):
        Path("devices").write_text(text + "\n")
        assert world.take(0) == (taken and (taken[0], {"CUDA_VISIBLE_DEVICES": taken[1]}))
    Path("devices").write_text("many, or few")
    with pytest.raises(ValueError, match="write how many devices there are, or which"):
        world.take(0)
    assert [Processes(1, 4, (4, 2)).take(attempt) for attempt in range(3)] == [(4, {}), (2, {}), (2, {})]


def test_only_complete_checkpoints_count_as_progress(tmp_path: Path) -> None:
    assert newest_step(None) == newest_step(tmp_path) == -1
    for step, file in ((3, "COMMIT"), (9, "being written")):
        (tmp_path / f"checkpoints/step-{step}").mkdir(parents=True)
        (tmp_path / f"checkpoints/step-{step}/{file}").touch()
    assert newest_step(tmp_path) == 3
    (tmp_path / "checkpoints/step-5.ckpt").touch()
    assert newest_step(tmp_path) == 5
    (tmp_path / "attempts").mkdir()
    # Checkpoints on an object store are known by the records.
    (tmp_path / "attempts" / "1.json").write_text('{"last_committed_step": 7}')
    (tmp_path / "attempts" / "2.json").write_text("{torn")
    assert newest_step(tmp_path) == 7


START = """
import sys
from pathlib import Path
from lightning_fms.supervise import Patience, Processes, Supervisor
world = Processes(2, 2, devices=Path("devices"))
say = lambda text: print(text, flush=True)
sys.exit(Supervisor([], world, Patience(), Path("logs"), [sys.executable, "program.py"], 1.0, say).run())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it_with_all_ranks_and_starts_none_again(number: int) -> None:
    Path("do").write_text("train wait")
    Path("devices").write_text("2")
    running = subprocess.Popen(
        [sys.executable, "-c", START], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    ranks = [int(wait_for(Path(f"attempt.0.{rank}")).split()[0]) for rank in range(2)]
    wait_for(Path("my run/run.yaml"))
    running.send_signal(number)
    out, _ = running.communicate(timeout=120)
    assert_gone(ranks)
    assert not Path("attempt.1.0").exists()
    assert running.returncode != 0
    if number != signal.SIGKILL:
        assert f"stopped by {signal.Signals(number).name}; go on with: fms-supervise ... -- resume=auto" in out


def test_it_waits_for_devices_and_can_be_stopped_meanwhile() -> None:
    Path("devices").write_text("1")
    running = subprocess.Popen([sys.executable, "-c", START], stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    assert running.stdout.readline() == "waiting for at least 2 devices\n"
    time.sleep(0.1)
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=120)
    assert running.returncode == 128 + signal.SIGTERM


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    wrong = subprocess.run(
        [sys.executable, "-m", "lightning_fms.supervise", "--nproc", "1:2", "--devices", "none", "--", "experiment=x"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert wrong.returncode == MISTAKE
    assert wrong.stderr == "fms-supervise: error: [Errno 2] No such file or directory: 'none'\n"
