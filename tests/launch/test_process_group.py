"""A group of processes: what its ranks see, how it ends, and that nothing of it is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launched import RANK, assert_gone, pids, wait_for

from lightning_fms.launch import guard, process_group
from lightning_fms.launch.process_group import ProcessGroup, last_lines


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def group(script: str, ranks: int, **options: float | bool | int) -> ProcessGroup:
    return ProcessGroup([sys.executable, "-c", script], ranks, Path("logs/job"), **{"terminal": False, **options})


SPEAK = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = torch.tensor(dist.get_rank())
dist.all_reduce(rank)
print(int(rank), dist.is_torchelastic_launched(), *(os.environ[n] for n in ("TORCHELASTIC_RESTART_COUNT", "LOCAL_WORLD_SIZE")))
dist.destroy_process_group()  # else gloo's threads may still run when the interpreter is gone, and abort it
"""


def test_ranks_find_each_other_as_under_torchrun(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "7")  # Of whoever started us.
    assert group(SPEAK, 3, restart=2).wait().code == 0
    logs = [Path("logs/job.log"), Path("logs/job.rank-1.log"), Path("logs/job.rank-2.log")]
    assert [last_lines(log)[-1] for log in logs] == ["3 True 2 3"] * 3


def test_one_process_runs_as_if_typed(monkeypatch) -> None:
    for name in ("RANK", "SLURM_NTASKS"):
        monkeypatch.setenv(name, "3")
    seen = "import os; print(sorted(set(os.environ) & {'RANK', 'SLURM_NTASKS', 'MASTER_PORT', 'TORCHELASTIC_RUN_ID'}))"
    assert group(seen, 1).wait().code == 0
    assert Path("logs/job.log").read_text() == "[]\n"


def test_groups_at_once_have_ports_of_their_own() -> None:
    with group("import time; time.sleep(600)", 2) as one, group("import time; time.sleep(600)", 2) as other:
        assert one._port.getsockname()[1] != other._port.getsockname()[1]


FAILS = """
if rank == "1":
    for other in "02":
        while not os.path.exists(f"pids.{other}"): time.sleep(0.01)
    print("the reason", flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
print("deaf", flush=True)
while True: time.sleep(600)
"""


def test_the_first_failure_ends_all_ranks_also_deaf_ones_and_what_they_started() -> None:
    running = group(RANK + FAILS, 3, settle_s=0.1, grace_s=0.5)
    outcome = running.wait()
    assert (outcome.code, outcome.rank, outcome.lines) == (7, 1, ("the reason",))
    assert str(outcome) == "rank 1 failed with exit code 7"
    assert outcome.log == Path("logs/job.rank-1.log")
    assert_gone(pids(Path(), 3))


def test_a_rank_that_is_killed_is_named_and_not_the_peers_that_fail_of_it() -> None:
    waits = "\nwhile not os.path.exists('go'): time.sleep(0.01)\nsys.exit(1)"
    dies = "\nif rank == '1': os.kill(os.getpid(), signal.SIGKILL)"
    running = group(RANK + dies + waits, 3)
    pids(Path(), 3)
    while running.first is None:
        assert running.poll() is None
    Path("go").touch()
    outcome = running.wait()
    assert (outcome.code, outcome.rank, outcome.signal) == (137, 1, signal.SIGKILL)
    assert str(outcome) == "rank 1 was ended by SIGKILL"
    assert_gone(pids(Path(), 3))


def test_what_a_rank_started_ends_with_it_although_the_rank_was_good() -> None:
    assert group(RANK, 2).wait().code == 0
    assert_gone(pids(Path(), 2))


def test_a_command_that_is_not_there() -> None:
    outcome = ProcessGroup(["no-such-command"], 2, Path("logs/job"), terminal=False).wait()
    assert outcome.code == 127
    assert outcome.lines == ("no-such-command: No such file or directory",)


LAUNCHER = """
import sys, time
from pathlib import Path
from lightning_fms.launch.process_group import ProcessGroup, Signals
with Signals() as signals, ProcessGroup([sys.executable, "-c", sys.argv[1]], 2, Path("logs/job"), grace_s=float(sys.argv[2])) as group:
    while (outcome := group.poll()) is None:
        signals.pass_on([group])
        time.sleep(0.02)
sys.exit(outcome.code)
"""  # noqa: E501
WAITS = "\nwhile True: time.sleep(600)"
NOTES = (
    "\ndef note(number, _):\n    open(f'signal.{rank}', 'w').write(str(number))\n    if DIES: sys.exit(number)"
    "\nfor number in (2, 15, 10): signal.signal(number, note)\nopen(f'ready.{rank}', 'w')"
)


def launched(script: str, grace: float) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", LAUNCHER, script, str(grace)], start_new_session=True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_nothing_outlives_a_launcher_that_dies(number: int) -> None:
    launcher = launched(RANK + WAITS, 600)
    numbers = pids(Path(), 2)
    # Its whole process group, as a scheduler does.
    os.killpg(launcher.pid, number)
    assert launcher.wait() == -number
    assert_gone(numbers)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_every_rank_and_its_exit_code_comes_back(number: int) -> None:
    launcher = launched(RANK + "DIES = True" + NOTES + WAITS, 600)
    numbers = pids(Path(), 2)
    for rank in range(2):
        wait_for(Path(f"ready.{rank}"))
    os.killpg(launcher.pid, number)
    assert launcher.wait() == number
    assert [Path(f"signal.{rank}").read_text() for rank in range(2)] == [str(int(number))] * 2
    assert_gone(numbers)


@pytest.mark.parametrize("twice", [True, False])
def test_ranks_that_do_not_listen_are_killed(twice: bool) -> None:
    launcher = launched(RANK + "DIES = False" + NOTES + WAITS, 600 if twice else 0.2)
    numbers = pids(Path(), 2)
    for rank in range(2):
        wait_for(Path(f"ready.{rank}"))
    launcher.send_signal(signal.SIGINT)
    if twice:
        for rank in range(2):
            wait_for(Path(f"signal.{rank}"))
        launcher.send_signal(signal.SIGINT)
    assert launcher.wait() == 137
    assert_gone(numbers)


REQUEUES = """
def save(*_):
    if rank == "1": sys.exit(143)
    while not os.path.exists("go"): time.sleep(0.01)
    open("requeued", "w")
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
open(f"ready.{rank}", "w")
while True: time.sleep(600)
"""


def test_a_rank_that_ends_of_a_signal_passed_on_leaves_the_others_their_time(monkeypatch) -> None:
    monkeypatch.setattr(process_group, "_AFTER_FAILURE_S", 0.0)
    running = group(RANK + REQUEUES, 2, settle_s=0.0, grace_s=600)
    for rank in range(2):
        wait_for(Path(f"ready.{rank}"))
    running.send(signal.SIGTERM)
    while running.first is None:
        assert running.poll() is None
    for _ in range(3):
        assert running.poll() is None
    Path("go").touch()
    assert running.wait().code == 143
    assert Path("requeued").exists()


class Held(ProcessGroup):
    """Whose ranks the kernel does not let end."""

    def _signal(self, signum: int) -> None:
        pass


@pytest.mark.parametrize("ends", [ProcessGroup.kill, ProcessGroup.wait])
def test_what_cannot_be_killed_is_named_and_left(ends, monkeypatch, capfd) -> None:
    monkeypatch.setattr(guard, "PATIENCE_S", 0.1)
    deaf = "\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen('deaf', 'w')\nwhile True: time.sleep(600)"
    monkeypatch.setattr(process_group, "_WATCH_MORE_S", 600)
    running = Held([sys.executable, "-c", RANK + deaf], 1, Path("logs/job"), terminal=False, grace_s=0.0)
    wait_for(Path("deaf"))
    rank = running._processes[0]
    running.send(signal.SIGTERM)
    ends(running)
    told = f"process {rank.pid} has not ended of SIGKILL"
    assert running.first is not None
    assert (running.first.code, running.first.rank, running.first.lines) == (137, 0, (told,))
    assert capfd.readouterr().err == f"not ended in 0.1 s, going on without: process {rank.pid}\n"
    rank.wait()  # The watching process ends it after all.


def test_a_watching_process_that_does_not_end_is_named_and_left(monkeypatch, capfd) -> None:
    monkeypatch.setattr(guard, "PATIENCE_S", 0.1)
    monkeypatch.setattr(process_group, "_WATCH_MORE_S", 0.0)
    running = group("import time; time.sleep(600)", 1)
    os.kill(running._watch.pid, signal.SIGSTOP)
    running._signal(signal.SIGKILL)
    assert running.wait().signal == signal.SIGKILL
    assert f"going on without: process {running._watch.pid}\n" in capfd.readouterr().err
    os.kill(running._watch.pid, signal.SIGCONT)
    assert running._watch.wait() == 0
