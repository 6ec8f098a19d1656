"""Checkpoints on an object store: F1 and F2 without a rename, on several ranks, by the commands; what stays local is refused."""

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bucket import Bucket, Killed, open_bucket
from gloo_world import run_world
from steps import load, save
from tiny import Run, Tiny, fit

from lightning_fms import remote_path
from lightning_fms.callbacks import BadSteps, DataTrail, GoodputLog, HangWatchdog, StepCheckpoint
from lightning_fms.commands.checkpoint import main
from lightning_fms.distributed import (
    CheckpointError,
    FSDPCompileStrategy,
    checkpoint,
    commit,
    initial,
    latest_committed,
)
from lightning_fms.local_paths import refuse_remote
from lightning_fms.remote_path import RemotePath, StoreError, place
from lightning_fms.run_folder import locate, newest_checkpoint, reserve, reserve_given, saved

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*treespec.*",
    "ignore:Be aware that when using `ckpt_path`, callbacks",
    "ignore:Checkpoint directory .* exists",
)
ROOT = "bucket://runs/llama"


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("FMS_TEST_BUCKET", "")
    yield open_bucket(tmp_path / "bucket")
    Bucket.fatal, Bucket.dead = -1, False


@pytest.mark.parametrize("scenario", ["new", "overwrite", "rotate"])
def test_a_kill_before_any_change_of_the_store_leaves_a_whole_checkpoint_at_least_as_new(bucket, scenario: str) -> None:
    fatal = 0
    while True:
        folder = place(f"{ROOT}/{fatal}")
        Bucket.count, Bucket.fatal, Bucket.dead = 0, -1, False
        save(folder / "step-1.ckpt", 1)
        Bucket.count, Bucket.fatal = 0, fatal
        try:
            save(folder / ("step-1.ckpt" if scenario == "overwrite" else "step-2.ckpt"), 2)
            if scenario == "rotate":
                commit.remove(folder / "step-1.ckpt")
        except Killed:
            pass
        killed, Bucket.fatal, Bucket.dead = Bucket.dead, -1, False
        found = latest_committed(folder)
        assert found is not None, f"no checkpoint after a kill before change {fatal}"
        assert load(found) in (1, 2)
        save(folder / "step-3.ckpt", 3)  # the next attempt is not hindered by debris
        assert load(latest_committed(folder)) == 3
        commit.sweep_folder(folder, lambda name: True)
        objects = [name for name in folder.rglob("*") if name.parent.name not in _versions(folder)]
        assert objects == [], "debris stays"
        if not killed:
            assert load(found) == 2
            assert fatal >= 5
            break
        fatal += 1


def _versions(folder: Path) -> set[str]:
    return {commit.version_of(one).name for one in commit.committed(folder)}


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped bit": (lambda p: flip(next(p.glob("*/*.distcp"))), "has changed"),
    "missing object": (lambda p: next(p.glob("*/state.pt")).unlink(), "missing state.pt"),
    "short object": (lambda p: os.truncate(next(p.glob("*/*.distcp")), 10), "10 bytes"),
    "torn COMMIT": (lambda p: os.truncate(next(p.glob("*/COMMIT")), 5), "damaged"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_on_a_store_is_found_and_the_next_older_valid_one_is_taken(bucket, damage: str) -> None:
    harm, message = DAMAGE[damage]
    folder = place(ROOT)
    save(folder / "step-1.ckpt", 1)
    save(folder / "step-2.ckpt", 2)
    harm(bucket / "runs/llama/step-2.ckpt")
    with pytest.raises(CheckpointError, match=message):
        checkpoint.verify(folder / "step-2.ckpt")
    assert load(latest_committed(folder)) == 1


def test_an_address_that_has_been_a_path_is_the_address(
    bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(Path(f"{ROOT}/step-1.ckpt"), 1)
    assert commit.resolve(Path(f"{ROOT}/step-1.ckpt")).parent == place(ROOT) / "step-1.ckpt"
    assert load(latest_committed(Path(ROOT))) == 1
    assert not (tmp_path / "bucket:").exists()


def test_what_is_no_checkpoint_is_not_overwritten(bucket) -> None:
    place(f"{ROOT}/thesis/chapter.txt").write_text("years of work")
    for path in (f"{ROOT}/thesis", f"{ROOT}/thesis/chapter.txt"):
        with pytest.raises(ValueError, match="holds other things"):
            save(place(path), 1)
    assert (bucket / "runs/llama/thesis/chapter.txt").exists()


class Fatal(StepCheckpoint):
    """Kills this rank before a change of the store."""

    def setup(self, *args: Any, **options: Any) -> None:
        super().setup(*args, **options)
        Bucket.count, Bucket.kill = 0, lambda: os.kill(os.getpid(), signal.SIGKILL)
        Bucket.fatal = 20 if int(os.environ["RANK"]) == 0 else -1


def trained(folder: Path, steps: int, background: bool = False, ckpt_path: Any = None, kill: bool = False) -> Run:
    open_bucket(folder)
    saver = (Fatal if kill else StepCheckpoint)(ROOT, every_n_steps=1, keep=2, asynchronous=background)
    return fit(callbacks=[saver], max_steps=steps, enable_checkpointing=True, ckpt_path=ckpt_path)


def resumed(folder: Path, steps: int) -> Run:
    open_bucket(folder)
    return trained(folder, steps, background=True, ckpt_path=str(locate(place(ROOT))))


def test_ranks_save_in_an_object_store_one_is_killed_and_three_go_on(tmp_path: Path, bucket, capsys) -> None:
    whole = trained(tmp_path / "whole", 4)
    with pytest.raises(RuntimeError, match="ended without a result"):
        run_world(2, trained, tmp_path / "killed", bucket, 4, False, None, True)
    open_bucket(bucket)
    saved = [one.name for one in commit.committed(place(ROOT))]
    assert saved
    assert saved[0] in ("step-1.ckpt", "step-2.ckpt", "step-3.ckpt")
    step = int(saved[0][5])
    run = run_world(3, resumed, tmp_path / "resumed", bucket, 4)[0]
    torch.testing.assert_close(run.losses, whole.losses[step:], rtol=0, atol=1e-5)
    torch.testing.assert_close(run.weights, whole.weights, rtol=0, atol=1e-5)
    kept = [one.name for one in commit.committed(place(ROOT))]
    assert kept == ["step-4.ckpt", "step-3.ckpt"], "retention"
    assert command("list", ROOT, capsys).count("complete") == 2
    assert command("verify", ROOT, capsys).count("every byte is as it was written") == 2
    assert "by 3 ranks" in command("inspect", ROOT, capsys)
    command("export", ROOT, capsys, str(tmp_path / "out"))
    assert (tmp_path / "out" / "model.safetensors").is_file()


def command(name: str, path: str, capsys: Any, *more: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([name, path, *more])
    assert not ended.value.code
    return str(capsys.readouterr().out)


def test_scores_weights_and_the_best_on_a_store(bucket) -> None:
    saver = StepCheckpoint(ROOT, every_n_steps=1, keep=1, monitor="val_loss", keep_best=1)
    fit(callbacks=[saver], max_steps=3, val_check_interval=1, enable_checkpointing=True)
    assert '"step-3.ckpt"' in place(f"{ROOT}/scores.json").read_text()
    with pytest.raises(ValueError, match="of another run; give an address of its own"):
        fit(callbacks=[StepCheckpoint(ROOT)], max_steps=1, enable_checkpointing=True)
    module = Tiny()
    assert initial.load_weights(place(ROOT) / "step-3.ckpt", module) == len(module.state_dict())


def test_a_run_with_its_checkpoints_at_an_address_is_found_by_its_folder(bucket, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("attempts: [{started: '1', overrides: []}]")
    (tmp_path / "config.yaml").write_text(f"callbacks: {{checkpoint: {{dirpath: '{ROOT}'}}}}")
    assert newest_checkpoint(tmp_path) is None
    save(place(ROOT) / "step-1.ckpt", 1)
    save(place(ROOT) / "step-2.ckpt", 2)
    newest = place(ROOT) / "step-2.ckpt"
    assert newest_checkpoint(tmp_path) == saved(tmp_path)[0] == locate(tmp_path) == locate(place(ROOT)) == newest
    assert locate(place(str(newest))) == newest


REFUSED = "Only checkpoint folders can be addresses"


def test_what_stays_on_a_file_system_is_refused_at_an_address(bucket, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        reserve_given(Path("s3://bucket/run"), resume=False)
    with pytest.raises(ValueError, match=REFUSED):
        reserve(Path("s3://bucket"), "llama")
    with pytest.raises(ValueError, match=REFUSED):
        refuse_remote("gs://x", "x")
    for record, name in (
        (BadSteps, "path"),
        (DataTrail, "dirpath"),
        (GoodputLog, "dirpath"),
        (HangWatchdog, "dirpath"),
    ):
        with pytest.raises(ValueError, match=f"{record.__name__}: s3://bucket/x is an address"):
            record(**{name: "s3://bucket/x"})
    consolidated = FSDPCompileStrategy(checkpoint_format="consolidated")
    with pytest.raises(ValueError, match="only FSDPCompileStrategy with checkpoint_format='sharded'"):
        fit(callbacks=[StepCheckpoint(ROOT)], strategy=consolidated, enable_checkpointing=True)
    with pytest.raises(ValueError, match=REFUSED):
        fit(save=f"{ROOT}/x.ckpt", strategy=FSDPCompileStrategy(checkpoint_format="consolidated"), max_steps=1)
    with pytest.raises(ValueError, match=r"nope://.*fsspec reaches nope://"):
        StepCheckpoint("nope://bucket/run")
    with pytest.raises(ValueError, match="does not exist"):
        locate(place(f"{ROOT}/nothing"))


@pytest.mark.parametrize("path", ["/a/b:/c", "runs/x", "C:/x", "a:b", "file:///a/b"])
def test_folders_are_folders(path: str) -> None:
    assert not isinstance(place(path), RemotePath)
    assert place("file:///a/b") == Path("/a/b")
    assert str(place(Path("bucket://a/b"))) == "bucket://a/b"


class Failing:
    """Makes reads of the store fail, from the one with this number on."""

    def __init__(self, patch: pytest.MonkeyPatch, first: int, times: float) -> None:
        self.reads = 0
        for name in ("info", "ls", "cat_file"):
            patch.setattr(Bucket, name, self._counted(getattr(Bucket, name), first, first + times))

    def _counted(self, read: Callable[..., Any], first: int, end: float) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self.reads += 1
            if first < self.reads <= end:
                raise RuntimeError("503 Slow Down")  # as stores' packages: no OSError
            return read(*args, **options)

        return counted


def at_each_read(patch: pytest.MonkeyPatch, times: float, task: Callable[[], Any]) -> Iterator[Any]:
    """What comes of a task, or the error, where its first read fails, where its second one does, and so on."""
    patch.setattr(remote_path, "_WAITS_S", (0.0, 0.0))
    for first in itertools.count():
        with patch.context() as failing:
            store = Failing(failing, first, times)
            try:
                outcome = task()
            except (StoreError, CheckpointError) as error:
                outcome = error
        if store.reads <= first:
            return
        yield outcome


@pytest.mark.parametrize("times", [1, 2, float("inf")], ids=["once", "twice", "for good"])
def test_a_store_that_fails_is_asked_again_and_makes_no_checkpoint_a_damaged_one(
    bucket, monkeypatch, capsys, times: float
) -> None:
    folder = place(ROOT)
    for step in (1, 2):
        save(folder / f"step-{step}.ckpt", step)
    found = list(at_each_read(monkeypatch, times, lambda: latest_committed(folder)))
    assert len(found) > 20
    if times < float("inf"):
        assert set(found) == {folder / "step-2.ckpt"}
    for error in found if times == float("inf") else ():
        assert isinstance(error, StoreError)
        assert str(error).startswith(ROOT)
        assert "RuntimeError: 503 Slow Down. Check the network, the credentials and the address" in str(error)
    assert "passing over" not in capsys.readouterr().out


@pytest.mark.parametrize("times", [2, float("inf")], ids=["twice", "for good"])
def test_a_store_that_fails_at_a_load_is_told_of_as_one(bucket, monkeypatch, times: float) -> None:
    path = place(ROOT) / "step-1.ckpt"
    save(path, 1)

    def load_plain() -> int:
        checkpoint.verify(path)
        return int(checkpoint.load_state(path)["step"])

    for outcome in at_each_read(monkeypatch, times, load_plain):
        assert outcome == 1 if times == 2 else "the store cannot be read" in str(outcome), outcome


def test_a_store_that_refuses_is_asked_once(bucket, monkeypatch) -> None:
    asked = []

    def refuse(*_: Any, **__: Any) -> None:
        asked.append(1)
        raise PermissionError("AccessDenied")

    monkeypatch.setattr(Bucket, "info", refuse)
    with pytest.raises(StoreError, match=r"llama: the store cannot be read.*AccessDenied.*credentials"):
        latest_committed(place(ROOT))
    assert len(asked) == 1


def test_a_store_that_is_down_is_no_empty_store(bucket, monkeypatch) -> None:
    folder = place(f"{ROOT}/down")
    save(folder / "step-1.ckpt", 1)

    def down(*_: Any, **__: Any) -> None:
        raise OSError("503 Slow Down")

    monkeypatch.setattr(remote_path, "_WAITS_S", ())
    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "info", down)
        for question in (folder.exists, folder.is_dir, (folder / "step-1.ckpt").is_file):
            with pytest.raises(OSError, match="503"):
                question()
        with pytest.raises(OSError, match="503"):
            commit.sweep_folder(folder, lambda name: True)
    assert load(latest_committed(folder)) == 1
