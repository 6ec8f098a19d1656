"""One decision for all processes, whoever starts them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from app_runs import clean_environment, start

from lightning_fms.config_check import ConfigError
from lightning_fms.ranks import agree, is_child
from tests.worlds import free_port

# Lines of several processes in one pipe can run into each other, unless each is one write.
ASK = """
import os, sys
from lightning_fms.ranks import agree
def decide():
    if os.environ.get("REFUSE"):
        raise ValueError("refused")
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
    alone = clean_environment() | {
        "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "12",
        "SLURM_NODELIST": "localhost", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
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


@pytest.mark.parametrize("refuse", [False, True])
def test_slurms_ranks_hear_the_first_also_that_it_failed(refuse: bool) -> None:
    shared = clean_environment() | {
        "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "12",
        "SLURM_NODELIST": "localhost",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    shared |= {"REFUSE": "1"} if refuse else {}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ASK],
            env=shared | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    heard = [rank.communicate(timeout=120) for rank in ranks]
    if refuse:
        assert [rank.returncode for rank in ranks] == [1, 2]
        assert heard[1] == ("", "")
    else:
        assert [out for out, _ in heard] == ["heard {'decided by': '0'} [1, None]\n"] * 2, heard
