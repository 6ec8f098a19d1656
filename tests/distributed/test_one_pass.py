"""The optimizer step as one pass: equal to PyTorch's, and nobody can tell the difference."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from gloo_world import run_world
from packaging.version import Version
from tiny import Rows, Tiny, trainer, whole_weights
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from lightning_fms.callbacks import BadSteps
from lightning_fms.distributed import FSDPCompileStrategy, one_pass_optimizer
from lightning_fms.distributed.clip import clip_grad_norm
from lightning_fms.distributed.master import MasterWeights
from lightning_fms.distributed.one_pass_optimizer import convert, hindrance, one_pass, restore
from lightning_fms.kernels import TritonKernels

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*treespec.*")


def test_the_kernel_in_the_interpreter() -> None:
    triton = pytest.importorskip("triton")
    if Version(triton.__version__) < Version("3.7") and Version(numpy.__version__) >= Version("2.4"):
        pytest.skip("Triton 3.6's interpreter cannot take an integer out of a tensor of numpy 2.4")
    file = Path(__file__).with_name("interpreted_one_pass.py")
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-x", "-p", "no:cacheprovider", str(file)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


# ---- the optimizer alone


def parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (5, 7), (0, 3), (11,), (2, 3, 4, 4), (1,)
    made = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    made[3].data = made[3].data.contiguous(memory_format=torch.channels_last)
    return made


def give_gradients(params: list[nn.Parameter], step: int, in_layout: bool) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for i, parameter in enumerate(params):
        gradient = torch.randn(parameter.shape, generator=generator).bfloat16().float()
        if in_layout:  # as autograd does; PyTorch's fused kernel relies on it
            gradient = torch.empty_like(parameter).copy_(gradient)
        parameter.grad = gradient if i != step else None  # one without a gradient, so that counts of steps differ


@pytest.mark.parametrize("kind", [AdamW, Adam])
@pytest.mark.parametrize("fused", [True, None])
def test_steps_equal_torchs_with_clipping_folded_in(kind: type[Adam], fused: bool | None) -> None:
    ours, theirs = parameters(), parameters()
    options: dict[str, Any] = {"weight_decay": 0.1, "lr": 1e-2, "fused": fused}
    groups = [[{"params": p[:2]}, {"params": p[2:], "lr": 3e-3}] for p in (ours, theirs)]
    a, b = kind(groups[0], **options), kind(groups[1], **options)
    assert hindrance(a, anywhere=True) == ""
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in (a, b)]
    convert(a, anywhere=True)
    converted = one_pass(a)
    assert converted is not None
    heard: list[Any] = []
    a.register_step_post_hook(lambda *_: heard.append(1))
    for step in range(5):
        give_gradients(ours, step, bool(fused))
        give_gradients(theirs, step, bool(fused))
        clip_grad_norm(ours, 1.0, converted.fold)
        torch.nn.utils.clip_grad_norm_([p for p in theirs if p.grad is not None], 1.0)
        for optimizer, schedule in zip((a, b), schedules, strict=True):
            optimizer.step()
            schedule.step()  # warns if it has not seen the optimizer step
        assert converted.folded is None, "a factor is for one step"
        if step == 2:  # as loading a checkpoint does
            a.load_state_dict(copy.deepcopy(b.state_dict()))
            for mine, other in zip(ours, theirs, strict=True):
                mine.data.copy_(other.data)
    assert len(heard) == 5
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=5e-7, atol=1e-8)
    mine, other = a.state_dict(), b.state_dict()
    torch.testing.assert_close(mine["state"], other["state"], rtol=1e-6, atol=1e-7)
    assert mine["param_groups"] == other["param_groups"]
    restore(a)
    assert type(a) is kind


def test_what_the_kernel_cannot_do_is_done_by_torch() -> None:
    wide = nn.Parameter(torch.ones(3, dtype=torch.float64))
    assert "SGD" in hindrance(SGD([wide]), True)
    assert "amsgrad" in hindrance(AdamW([nn.Parameter(torch.ones(1))], amsgrad=True), True)
    assert "fp32" in hindrance(AdamW([wide]), True)
    assert "GPU" in hindrance(AdamW([nn.Parameter(torch.ones(1))]), False)
    ours, theirs = (AdamW([nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(3))], lr=0.1) for _ in range(2))
    convert(ours, anywhere=True)
    added = nn.Parameter(torch.ones(3, dtype=torch.float64)), nn.Parameter(torch.ones(3, dtype=torch.float64))
    for optimizer, late in zip((ours, theirs), added, strict=True):
        optimizer.add_param_group({"params": [late]})
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
    torch.testing.assert_close(added[0], added[1], rtol=0, atol=0)
    ours.param_groups[0]["params"][0].grad = torch.ones(4, 2).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        ours.step()


# ---- gradients of masters


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_gradients_are_those_of_fp32_accumulation_bit_for_bit(micro_batches: int) -> None:
    def gradients(narrow: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        masters = MasterWeights(model)
        if narrow:
            masters.narrow_gradients(set(model.parameters()))
        for _ in range(micro_batches):
            with masters.active():
                model(torch.randn(5, 8).bfloat16()).float().square().sum().backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        expected = torch.bfloat16 if narrow and micro_batches == 1 else torch.float32
        assert {g.dtype for g in found.values()} == {expected}
        masters.release()
        assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())
        assert all(p.grad_dtype == torch.float32 for p in model.parameters())
        return {name: g.float() for name, g in found.items()}

    torch.testing.assert_close(gradients(narrow=True), gradients(narrow=False), rtol=0, atol=0)


# ---- runs


def weights_after(make: Callable[[], pl.LightningModule], one: bool, **options: Any) -> dict[str, Tensor]:
    """The weights behind a run in which only Lightning's and this package's hooks are defined, unless `make` has some."""
    pl.seed_everything(7, verbose=False)
    module = make()
    defaults: dict[str, Any] = {"precision": "bf16-mixed", "gradient_clip_val": 0.5, "max_steps": 4}
    t = trainer(strategy=FSDPCompileStrategy(one_pass_optimizer=one), **{**defaults, **options})
    t.fit(module, Rows(8), Rows(1))
    assert all(type(optimizer) in (AdamW, Adam, SGD) for optimizer in t.optimizers), "the plain class is back"
    return whole_weights(module)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, bool, bool]]:
    """(dtype of gradients, a factor is folded in, copies are written) of each launch."""
    seen: list[tuple[torch.dtype, bool, bool]] = []
    real = one_pass_optimizer.adam_step

    def spy(tensors: Any, settings: Any, factor: Tensor | None, *rest: Any) -> None:
        seen.append((tensors.grads[0].dtype, factor is not None, bool(tensors.copies)))
        real(tensors, settings, factor, *rest)

    monkeypatch.setattr(one_pass_optimizer, "adam_step", spy)
    return seen


def close(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_is_that_of_torchs_optimizer(accumulate: int, launches: list[Any]) -> None:
    ours = weights_after(Tiny, True, accumulate_grad_batches=accumulate)
    assert launches == [(torch.bfloat16 if accumulate == 1 else torch.float32, True, True)] * 4
    close(ours, weights_after(Tiny, False, accumulate_grad_batches=accumulate))


class Looks(Tiny):
    """Looks at gradients and changes them, clips by itself, and edits weights where no version counter moves."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert all(p.grad.dtype == torch.float32 for p in self.parameters() if p.grad is not None)
        self.head.weight.grad.mul_(1 / 3)  # type: ignore[union-attr]

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, 0.1, "norm")
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        assert norm < 0.101, "hooks find clipped gradients"

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.2, 0.2)


def test_whoever_looks_or_edits_finds_what_there_is_without_it(launches: list[Any]) -> None:
    ours = weights_after(Looks, True, gradient_clip_val=None)
    assert launches == [(torch.float32, False, True)] * 4
    close(ours, weights_after(Looks, False, gradient_clip_val=None))


def test_clipping_by_value_clips_gradients_in_fp32(launches: list[Any]) -> None:
    options: dict[str, Any] = {"gradient_clip_val": 0.003, "gradient_clip_algorithm": "value"}
    ours = weights_after(Tiny, True, **options)
    assert launches == [(torch.float32, False, True)] * 4
    close(ours, weights_after(Tiny, False, **options))


class Clamps(Tiny):
    """A hook on the optimizer that edits through `.data`."""

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=1e-2)
        optimizer.register_step_post_hook(lambda *_: self.head.weight.data.clamp_(-0.1, 0.1))
        return optimizer


def test_an_edit_by_the_optimizers_own_hook_is_seen() -> None:
    close(weights_after(Clamps, True), weights_after(Clamps, False))


class Two(Tiny):
    """Two optimizers by hand, one of them not Adam, one toggled, clipped by hand, over two micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        inner = [p for n, p in self.named_parameters() if "head" not in n]
        return AdamW(inner, lr=1e-2), Adam([self.head.weight], lr=1e-2)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        inner, head = self.optimizers()
        self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            self.clip_gradients(inner, 0.5, "norm")
            inner.step()
            inner.zero_grad()
        self.toggle_optimizer(head)
        self.manual_backward(self.loss(batch))
        head.step()
        head.zero_grad()
        self.untoggle_optimizer(head)


def test_two_optimizers_under_manual_optimization(launches: list[Any]) -> None:
    options: dict[str, Any] = {"gradient_clip_val": None, "max_steps": 6}
    ours = weights_after(Two, True, **options)
    assert launches == [(torch.float32, False, True)] * len(launches)
    assert len(launches) >= 6
    close(ours, weights_after(Two, False, **options))


class Explodes(Tiny):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss * (float("nan") if batch_idx == 1 else 1.0)


@pytest.mark.filterwarnings("ignore:step 1 was bad")
def test_a_bad_step_is_skipped_and_leaves_the_state_as_it_is(launches: list[Any]) -> None:
    ours = weights_after(Explodes, True, callbacks=[BadSteps()])
    assert launches == [(torch.bfloat16, True, True)] * 3
    close(ours, weights_after(Explodes, False, callbacks=[BadSteps()]))


@pytest.mark.parametrize("first", [True, False])
def test_checkpoints_of_one_go_on_with_the_other(first: bool, tmp_path: Path) -> None:
    def run(one: bool, steps: int, load: Path | None) -> dict[str, Tensor]:
        pl.seed_everything(7, verbose=False)
        module = Tiny()
        t = trainer(strategy=FSDPCompileStrategy(one_pass_optimizer=one), precision="bf16-mixed", max_steps=steps)
        t.fit(module, Rows(8), Rows(1), ckpt_path=load)
        t.save_checkpoint(tmp_path / f"{steps}")
        return whole_weights(module)

    run(first, 2, None)
    close(run(not first, 4, tmp_path / "2"), weights_after(Tiny, False, gradient_clip_val=None))


def test_copies_behind_a_step_need_no_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    refreshed: list[int] = []
    real = MasterWeights.refresh

    def spy(self: MasterWeights) -> None:
        versions = [master._version for master in self._masters]
        refreshed.append(sum(a != b for a, b in zip(versions, self._versions, strict=True)))
        real(self)
        for master, made in self.copies.items():
            assert torch.equal(made, master.bfloat16())

    monkeypatch.setattr(MasterWeights, "refresh", spy)
    weights_after(
        Tiny, True, callbacks=[TritonKernels(backend="reference")]
    )  # which has a hook on the optimizer's step
    assert refreshed[0] > 0
    assert sum(refreshed[1:]) == 0


def on_two_ranks() -> list[dict[str, Tensor]]:
    return [weights_after(Tiny, one) for one in (True, False)]


def test_shards_on_two_ranks_are_stepped_alike(tmp_path: Path) -> None:
    for ours, theirs in run_world(2, on_two_ranks, tmp_path):
        close(ours, theirs)
