"""One decision for all processes, whoever starts them."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from app_runs import clean_environment, start

from lightning_fms.config_check import ConfigError
from lightning_fms.ranks import agree, is_child
from tests.worlds import free_port, run_world

# Lines of several processes in one pipe can run into each other, unless each is one write.
ASK = """
import os, sys
from lightning_fms.ranks import agree
def decide():
    return {"decided by": os.environ.get("RANK") or os.environ.get("SLURM_PROCID")}
heard = agree("first", decide), agree("second", lambda: [1, None])
os.write(1, f"heard {heard[0]} {heard[1]}\\n".encode())
"""

ATTEMPT = """
import os, sys, time
from pathlib import Path
from lightning_fms.ranks import agree
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
heard = agree("first", lambda: attempt)
os.write(1, f"attempt {attempt} heard {heard}\\n".encode())
if attempt == "0":
    Path(f"said.{os.environ['RANK']}").touch()
    for _ in range(600):  # the other one has to have its say before torchrun ends it
        if all(Path(f"said.{rank}").exists() for rank in (0, 1)):
            break
        time.sleep(0.1)
    sys.exit(1)
"""

TWO_TASKS = {
    "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "12",
    "SLURM_NODELIST": "localhost", "SLURM_NODEID": "0", "MASTER_ADDR": "127.0.0.1",
}  # fmt: skip


def test_a_child_of_lightnings_launcher_inherits_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)
    monkeypatch.setenv("LIGHTNING_FMS_FOLDER", "left by a former run")
    assert agree("folder", lambda: "runs/a/001") == "runs/a/001"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert is_child()
    monkeypatch.delenv("LIGHTNING_FMS_RESUME", raising=False)
    with pytest.raises(ConfigError, match="LOCAL_RANK=1: no other process of this run started this one"):
        agree("resume", lambda: None)

    def never() -> None:
        raise AssertionError

    assert agree("folder", never) == "runs/a/001"


def test_torchruns_ranks_hear_the_first(tmp_path: Path) -> None:
    script = tmp_path / "ask.py"
    script.write_text(ASK)
    done = start(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("heard {'decided by': '0'} [1, None]") == 3


def test_a_restarted_rank_hears_its_own_attempt(tmp_path: Path) -> None:
    script = tmp_path / "attempt.py"
    script.write_text(ATTEMPT)
    # With a port of its own torchrun keeps one store for all attempts.
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", "--max-restarts=1")
    done = start(tmp_path, *torchrun, str(script))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["attempt 0 heard 0"] * 2 + ["attempt 1 heard 1"] * 2


def test_a_rank_that_waits_for_others_says_so_and_names_srun() -> None:
    alone = clean_environment() | TWO_TASKS
    alone |= {"MASTER_PORT": str(free_port()), "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    script = f"from lightning_fms import ranks; ranks.SILENT_SECONDS = 0.1\n{ASK}"
    waits = subprocess.Popen([sys.executable, "-c", script], env=alone, stderr=subprocess.PIPE, text=True)
    try:
        assert waits.stderr is not None
        line = waits.stderr.readline()
    finally:
        waits.kill()
        waits.communicate()
    assert "waiting for 2 processes at 127.0.0.1" in line
    assert "srun" in line


def as_slurms_rank(folder: Path, port: int, refuse: bool) -> tuple[Any, ...]:
    """What a task of srun's hears, or how it ends."""
    rank = os.environ["RANK"]
    for name in set(os.environ) - set(clean_environment()):
        del os.environ[name]
    os.environ |= {**TWO_TASKS, "MASTER_PORT": str(port), "SLURM_PROCID": rank, "SLURM_LOCALID": rank}

    def decide() -> dict[str, str]:
        if refuse:
            raise ValueError("refused")
        return {"decided by": os.environ["SLURM_PROCID"]}

    try:
        heard: tuple[Any, ...] = agree("first", decide), agree("second", lambda: [1, None])
    except (ValueError, SystemExit) as error:
        heard = type(error), *error.args
    (folder / rank).touch()
    end = time.monotonic() + 60
    while not (folder / "1").exists() and time.monotonic() < end:  # the store ends with rank 0
        time.sleep(0.01)
    return heard


@pytest.mark.parametrize("refuse", [False, True])
def test_slurms_ranks_hear_the_first_also_that_it_failed(refuse: bool, tmp_path: Path) -> None:
    heard = run_world(as_slurms_rank, 2, tmp_path, free_port(), refuse)
    if refuse:
        assert heard == [(ValueError, "refused"), (SystemExit, 2)]
    else:
        assert heard == [({"decided by": "0"}, [1, None])] * 2
