"""Matrices split over tensor ranks: losses, gradients, clipping and checkpoints are those of one process."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from gloo_world import once, run_world
from tiny import ROWS, Block, D, Recorder, Rows, Run, Tiny, V, trainer, whole_weights
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_fms.callbacks import InitialWeights
from lightning_fms.distributed import FSDPCompileStrategy
from lightning_fms.distributed.tensor_parallel import Split
from lightning_fms.distributed.tensor_plan import find_plan
from lightning_fms.kernels import TritonKernels
from lightning_fms.models import Llama
from lightning_fms.precision import FP8Precision
from tests.distributed.test_parity import assert_same_run

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*", "ignore:.*LeafSpec.*", "ignore:.*`isinstance.treespec.*"
)
# A vocabulary of 29 does not divide; norms are named by no entry, and so lie on another mesh than the rest.
PLAN = {
    "embedding": "embedding_rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "head": "colwise_gather_output",
}
OPTIONS: dict[str, Any] = {
    "max_steps": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "val_check_interval": 4
}  # fmt: skip
# Processes, replicas among them, and what is run there; two tensor ranks each.
MESHES = {
    "2 ranks": (2, 1, ("plain", "sequence", "tied", "transformers")),
    "4 ranks": (4, 1, ("plain", "kernels", "recomputed and compiled")),
    "4 ranks, 2 replicas": (4, 2, ("sequence",)),
    "6 ranks": (6, 1, ("sequence",)),
}


class DataRows(Rows):
    """The rows of a data rank, which two tensor ranks read alike."""

    def __init__(self, batches: int, seed: int = 0) -> None:
        super().__init__(batches, seed)
        generator = torch.Generator().manual_seed(seed)
        rank, world = int(os.environ.get("RANK", "0")) // 2, max(1, int(os.environ.get("WORLD_SIZE", "1")) // 2)
        self._rows = torch.randint(0, V, (batches, ROWS, 6), generator=generator)[:, rank::world]


class OwnLlama(Tiny):
    """Tokens are split between the blocks; the embedding is tied to the head."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__(n_layers=0)
        self.embedding, self.layers, self.norm, self.head = None, None, None, None
        self.net = Llama(V, 16, n_layers=2, n_heads=4, n_kv_heads=2, tie_embeddings=tied, init_std=0.3)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.net(tokens_BT)

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch[:, :5])  # 4 tokens

    def configure_optimizers(self) -> Any:  # AdamW is in `plain`; DTensor works out each of its operations on each mesh
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class TiedLlama(OwnLlama):
    def __init__(self) -> None:
        super().__init__(tied=True)


class TheirLlama(OwnLlama):
    """Brings the plan that `transformers` has for it."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, initializer_range=0.3, use_cache=False,
        )  # fmt: skip
        self.net = LlamaForCausalLM(config)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.net(input_ids=tokens_BT).logits


CASES: dict[str, tuple[Any, Any]] = {
    "plain": (Tiny, PLAN),
    "sequence": (OwnLlama, "auto"),
    "tied": (TiedLlama, "llama"),
    "transformers": (TheirLlama, "auto"),
    "kernels": (OwnLlama, "auto"),
    "recomputed and compiled": (OwnLlama, "auto"),
}
# What is evaluated would be compiled once more.
COMPILED = {"activation_checkpointing": "full", "compile": True, "compile_options": {"backend": "aot_eager"}}


def run(make: Any, **options: Any) -> Run:
    pl.seed_everything(7, verbose=False)
    module, recorder = make().double(), Recorder()  # so that a wrong share is told from another order of summing
    path, save = options.pop("ckpt_path", None), options.pop("save", None)
    fitted = trainer(recorder, **options)
    fitted.fit(module, DataRows(8), DataRows(2, seed=1), ckpt_path=path)
    if save is not None:
        fitted.save_checkpoint(save)
    return recorder.run


def split_run(name: str, replicate: int) -> Run:
    make, plan = CASES[name]
    compiled = name == "recomputed and compiled"
    options = COMPILED if compiled else {}
    strategy = FSDPCompileStrategy(replicate=replicate, tensor=2, tensor_plan=plan, **options)
    return run(
        make,
        strategy=strategy,
        callbacks=[TritonKernels()] if name == "kernels" else [],
        **OPTIONS,
        **({"limit_val_batches": 0} if compiled else {}),
    )


def split_runs(replicate: int, names: tuple[str, ...]) -> dict[str, Run]:
    return {name: split_run(name, replicate) for name in names}


def save_runs(folder: Path) -> None:
    for form in ("sharded", "consolidated"):
        strategy = FSDPCompileStrategy(tensor=2, tensor_plan=PLAN, checkpoint_format=form)
        run(Tiny, strategy=strategy, max_steps=2, save=folder / form)


def resumed(path: Path, tensor: int) -> Run:
    strategy = FSDPCompileStrategy(tensor=tensor, tensor_plan=PLAN)
    return run(Tiny, strategy=strategy, max_steps=4, ckpt_path=path)


def stock_runs(_: Path) -> dict[str, Run]:
    return {
        name: run(CASES[name][0], strategy="auto", **OPTIONS) for name in ("plain", "sequence", "tied", "transformers")
    }


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    return once(tmp_path_factory, "tensor-stock", stock_runs)


@pytest.mark.parametrize("mesh", MESHES)
def test_losses_and_gradients_equal_stock_lightning_on_any_mesh(stock, mesh: str, tmp_path: Path) -> None:
    size, replicate, names = MESHES[mesh]
    for name, result in run_world(size, split_runs, tmp_path, replicate, names)[0].items():
        assert_same_run(result, stock[name if name in stock else "sequence"], tolerance=2e-6)


def test_a_checkpoint_of_split_matrices_goes_on_with_as_many_of_them_less_or_none(tmp_path: Path) -> None:
    whole = run(Tiny, strategy="auto", max_steps=4)
    run_world(4, save_runs, tmp_path / "four", tmp_path)
    for form, size in (("sharded", 2), ("consolidated", 4)):
        many = run_world(size, resumed, tmp_path / form[:2], tmp_path / form, 2)[0]
        for rest in (many, resumed(tmp_path / form, 1)):
            torch.testing.assert_close(rest.losses, whole.losses[2:], rtol=2e-6, atol=2e-6)
            torch.testing.assert_close(rest.weights, whole.weights, rtol=2e-4, atol=2e-4)


class OnlyLlama(OwnLlama):
    """Holds nothing else, as what `transformers` saved."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = None


def begun(weights: Path) -> dict[str, Tensor]:
    """The weights before the first step, of a run that begins with those of a folder."""
    first: dict[str, Tensor] = {}

    class Start(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            first.update(whole_weights(module))

    strategy = FSDPCompileStrategy(tensor=2)
    run(OnlyLlama, strategy=strategy, max_steps=1, callbacks=[InitialWeights(str(weights)), Start()])
    return first


def test_safetensors_of_transformers_come_into_shards_of_split_matrices(tmp_path: Path) -> None:
    torch.manual_seed(3)
    shape = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    theirs = LlamaForCausalLM(LlamaConfig(vocab_size=V, num_key_value_heads=2, **shape))
    theirs.save_pretrained(tmp_path / "theirs")
    names = {
        "net.embedding.weight": "model.embed_tokens.weight",
        "net.layers.1.attention.q_proj.weight": "model.layers.1.self_attn.q_proj.weight",
        "net.layers.1.ffn.down_proj.weight": "model.layers.1.mlp.down_proj.weight",
        "net.norm.weight": "model.norm.weight",
        "net.head.weight": "lm_head.weight",
    }
    for start in run_world(4, begun, tmp_path / "world", tmp_path / "theirs"):
        for ours, name in names.items():
            assert torch.equal(start[ours].float(), theirs.state_dict()[name]), ours


def fit_fp8() -> str:
    options = {"plugins": [FP8Precision("tensorwise", emulate=True)], "strategy": FSDPCompileStrategy(tensor=2)}
    with pytest.raises(ValueError, match="tensor parallelism") as caught:
        run(OwnLlama, **options)
    return str(caught.value)


def test_fp8_beside_tensor_ranks_is_refused_before_a_step(tmp_path: Path) -> None:
    assert all("set tensor=1 in the strategy" in message for message in run_world(2, fit_fp8, tmp_path))


class Hole(OwnLlama):
    """A gain on the residual stream that the plan does not know: each rank would learn it from its own tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(16))
        self.net.layers[0].register_forward_pre_hook(lambda block, inputs: (inputs[0] * self.gain, *inputs[1:]))


def fit_hole() -> str:
    with pytest.raises(ValueError, match="tensor_plan") as caught:
        run(Hole, strategy=FSDPCompileStrategy(tensor=2))
    return str(caught.value)


def test_a_plan_with_a_hole_is_found_at_the_first_step(tmp_path: Path) -> None:
    for message in run_world(2, fit_hole, tmp_path):
        assert "the gradient of gain (1 in all) differs between tensor ranks" in message


# -- plans ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"layers.*.middle": "colwise"},
            r"'layers\.\*\.middle' names no module.*the parts at the top are embedding, layers",
        ),
        ({"layers.*.up": "column"}, "'column' is no style; give one of colwise"),
        ({"layers.*.norm": "colwise"}, "layers.0.norm is a LayerNorm; 'colwise' is for nn.Linear or nn.Embedding"),
        ("mamba", "tensor_plan='mamba': give 'auto', 'llama', or a mapping of names"),
        ("llama", "no part of this model has the modules embedding, layers"),
        ("auto", "this model has none: give tensor_plan={module name: style}, or an attribute `tensor_parallel_plan`"),
    ],
)
def test_a_plan_that_does_not_fit_is_one_clear_error(plan: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Split(Tiny(), plan, 2)


def test_widths_that_do_not_divide_are_refused_and_vocabularies_are_not() -> None:
    Split(Tiny(), PLAN, 2)  # 29 tokens
    with pytest.raises(ValueError, match=r"layers\.0\.up, 'colwise': 24 outputs do not divide by 5 tensor ranks"):
        Split(Tiny(), PLAN, 5)


def test_a_module_brings_its_plan_with_names_relative_to_itself() -> None:
    module = nn.Sequential(nn.Embedding(4, D), Block(), Block())
    module[1].tensor_parallel_plan = {"up": "colwise", "down": ("rowwise",)}
    source, entries = find_plan(dict(module.named_modules()), "auto")
    assert (source, entries) == ("`tensor_parallel_plan` of the module", {"1.up": "colwise", "1.down": ("rowwise",)})
    assert Split(module, {"*.up": ColwiseParallel()}, 2).styles.keys() == {"1.up", "2.up"}


def test_the_shipped_plan_is_found_wherever_the_model_is() -> None:
    source, entries = find_plan(dict(OwnLlama().named_modules()), "auto")
    assert source == "llama"
    assert entries["net.layers.*.ffn.up_proj"] == "colwise"
