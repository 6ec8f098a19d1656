"""`FSDPCompileStrategy`: shard, compile and checkpoint any plain LightningModule.

Lightning's `ModelParallelStrategy` leaves the work to the user: `configure_model` has to shard, cast and compile, and
what is forgotten trains slowly or wrongly. Here the module stays plain, and `setup` does the work in the one order in
which the pieces compose:

    callbacks' `transform_module` (kernels) -> `precision.convert_module` (FP8) -> `place.place` (recompute, compile,
    shard, materialise) -> optimizers

On one device nothing is wrapped and no process group exists. This file only connects: each step lives in the torch-only
module of its name.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from lightning_fms.distributed import averaging, policy, rng, shard
from lightning_fms.distributed.launcher import InProcessLauncher, ProcessLauncher
from lightning_fms.distributed.manual import RootInStep
from lightning_fms.distributed.master import MasterWeights
from lightning_fms.distributed.mesh import TENSOR, MeshShape, build_mesh, check_mesh_arguments, resolve_mesh
from lightning_fms.distributed.offload import check_offload
from lightning_fms.distributed.one_pass_optimizer import restore
from lightning_fms.distributed.place import Placed, Settings, place
from lightning_fms.distributed.report import SetupReport
from lightning_fms.distributed.saving import SavingStrategy
from lightning_fms.distributed.surroundings import Surroundings, keeps_copies_fresh, use_one_pass
from lightning_fms.distributed.tensor_parallel import check_repeated
from lightning_fms.distributed.tensor_plan import Plan


class FSDPCompileStrategy(SavingStrategy):
    """FSDP2 and per-block `torch.compile` for a plain LightningModule, on one to many devices.

    Args:
        replicate: copies of the model (HSDP). 1: every rank shares one copy.
        shard: ranks that share a copy; 'auto' takes what the other two leave. `replicate * shard * tensor` is the number of
            devices.
        tensor: ranks that split each matrix between them and read the same rows (tensor parallelism); neighbours on one host.
        tensor_plan: which module is split how, see `tensor_plan`: a mapping of names to styles, 'llama', or 'auto', which asks the
            module and takes a plan that fits.
        blocks: class names of the repeated blocks; None finds them (see `blocks.find_blocks`).
        compile: compile each block; 'auto' on CUDA only (a first CPU compile takes half a minute and a C++ compiler).
        compile_strict: raise where a block cannot be compiled, instead of running its class uncompiled with a word.
        compile_options: keyword arguments for `torch.compile`.
        activation_checkpointing: 'none', 'full', 'selective' (every `checkpoint_every`-th block, or every block except the
            outputs of `save_ops`), or 'budget': the compiler keeps a share of `activation_budget`. See `activation`.
        checkpoint_every, save_ops, activation_budget: see above.
        reshard_after_forward: free a block's gathered parameters between forward and backward: less memory, one more
            all-gather.
        one_pass_optimizer: step `torch.optim.AdamW` and `Adam` in one pass over memory, together with clipping by norm and the
            bf16 copies; 'auto' on CUDA, True also elsewhere (by a slow reference), False leaves it to PyTorch. The same
            numbers but for rounding. See `one_pass`.
        cpu_offload: keep shards and optimizer state in host memory (GPU only; wraps on one device, too).
        activation_offload: keep what blocks save for backward in pinned host memory (GPU only). See `offload`.
        prefetch: groups of parameters that are gathered ahead of their use; 1 is what FSDP does by itself.
        accumulate_without_reduce: micro-batches before the last reduce no gradients: less communication, but unsharded
            gradients are held meanwhile. False reduces every micro-batch.
        checkpoint_format: 'sharded', a committed folder that loads on any number of ranks; or 'consolidated', one plain
            Lightning file written by rank 0 (needs memory for the whole model). Both kinds are loaded.
        allow_pickle: save also state (of callbacks, hyperparameters) that only `fit(weights_only=False)` can load, because that
            executes code of its classes. False refuses it when it is saved.
        process_group_backend: None takes gloo on CPU and both NCCL and gloo on CUDA.
        timeout: of collectives.

    Random numbers inside training steps are derived from (seed, step, micro-batch, data rank), see `rng`; the seed is
    that of `seed_everything`, else drawn once, and kept in checkpoints.

    `LightningModule.load_from_checkpoint` reads plain files only: save with 'consolidated' for it.

    Raises:
        ValueError: impossible mesh, unknown mode, unsupported precision; before any process is launched.
    """

    def __init__(
        self,
        replicate: int | str = 1,
        shard: int | str = "auto",
        tensor: int = 1,
        tensor_plan: Plan | str = "auto",
        blocks: Sequence[str] | None = None,
        compile: bool | str = "auto",
        compile_strict: bool = False,
        compile_options: Mapping[str, Any] | None = None,
        activation_checkpointing: str = "none",
        checkpoint_every: int = 2,
        save_ops: Sequence[str] | str | None = None,
        activation_budget: float = 0.5,
        reshard_after_forward: bool = True,
        one_pass_optimizer: bool | str = "auto",
        cpu_offload: bool = False,
        activation_offload: bool = False,
        prefetch: int = 1,
        accumulate_without_reduce: bool = True,
        checkpoint_format: str = "sharded",
        allow_pickle: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        check_mesh_arguments(replicate, shard, tensor)
        if checkpoint_format not in ("sharded", "consolidated"):
            raise ValueError(f"checkpoint_format={checkpoint_format!r}: give 'sharded' or 'consolidated'")
        if one_pass_optimizer not in (True, False, "auto"):
            raise ValueError(f"{one_pass_optimizer=}: give True, False or 'auto'")
        recomputed = activation_checkpointing, checkpoint_every, save_ops, activation_budget
        self._settings = Settings(
            blocks, compile, compile_strict, compile_options, *recomputed, reshard_after_forward, cpu_offload, tensor_plan,
            activation_offload, prefetch,
        )  # fmt: skip
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self._replicate, self._shard, self._tensor = replicate, shard, tensor
        self._repeated_checked = False
        self._accumulate_without_reduce = accumulate_without_reduce
        self._consolidate, self._allow_pickle = checkpoint_format == "consolidated", allow_pickle
        self._one_pass, self._surroundings = one_pass_optimizer, Surroundings()
        self.report = SetupReport()
        self._placed, self._root = Placed(), RootInStep()
        self._seed = 0
        self._micro_batch = (-1, 0)  # (optimizer step, micro-batches of it so far)
        self._in_training_step = False

    # ---- processes and mesh

    @property
    def mesh_shape(self) -> MeshShape:
        """Sizes of the mesh for the number of processes of this run."""
        return resolve_mesh(self.num_nodes * self.num_processes, self._replicate, self._shard, self._tensor)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Number of data ranks (replicate x shard) and this one; tensor ranks are neighbours and share one."""
        return {"num_replicas": self.mesh_shape.data_parallel, "rank": self.global_rank // self._tensor}

    @property
    def precision_plugin(self) -> Precision:
        """The precision plugin, see `policy`."""
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else policy.accept(plugin)

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        shape = self.mesh_shape  # an impossible mesh ends here, before a process is launched
        if shape.processes == 1 or self.cluster_environment.creates_processes_externally:
            self._launcher = InProcessLauncher()
        else:
            self._launcher = ProcessLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Process group and mesh. One device needs neither, unless the user's `configure_model` asks for a mesh."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        averaging.postpone(self.lightning_module.trainer)
        offloads = {"cpu_offload": self._settings.cpu_offload, "activation_offload": self._settings.activation_offload}
        check_offload(self.root_device, offloads)
        self.accelerator.setup_device(self.root_device)
        self.set_world_ranks()
        if self._wraps or is_overridden("configure_model", self.lightning_module):
            self._setup_distributed()
            self._device_mesh = build_mesh(self.mesh_shape, self.root_device.type)
        self.lightning_module._device_mesh = self._device_mesh

    @property
    def _wraps(self) -> bool:
        return self.mesh_shape.processes > 1 or self._settings.cpu_offload

    def _get_process_group_backend(self) -> str:
        both = "cpu:gloo,cuda:nccl"  # offloaded shards and objects travel by gloo
        return self._process_group_backend or (both if self.root_device.type == "cuda" else "gloo")

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if dist.is_initialized():
            dist.barrier(device_ids=[self.root_device.index] if self.root_device.type == "cuda" else None)

    # ---- setup

    def setup(self, trainer: "pl.Trainer") -> None:
        """Transform, shard and compile the module in place, then make the optimizers."""
        assert self.model is not None
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self.model
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if hasattr(callback, "transform_module"):
                callback.transform_module(module)
        self.model = module = self.precision_plugin.convert_module(module)
        self._seed = self._agree_on_seed()
        self._repeated_checked = self._tensor == 1
        plugin, mesh = self.precision_plugin, self.device_mesh if self._wraps else None
        rule, masters = policy.fsdp_policy(plugin), policy.computes_in_bf16(plugin)
        self._placed = place(module, self._settings, mesh, self.root_device, self._seed, rule, masters)
        self._root = RootInStep(module)
        self.report = self._placed.report
        self.report.mesh, self.report.precision = str(self.mesh_shape), f"{plugin.precision}{self.report.precision}"
        self._forbid_inference_mode(trainer)
        self.barrier()
        self._average = averaging.begin(trainer, module, self.root_device)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        for line in self.report.lines():
            rank_zero_info(line)

    def _agree_on_seed(self) -> int:
        own = int(os.environ.get("PL_GLOBAL_SEED") or int.from_bytes(os.urandom(7), "big"))
        return int(self.broadcast(own))

    def _forbid_inference_mode(self, trainer: "pl.Trainer") -> None:
        """Tensors made in `inference_mode` break the next training step, so evaluation runs under `no_grad`."""
        fit = trainer.fit_loop.epoch_loop
        for loop in (fit.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False

    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        """Make the optimizers from the module as it is now, and follow their steps."""
        super().setup_optimizers(trainer)
        self._surroundings = Surroundings()
        self.report.notes += use_one_pass(self.optimizers, self._one_pass, self.root_device, self._masters)
        for optimizer in self.optimizers:
            if isinstance(optimizer, Optimizer):
                optimizer.register_step_post_hook(self._after_optimizer_step)

    def teardown(self) -> None:
        """Give the module back without our forwards and compute copies. A sharded module stays sharded."""
        for optimizer in self.optimizers:
            restore(optimizer)
        self._placed.undo()
        self._placed = Placed()
        if self.model is not None:
            shard.drop_held_gradients(self.model)
        super().teardown()

    # ---- steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """One micro-batch."""
        module = self.lightning_module
        assert module is not None
        step = module.trainer.global_step
        self._micro_batch = (step, self._micro_batch[1] + 1 if self._micro_batch[0] == step else 0)
        if self._micro_batch[1] == 0:
            if self._surroundings.before_step(module.trainer, module, self.optimizers, self._masters):
                self._invalidate()
            policy.free_gradients(module)
        rng.seed_micro_batch(self._seed, *self._micro_batch, self.distributed_sampler_kwargs["rank"])
        self._in_training_step = True
        if not module.automatic_optimization:
            self._root.remember()
        try:
            return self._run_step("training_step", *args, **kwargs)
        finally:
            self._in_training_step = False
            if not module.automatic_optimization:
                self._reshard()

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Move a batch; floats are cast where the module computes in bf16."""
        return policy.cast_batch(self.precision_plugin, super().batch_to_device(batch, *args, **kwargs))

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """One validation batch."""
        output = self._run_step("validation_step", *args, **kwargs)
        if self._average is not None:  # Lightning swaps back before the strategy hears of the end
            self._reshard()
        return output

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """One test batch."""
        return self._run_step("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """One prediction batch."""
        return self._run_step("predict_step", *args, **kwargs)

    def _run_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        contexts = {"training_step": "train_step_context", "validation_step": "val_step_context"}
        with ExitStack() as stack:
            if not policy.computes_in_bf16(self.precision_plugin):  # else its context is autocast, which we replace
                stack.enter_context(getattr(self.precision_plugin, contexts.get(name, f"{name}_context"))())
            stack.enter_context(self._computing())
            return getattr(self.lightning_module, name)(*args, **kwargs)

    @property
    def _masters(self) -> MasterWeights | None:
        return self._placed.masters

    def _invalidate(self) -> None:
        if self._masters is not None:
            self._masters.invalidate()
            policy.weights_changed(self.precision_plugin)

    def _computing(self) -> AbstractContextManager[Any]:
        return policy.computing(self._masters, self.precision_plugin) if self._masters is not None else nullcontext()

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Backward; under manual optimization it runs inside the step, where FSDP's root has to be told."""
        if not (self._in_training_step and self._root):
            with self._computing():
                return super().backward(closure_loss, optimizer, *args, **kwargs)
        self._root.before_backward(closure_loss)
        with self._root.toggled_off_kept(self.optimizers):
            result = super().backward(closure_loss, optimizer, *args, **kwargs)
        self._root.unshard()
        return result

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Step; also inside a manual step, hooks and clipping see the parameters that hold the gradients."""
        with ExitStack() as stack:

            def then_show_stored_weights() -> Any:
                result = closure()
                if self._in_training_step:
                    stack.enter_context(self._stored_weights())
                self._check_repeated_gradients()
                return result

            return super().optimizer_step(optimizer, then_show_stored_weights, model, **kwargs)

    def _check_repeated_gradients(self) -> None:
        """Once: what every tensor rank has a copy of has to learn the same on each."""
        if not self._repeated_checked and self.model is not None and self.device_mesh is not None:
            self._repeated_checked = True
            check_repeated(self.model.named_parameters(), self.device_mesh[TENSOR])

    def _after_optimizer_step(self, optimizer: Optimizer, *_: Any) -> None:
        stepped = {p for group in optimizer.param_groups for p in group["params"]}
        if not keeps_copies_fresh(optimizer):
            self._invalidate()
        self._weights_changed({p for p in stepped if p.grad is not None}, copies=False)
        if self.model is not None:
            shard.drop_held_gradients(self.model, stepped)
        if self._in_training_step:
            self._root.unshard()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Gradients of this backward stay on their rank, to be reduced with a later one."""
        assert self.model is not None
        groups = list(shard.fsdp_modules(self.model)) if self._accumulate_without_reduce else []
        for group in groups:
            group.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for group in groups:
                group.set_requires_gradient_sync(True, recurse=False)

    def _weights_changed(self, parameters: set[torch.Tensor] | None = None, copies: bool = True) -> None:
        if copies:
            self._invalidate()
        self._reshard()  # a group that a forward without backward left gathered holds old weights
        if self.model is not None:
            shard.mark_changed(self.model, parameters)

    def _reshard(self) -> None:
        if self.model is not None:
            shard.reshard(self.model)

    def on_validation_end(self) -> None:
        """Evaluation leaves the root gathered, and callbacks swap weights around it: the next step looks again."""
        self._reshard()
        self._invalidate()

    on_validation_start = on_test_start = on_test_end = on_predict_start = on_predict_end = on_validation_end

    # ---- checkpoints, see `saving`

    @contextmanager
    def _stored_weights(self) -> Iterator[torch.nn.Module]:
        """The module as checkpoints see it: fp32 masters or shards, also in the middle of a step."""
        assert self.model is not None
        self._reshard()
        try:
            with self._masters.exposed() if self._masters is not None else nullcontext():
                yield self.model
        finally:
            if self._in_training_step:
                self._root.unshard()
