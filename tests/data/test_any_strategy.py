"""The data under whatever runs it: Fabric, plain loops, several modules in one process, forked and spawned workers.

What Lightning's Trainer does with it under DDP, FSDP2 and on one device is in `test_trainer`.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from lightning_fms.data import RescalableDataModule, StreamLoader
from tests.data.chains import document, two_sources
from tests.data.fits import Bigram, fit, merged
from tests.data.test_trainer import pytestmark  # noqa: F401
from tests.worlds import run_world

TREE = Path(__file__).parents[2]
STEPS = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("corpus")
    return {
        "sources": two_sources(root),
        "seq_len": 24,
        "global_batch_size": 6,
    }


def fabric_run(data: dict) -> tuple[list[list[int]], np.ndarray]:
    """Train by a loop under Fabric; return the rank's rows, and the weights in the end."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    strategy = lightning.fabric.strategies.DDPStrategy(process_group_backend="gloo") if world > 1 else "auto"
    fabric = lightning.Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    model = Bigram()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.mark_forward_method("loss")
    loader = StreamLoader(**data, rank=fabric.global_rank, world_size=fabric.world_size)
    rows = []
    for batch, _ in zip(loader, range(STEPS), strict=False):
        rows += batch["input_ids"].tolist()
        fabric.backward(model.loss(batch))
        optimizer.step()
        optimizer.zero_grad()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()
    if dist.is_initialized():
        dist.destroy_process_group()
    return rows, weights


def test_a_loop_under_fabric_trains_the_same_on_any_number_of_ranks(data: dict) -> None:
    rows, weights = fabric_run(data)
    for world in (2, 3):
        results = run_world(fabric_run, world, data)
        assert sorted(row for part, _ in results for row in part) == sorted(rows)
        for _, theirs in results:
            assert np.abs(theirs - weights).max() < 1e-9


def test_fabric_is_given_the_loader_as_it_is(data: dict) -> None:
    """`setup_dataloaders` is for torch's DataLoader, which it would shard again; ours knows its rank."""
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    with pytest.raises(TypeError, match="Only PyTorch DataLoader"):
        fabric.setup_dataloaders(StreamLoader(**data))


def module_rows(module: RescalableDataModule, steps: int) -> list[bytes]:
    batches = iter(module.train_dataloader())
    return [next(batches)["input_ids"].numpy().tobytes() for _ in range(steps)]


def test_two_modules_in_one_process_do_not_know_of_each_other(data: dict) -> None:
    alone = []
    for seed in (0, 1):
        module = RescalableDataModule(**data, seed=seed)
        module.setup("fit")
        alone.append(module_rows(module, 6))
    pair = [RescalableDataModule(**data, seed=seed, num_workers=1, multiprocessing_context="fork") for seed in (0, 1)]
    for module in pair:
        module.setup("fit")
    batches = [iter(module.train_dataloader()) for module in pair]
    both: list[list[bytes]] = [[], []]
    for _ in range(6):
        for found, turn in zip(both, batches, strict=True):
            found.append(next(turn)["input_ids"].numpy().tobytes())
    assert both == alone
    assert alone[0] != alone[1]
    for module in pair:
        module.loader.close()


@pytest.mark.parametrize(("context", "number"), [("fork", 2), ("spawn", 1)])
def test_workers_that_are_forked_or_spawned_make_the_same_batches(data: dict, context: str, number: int) -> None:
    alone = fit(data, "one device", STEPS)
    workers = fit({**data, "num_workers": number, "multiprocessing_context": context}, "one device", STEPS)
    assert merged([workers]) == merged([alone])
    assert workers.losses == alone.losses


# -- a tokenizer that was used before the workers are forked --------------------------------------------------------------

_USED_BEFORE = """
import sys
from lightning_fms.data import StreamLoader
from lightning_fms.data.tokenizer import JsonTokenizer

tokenizer = JsonTokenizer(sys.argv[1])
tokenizer._tokenizer.encode_batch(["some text"] * 1000)  # in parallel, by threads that a fork does not take along
tokenizer.encode("some text")
loader = StreamLoader(
    {"p": sys.argv[2]}, seq_len=16, global_batch_size=4, num_workers=2, tokenizer=tokenizer, multiprocessing_context="fork"
)
batches = iter(loader)
for _ in range(8):
    next(batches)
tokenizer._tokenizer.encode_batch(["some text"] * 1000)
loader.close()
print("done")
"""


def test_a_tokenizer_used_before_the_fork_neither_warns_nor_hangs(data: dict, tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<|endoftext|>"], show_progress=False)
    tokenizer.train_from_iterator([document("p", n) for n in range(60)], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    environment = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run(
        [sys.executable, "-c", _USED_BEFORE, tmp_path / "tokenizer.json", data["sources"]["p"]],
        cwd=TREE, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == ["done"], done.stderr
    assert "fork" not in done.stderr


# -- what is left when a run is ended -------------------------------------------------------------------------------------


def session(leader: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == leader and fields[0] not in "ZX":
                found.append(int(entry.name))
    return found


def shared_memory(processes: list[int]) -> set[str]:
    """The files in `/dev/shm` that processes have open or mapped, by name."""
    found = set()
    for process in processes:
        folder = Path(f"/proc/{process}")
        try:
            links = [os.readlink(link) for link in (folder / "fd").iterdir()] + (
                folder / "maps"
            ).read_text().splitlines()
        except OSError:
            continue
        found |= {line for line in links if "/dev/shm/" in line and not line.endswith("(deleted)")}
    return {re.sub(r".*(/dev/shm/\S+)$", r"\1", line) for line in found}


@pytest.mark.parametrize(
    ("number", "everyone", "script"),
    [
        (signal.SIGINT, True, ["interrupted_run"]),
        (signal.SIGINT, False, ["interrupted_loop", "fork", "2"]),
        (signal.SIGKILL, False, ["interrupted_loop", "fork", "2"]),
        (signal.SIGKILL, False, ["interrupted_loop", "spawn", "1"]),
    ],
    ids=["Ctrl-C", "SIGINT to the loop", "kill -9", "kill -9, spawned"],
)
def test_a_run_that_is_ended_leaves_nothing_behind(
    data: dict, number: signal.Signals, everyone: bool, script: list[str]
) -> None:
    name, *options = script
    command = [sys.executable, "-m", f"tests.data.{name}", str(data["sources"]["p"]), *options]
    run = subprocess.Popen(
        command, cwd=TREE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    try:
        assert run.stdout is not None
        assert any("ready" in line for line in run.stdout), "the run ended by itself"
        processes = session(run.pid)
        assert len(processes) >= 3  # it, and two others
        memory = shared_memory(processes)
        (os.killpg if everyone else os.kill)(run.pid, number)
        run.wait(timeout=30)
        deadline = time.monotonic() + 30
        while (left := session(run.pid)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, "worker processes outlive the run"
        names = os.listdir("/dev/shm")
        assert not {name for name in names if any(f"_{process}_" in name for process in processes)}
        assert not memory & {f"/dev/shm/{name}" for name in names}
    finally:
        for process in session(run.pid):
            os.kill(process, signal.SIGKILL)
        run.communicate()
