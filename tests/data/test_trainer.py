"""D4: the guarantees through `Trainer.fit(ckpt_path=...)`, under every strategy.

Legend: W data ranks, A micro-batches a step.
"""

import inspect
import multiprocessing
import os
import signal
import threading
import warnings
from functools import partial

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_fms.data import LoaderLink, RescalableDataModule, StreamLoader
from tests.data.chains import two_sources
from tests.data.fits import Bigram, Ledger, fit, merged
from tests.worlds import run_world

STEPS = 8
BATCH = 6

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*was called without a model"),
    pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("corpus")
    return {
        "sources": two_sources(root),
        "mixture": {"p": 1, "c": 2},
        "seq_len": 24,
        "global_batch_size": BATCH,
        "val_sources": {"c": root / "c"},
        "val_steps": 2,
        "val_every_n_steps": 2,
        "mask_first": True,  # rows then hold different numbers of targets
    }


@pytest.fixture(scope="module")
def reference(data):
    """The uninterrupted run of one process with the whole batch at once."""
    return fit({**data, "micro_batch_size": None}, "one device", STEPS)


def check(ledgers, reference, first=0, last=STEPS):
    """Compare steps `first..last` of a run, whatever its world, with the reference."""
    rows = merged(ledgers)
    assert sorted(rows) == list(range(first, last))
    for step in rows:
        assert rows[step] == sorted(reference.rows[step]), f"step {step} trained other rows"
    for ledger in ledgers:
        for step in range(first, last):
            assert ledger.losses[step] == pytest.approx(reference.losses[step], rel=1e-6), f"loss of step {step}"
            error = np.abs(ledger.gradients[step] - reference.gradients[step]).max()
            assert error < 1e-7, f"gradient of step {step} off by {error}"
        for step, value in ledger.val_losses.items():
            assert value == pytest.approx(reference.val_losses[step], rel=1e-6)
        assert set(ledger.val_losses) == {step for step in reference.val_losses if first < step <= last}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(("world", "micro"), [(2, 2), (3, 1), (5, 1)])
def test_d4_losses_and_gradients_are_those_of_one_process(data, reference, strategy, world, micro):
    check(run_world(fit, world, {**data, "micro_batch_size": micro}, strategy, STEPS), reference)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_d4_rescaled_runs_go_on_with_the_same_batches(data, reference, strategy, tmp_path):
    """4 ranks, then 2, then 3, then one device; the number of micro-batches a step changes each time."""
    path = None
    chain = [(4, 1, strategy, 3), (2, None, strategy, 5), (3, 1, strategy, 7), (1, 2, "one device", STEPS)]
    if strategy == "fsdp":
        chain[-1] = (1, 2, "fsdp", STEPS)
    first = 0
    for world, micro, name, last in chain:
        save = tmp_path / f"after-{last}.ckpt"
        check(
            run_world(fit, world, {**data, "micro_batch_size": micro}, name, last, path, save), reference, first, last
        )
        first, path = last, save


@pytest.mark.parametrize("ask", [False, True])
def test_d4_another_batch_size_makes_the_steps_of_the_run_not_of_a_new_one(data, ask, tmp_path):
    """Started with 5 streams, a batch of 4 rows makes 2 micro-batches of 2 on 2 ranks, where a new run would make 1."""
    save = tmp_path / "five.ckpt"
    fit({**data, "global_batch_size": 5}, "one device", 3, save=save)
    changed = {**data, "global_batch_size": 4, "micro_batch_size": 2}
    alone = fit(changed, "one device", STEPS, save)
    together = run_world(partial(fit, ask_for_steps=ask), 2, changed, "ddp", STEPS, save)
    check(together, alone, 3)


@pytest.mark.parametrize("steps_per_epoch", [None, 3])
@pytest.mark.parametrize(("micro", "then"), [(6, 6), (3, 6), (2, 3)])  # A: 1 and 1, 2 and 1, 3 and 2
def test_d4_a_save_after_every_micro_batch_resumes_exactly(data, reference, micro, then, steps_per_epoch, tmp_path):
    data = {**data, "steps_per_epoch": steps_per_epoch}
    saver = _SaveEverywhere(tmp_path)
    fit({**data, "micro_batch_size": micro}, "one device", STEPS, callbacks=(saver,))
    assert len(saver.saved) == STEPS * (BATCH // micro)
    for path, trained in saver.saved:
        ledger = fit({**data, "micro_batch_size": then}, "one device", STEPS, path)
        if trained < STEPS:
            check_without_validation([ledger], reference, trained)


def check_without_validation(ledgers, reference, first):
    for ledger in ledgers:
        ledger.val_losses = {step: value for step, value in reference.val_losses.items() if step > first}
    check(ledgers, reference, first)


class _SaveEverywhere(Callback):
    def __init__(self, folder):
        self.folder, self.saved = folder, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        path = self.folder / f"{trainer.fit_loop.epoch_loop.batch_progress.total.ready}.ckpt"
        trainer.save_checkpoint(path)
        self.saved.append((path, trainer.global_step))


def test_d4_model_checkpoint_saves_the_step_it_follows(data, reference, tmp_path):
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    fit({**data, "micro_batch_size": 2}, "one device", STEPS, callbacks=(saver,))
    check([fit({**data, "micro_batch_size": 3}, "one device", STEPS, tmp_path / "step=3.ckpt")], reference, 3)


def test_d4_estimated_stepping_batches_does_not_drop_the_state(data, reference, tmp_path):
    save = tmp_path / "half.ckpt"
    fit({**data, "micro_batch_size": 2}, "one device", 5, save=save, ask_for_steps=True)
    ledger = fit({**data, "micro_batch_size": 2}, "one device", STEPS, save, ask_for_steps=True)
    check([ledger], reference, 5)


@pytest.mark.parametrize("error", [RuntimeError("told to fail"), SIGTERMException()])
def test_d4_resume_after_an_exception_repeats_only_what_was_not_trained(data, reference, error, tmp_path):
    saver = OnExceptionCheckpoint(tmp_path, "broken")
    with pytest.raises((RuntimeError, SystemExit, SIGTERMException)):
        fit(
            {**data, "micro_batch_size": 2},
            "one device",
            STEPS,
            callbacks=(saver,),
            ledger=Ledger(fail_at=13, error=error),
        )
    ledger = fit({**data, "micro_batch_size": 2}, "one device", STEPS, tmp_path / "broken.ckpt")
    check_without_validation([ledger], reference, 4)  # 13 micro-batches are 4 steps of 3 and one begun


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_after_an_exception_no_worker_is_left_and_the_same_trainer_can_resume(data, tmp_path):
    before = set(multiprocessing.active_children())
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = pl.Trainer(
        max_steps=6, accelerator="cpu", devices=1, logger=False, callbacks=[saver, Ledger(fail_at=5)],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module, streamed = Bigram(), RescalableDataModule(**{**data, "num_workers": 1})
    with pytest.raises(RuntimeError, match="told to fail"):
        trainer.fit(module, streamed)
    assert set(multiprocessing.active_children()) == before
    trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, Ledger)]
    trainer.fit(module, streamed, ckpt_path=tmp_path / "step=4.ckpt")
    assert streamed.state_dict()["header"]["row"] == 6 * BATCH


class FailsInValidation(Bigram):
    def validation_step(self, batch, batch_idx):
        raise RuntimeError("told to fail")


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_after_an_exception_in_a_validation_both_feeds_are_closed(data):
    processes, threads = set(multiprocessing.active_children()), set(threading.enumerate())
    trainer = pl.Trainer(
        max_steps=6, accelerator="cpu", devices=1, logger=False, num_sanity_val_steps=0,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    streamed = RescalableDataModule(**{**data, "num_workers": 1})
    with pytest.raises(RuntimeError, match="told to fail"):
        trainer.fit(FailsInValidation(), streamed)
    assert set(multiprocessing.active_children()) == processes
    for thread in (ours := {one for one in threading.enumerate() if one.name == "fms-data"} - threads):
        thread.join(20)
    assert not any(thread.is_alive() for thread in ours)
    validation = streamed.val_dataloader()
    assert validation.loader._running is None
    assert not validation.delivered


def test_d4_sigterm_stops_and_resumes_exactly(data, reference, tmp_path):
    class Terminate(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    try:
        saver = OnExceptionCheckpoint(tmp_path, "terminated")
        with pytest.raises((SystemExit, SIGTERMException)):
            fit({**data, "micro_batch_size": 2}, "one device", STEPS, callbacks=(saver, Terminate()))
    finally:
        signal.signal(signal.SIGTERM, before)
    ledger = fit({**data, "micro_batch_size": 2}, "one device", STEPS, tmp_path / "terminated.ckpt")
    check_without_validation([ledger], reference, min(ledger.rows))
    assert min(ledger.rows) in (4, 5)


def _fail_and_resume(data, folder):
    saver = OnExceptionCheckpoint(folder, "broken")
    with pytest.raises(RuntimeError, match="told to fail"):
        fit(data, "ddp", STEPS, callbacks=(saver,), ledger=Ledger(fail_at=5))
    with pytest.raises(ValueError, match="written after an exception"):
        fit(data, "ddp", STEPS, folder / "broken.ckpt")
    return True


def test_d4_a_state_saved_after_an_exception_is_refused_on_several_ranks(data, tmp_path):
    assert run_world(_fail_and_resume, 2, {**data, "micro_batch_size": None}, tmp_path) == [True, True]


def test_second_fit_of_the_same_trainer_goes_on(data, reference):
    ledger, module = Ledger(), RescalableDataModule(**{**data, "val_sources": None, "val_every_n_steps": None})
    trainer = pl.Trainer(
        max_steps=3, accelerator="cpu", callbacks=[ledger], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
    )  # fmt: skip
    model = Bigram()
    trainer.fit(model, module)
    trainer.fit_loop.epoch_loop.max_steps = STEPS
    trainer.fit(model, module)
    assert sum(isinstance(callback, LoaderLink) for callback in trainer.callbacks) == 1
    assert merged([ledger.record]) == {step: sorted(rows) for step, rows in reference.rows.items()}


@pytest.mark.parametrize(
    ("options", "trainer_options", "message"),
    [
        ({"global_batch_size": 6, "micro_batch_size": 2}, {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
        ({}, {"callbacks": [GradientAccumulationScheduler({0: 1})]}, "GradientAccumulationScheduler"),
        ({}, {"max_steps": -1, "max_epochs": 1}, "steps_per_epoch"),
        ({"micro_batch_size": 2}, {"limit_train_batches": 4}, "limit_train_batches=4"),
        ({"micro_batch_size": 2}, {"limit_train_batches": 0.5}, "limit_train_batches=0.5"),
        ({}, {"overfit_batches": 1}, "overfit_batches=1"),
        ({"val_sources": {"c": "/no/such/folder"}}, {}, "val_sources: source 'c'"),
        ({"num_streams": 0}, {}, "num_streams"),
        ({"seq_len": 10**9}, {}, "seq_len=1000000000: rows have 16,777,216 tokens at most"),
        ({"loss_weight": "words"}, {}, "loss_weight"),
        ({"val_steps": 0}, {}, "val_steps=0"),
    ],
)
def test_one_clear_error_for_what_does_not_agree_with_the_trainer(data, options, trainer_options, message):
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = pl.Trainer(**{"max_steps": 2, "accelerator": "cpu", **quiet, **trainer_options})
    with pytest.raises(ValueError, match=message):
        trainer.fit(Bigram(), RescalableDataModule(**{**data, **options}))


def test_state_of_another_run_is_refused_with_the_difference(data, tmp_path):
    save = tmp_path / "a.ckpt"
    fit(data, "one device", 2, save=save)
    for change, message in (
        ({"seed": 5}, "seed was 0 and is 5"),
        ({"num_streams": 7}, "num_streams was 6 and is 7"),
        ({"sources": {"other": data["sources"]["c"]}, "mixture": None}, "its sources are"),
        ({"sources": {**data["sources"], "p": data["sources"]["c"]}}, "source 'p' is not what the run started with"),
    ):
        with pytest.raises(ValueError, match=message):
            fit({**data, **change}, "one device", 4, save)
    assert torch.load(save, weights_only=True)["RescalableDataModule"]["header"]["row"] == 2 * BATCH


def test_fast_dev_run_is_one_whole_step(data):
    ledger = Ledger()
    trainer = pl.Trainer(fast_dev_run=True, accelerator="cpu", callbacks=[ledger], enable_progress_bar=False)
    trainer.fit(Bigram(), RescalableDataModule(**{**data, "micro_batch_size": 2}))
    assert {step: len(rows) for step, rows in ledger.record.rows.items()} == {0: BATCH}


def test_validation_of_a_checkpoint_leaves_the_training_position_alone(data, tmp_path):
    save = tmp_path / "a.ckpt"
    fit(data, "one device", 2, save=save)
    module = RescalableDataModule(**data)
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    (result,) = trainer.validate(Bigram(), module, ckpt_path=save, verbose=False)
    assert 0 < result["val_loss"] < 6
    assert module.loader is None


class WithoutValidation(Bigram):
    """A module that does not validate, as Lightning knows it."""

    validation_step = pl.LightningModule.validation_step


@pytest.mark.parametrize("module", [Bigram, WithoutValidation])
@pytest.mark.parametrize("validates", [True, False])
def test_lightning_warns_of_validation_only_where_something_is_amiss(data, module, validates):
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = pl.Trainer(max_steps=1, accelerator="cpu", **quiet)
    sources = data["val_sources"] if validates else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module(), RescalableDataModule(**{**data, "val_sources": sources}))
    said = [str(warning.message) for warning in caught if "validation_step" in str(warning.message)]
    amiss = validates and module is WithoutValidation
    assert len(said) == amiss
    assert not amiss or "You passed in a `val_dataloader` but have no `validation_step`" in said[0]


def test_without_a_trainer_the_data_module_serves_the_rank_it_is_given(data):
    modules = [RescalableDataModule(**data, rank=rank, world_size=2) for rank in range(2)]
    counts = []
    for module in modules:
        module.setup("fit")
        for _ in zip(range(2), module.train_dataloader(), strict=False):
            pass
        counts.append((module.state_dict()["header"]["row"], sum(1 for _ in module.val_dataloader())))
    assert counts == [(2 * BATCH, data["val_steps"])] * 2


def _mixes(data):
    from_all = []

    class Ask(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            from_all.append((trainer.datamodule.mix_report(), trainer.datamodule.report))

    fit(data, "ddp", 3, callbacks=(Ask(),))
    return from_all[-1]


def test_the_mix_is_that_of_all_ranks(data):
    (first, report), (second, _) = run_world(_mixes, 2, data)
    assert first == second
    assert sum(entry["tokens"] for entry in first.values()) == 3 * BATCH * data["seq_len"]
    assert sum(entry["share"] for entry in first.values()) == pytest.approx(1)
    assert any("source p: 3 files" in line for line in report)


def test_the_data_module_takes_what_the_loader_takes():
    ours, theirs = (inspect.signature(kind).parameters for kind in (RescalableDataModule, StreamLoader))
    for name in set(theirs) - {"state", "one_pass"}:
        assert ours[name].default == theirs[name].default, name
        assert ours[name].annotation == theirs[name].annotation, name
