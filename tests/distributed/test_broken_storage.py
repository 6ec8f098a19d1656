"""Full disks, damaged files and checkpoints that do not fit: one typed error, no debris, no weight touched."""

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gloo_world import run_world
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.optim import AdamW, Optimizer

from lightning_fms.distributed import CheckpointError, checkpoint, commit, restore, state


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def trained(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    sum(p.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    return model, optimizer


def as_lightning(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    states = [state.optimizer_state(model, optimizer)]
    return {"state_dict": state.module_state(model), "optimizer_states": states, "global_step": 1}


SAVE = {"folder": restore.save_folder, "file": restore.save_file}


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), ValueError("negative size")])
def test_a_failed_dcp_write_is_a_checkpoint_error_and_leaves_nothing(tmp_path, monkeypatch, error) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(FileSystemWriter, "write_data", fail)
    with pytest.raises(CheckpointError, match=str(error).split("]")[-1].strip()):
        checkpoint.save(tmp_path / "x", {"model.w": torch.ones(3)}, {"a": 1}, step=1)
    assert list(tmp_path.iterdir()) == []


def tensors_to_a_full_disk(_: FileSystem, path: Path, mode: str) -> Any:
    return open("/dev/full", mode, buffering=0) if path.suffix == ".distcp" else open(path, mode)


def the_writers_complaint_from_another_rank(*_: Any) -> None:
    raise RuntimeError("unexpected pos 704 vs 598")


@pytest.mark.parametrize("kind", ["here", "on another rank"])
def test_a_full_disk_is_named_where_the_zip_writer_complains_of_positions(tmp_path, monkeypatch, kind: str) -> None:
    if kind == "here":
        monkeypatch.setattr(FileSystem, "create_stream", tensors_to_a_full_disk)
    else:
        monkeypatch.setattr(FileSystemWriter, "write_data", the_writers_complaint_from_another_rank)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    with pytest.raises(CheckpointError, match=r"the disk is full.*free some, or keep fewer; on rank 0, "):
        checkpoint.save(tmp_path / "x", {"model.w": torch.ones(300, 300)}, {"a": 1}, step=1)
    assert list(tmp_path.iterdir()) == []


def full_on_one_rank(path: Path) -> tuple[str, list[str]]:
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    if torch.distributed.get_rank() == 1:
        FileSystemWriter.write_data = no_space  # type: ignore[method-assign]
    try:
        checkpoint.save(path / "x", {"model.w": distribute_tensor(torch.ones(4), mesh)}, {"a": 1}, step=1)
    except CheckpointError as error:
        torch.distributed.barrier()
        return str(error), [p.name for p in path.iterdir()]
    return "no error", []


def test_a_disk_that_is_full_on_one_rank_raises_on_all(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    for message, left in run_world(2, full_on_one_rank, tmp_path / "world", tmp_path / "store"):
        assert "No space left" in message
        assert left == []


def test_a_failed_plain_file_leaves_nothing_and_a_good_one_sweeps_leftovers(tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", no_space)
        with pytest.raises(CheckpointError, match="No space left"):
            restore.save_file(tmp_path / "x.ckpt", {"state_dict": {}})
    assert [p.name for p in tmp_path.iterdir()] == []
    commit.staging_folder(tmp_path / "x.ckpt", "0" * 8).write_bytes(b"half")
    restore.save_file(tmp_path / "x.ckpt", {"state_dict": {}})
    assert [p.name for p in tmp_path.iterdir()] == ["x.ckpt"]


@pytest.mark.parametrize("kind", SAVE)
def test_other_parameter_groups_are_refused_before_a_weight_is_touched(tmp_path: Path, kind: str) -> None:
    model = nn.Linear(3, 3)
    SAVE[kind](tmp_path / "x", as_lightning(*trained(model, AdamW(model.parameters()))))
    other = nn.Linear(3, 3)
    before = other.weight.detach().clone()
    groups = [{"params": [other.weight]}, {"params": [other.bias], "weight_decay": 0.0}]
    with pytest.raises(CheckpointError, match="parameter groups"):
        restore.load(tmp_path / "x", other, [AdamW(groups)], True, None)
    assert torch.equal(before, other.weight)


def test_a_plain_files_optimizer_state_of_other_shapes_is_refused_before_a_weight_is_touched(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    restore.save_file(tmp_path / "x", as_lightning(*trained(model, AdamW(model.parameters()))))
    other = nn.Linear(3, 3)
    before = other.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"bias: .* exp_avg of shape \(3, 3\) for it, its own is \(3,\)"):
        restore.load(tmp_path / "x", other, [AdamW([other.bias, other.weight])], True, None)
    assert torch.equal(before, other.weight)


def flipped(content: bytes) -> bytes:
    at = content.index(torch.full((9,), 7.0).numpy().tobytes())
    return content[:at] + bytes([content[at] ^ 0x40]) + content[at + 1 :]


@pytest.mark.parametrize("damage", [flipped, lambda content: content[: len(content) // 2], lambda _: b""])
def test_a_damaged_plain_file_is_refused(tmp_path: Path, damage: Any) -> None:
    model = nn.Linear(9, 9, bias=False)
    nn.init.constant_(model.weight, 7.0)
    restore.save_file(tmp_path / "x", {"state_dict": state.module_state(model)})
    (tmp_path / "x").write_bytes(damage((tmp_path / "x").read_bytes()))
    with pytest.raises(CheckpointError, match="damaged"):
        restore.load(tmp_path / "x", model, [], True, None)


def test_a_plain_file_that_is_no_checkpoint_is_one_error_with_what_to_do_instead(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    torch.save(model.state_dict(), tmp_path / "bare.pt")
    with pytest.raises(CheckpointError, match=r"holds no 'state_dict', so it is no checkpoint .* weights=<path>"):
        restore.load(tmp_path / "bare.pt", model, [], True, None)


class Counts(nn.Module):
    """Its extra state is a tensor, whose size is its own business."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.seen = seen

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.seen)

    def set_extra_state(self, value: torch.Tensor) -> None:
        self.seen = value.tolist()


@pytest.mark.parametrize("kind", SAVE)
def test_extra_state_that_is_a_tensor_comes_back(tmp_path: Path, kind: str) -> None:
    saved = nn.ModuleDict({"a": Counts([5, 6]), "b": Counts([7])})
    SAVE[kind](tmp_path / "x", {"state_dict": state.module_state(saved), "global_step": 1})
    fresh = nn.ModuleDict({"a": Counts([0]), "b": Counts([0])})
    restore.load(tmp_path / "x", fresh, [], True, None)
    assert (fresh["a"].seen, fresh["b"].seen) == ([5, 6], [7])


def shards_in_the_wrong_place(path: Path) -> str:
    torch.distributed.init_process_group("gloo")
    shard = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)))
    try:
        restore.save_folder(path, {"state_dict": {}, "callbacks": {"Mine": {"ema": [shard]}}, "global_step": 1})
    except ValueError as error:
        return str(error)
    return "saved"


def test_shards_outside_weights_and_optimizers_are_refused_by_name(tmp_path: Path) -> None:
    for message in run_world(2, shards_in_the_wrong_place, tmp_path, tmp_path / "x"):
        assert "callbacks['Mine']['ema'][0]" in message.replace("state['callbacks']", "callbacks")
