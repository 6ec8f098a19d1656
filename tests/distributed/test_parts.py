"""The torch-only parts by themselves."""

import pytest
import torch
from torch import nn

from lightning_fms.distributed.activation import checkpoint_blocks
from lightning_fms.distributed.blocks import find_blocks
from lightning_fms.distributed.master import MasterWeights
from lightning_fms.distributed.materialize import Materializer, check_materializable
from lightning_fms.distributed.mesh import MeshShape, resolve_mesh
from lightning_fms.distributed.rng import seed_micro_batch
from lightning_fms.distributed.shard import choose_groups


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.experts[0](x).tanh()


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.encoder = nn.ModuleDict({"stack": nn.ModuleList(Layer() for _ in range(4))})
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.activations = nn.Sequential(nn.ReLU(), nn.ReLU())
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.encoder["stack"]:
            x = layer(x)
        return self.head(self.mlp(x))


def test_mesh_sizes_follow_from_the_number_of_processes() -> None:
    assert resolve_mesh(8) == MeshShape(1, 8)
    assert resolve_mesh(8, replicate=2) == MeshShape(2, 4)
    assert resolve_mesh(8, replicate="auto", shard=4) == MeshShape(2, 4)
    assert resolve_mesh(8, 2, 4).data_parallel == 8
    assert resolve_mesh(8, tensor=4) == MeshShape(1, 2, 4)
    assert resolve_mesh(8, replicate="auto", shard=2, tensor=2).data_parallel == 4
    with pytest.raises(ValueError, match="replicate=1 x shard='auto' x tensor=3: 3 does not divide the 8 processes"):
        resolve_mesh(8, tensor=3)
    with pytest.raises(ValueError, match="x tensor=2 needs 4 processes, this run has 8"):
        resolve_mesh(8, replicate=1, shard=2, tensor=2)
    with pytest.raises(ValueError, match="tensor=0: give a number of ranks"):
        resolve_mesh(8, tensor=0)


def test_blocks_are_the_outermost_stacks_of_one_class_with_parameters() -> None:
    model = Model()
    assert list(find_blocks(model)) == [f"encoder.stack.{i}" for i in range(4)]
    assert list(find_blocks(model, ["Linear"]))[:2] == ["encoder.stack.0.experts.0", "encoder.stack.0.experts.1"]
    assert find_blocks(nn.Linear(2, 2)) == {}


def test_a_tied_embedding_stays_in_the_root_group_with_a_word() -> None:
    model = Model()
    groups, notes = choose_groups(model, find_blocks(model))
    assert next(iter(groups)) == "embedding"
    assert notes == []
    model = Model(tied=True)
    groups, notes = choose_groups(model, find_blocks(model))
    assert "embedding" not in groups
    assert notes == ["embedding stays in the root group: it shares a parameter with head.weight"]


@pytest.mark.parametrize(("mode", "recomputed"), [("none", []), ("full", [0, 1, 2, 3]), ("selective", [0, 2])])
def test_recomputed_blocks_run_forward_twice_with_the_same_gradients(mode: str, recomputed: list[int]) -> None:
    torch.manual_seed(0)
    model = Model()
    tokens = torch.arange(6)
    model(tokens).square().sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for layer in model.encoder["stack"]:
        layer.calls = 0
    names = checkpoint_blocks(find_blocks(model), mode)
    model(tokens).square().sum().backward()
    assert names == [f"encoder.stack.{i}" for i in recomputed]
    assert [layer.calls for layer in model.encoder["stack"]] == [2 if i in recomputed else 1 for i in range(4)]
    torch.testing.assert_close({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, expected)


def test_meta_weights_do_not_depend_on_the_order_of_filling_and_ties_survive() -> None:
    def fill(reverse: bool) -> dict[str, torch.Tensor]:
        with torch.device("meta"):
            model = Model(tied=True)
        materializer = Materializer(torch.device("cpu"), seed=3)
        for name, module in sorted(model.named_modules(), reverse=reverse):
            if name != "head":  # tied: whichever module comes first draws it
                materializer.fill([(name, module)])
        materializer.fill([("head", model.head)])
        assert model.head.weight is model.embedding.weight
        return model.state_dict()

    torch.manual_seed(1)
    state = torch.get_rng_state()
    torch.testing.assert_close(fill(False), fill(True), rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_meta_modules_without_reset_parameters_are_named() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(2))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Scale())
    with pytest.raises(ValueError, match=r"reset_parameters.*: 1 \(Scale\)"):
        check_materializable(model)


def test_master_weights_accumulate_in_fp32_and_keep_ties_and_lstms_in_step() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False), "lstm": nn.LSTM(3, 3)})
    model["b"].weight = model["a"].weight
    masters = MasterWeights(model)
    x = torch.randn(5, 3, dtype=torch.bfloat16)
    for _ in range(3):
        with masters.active():
            assert model["b"].weight is model["a"].weight
            model["lstm"](model["b"](model["a"](x)))[0].float().sum().backward()
    gradient = model["a"].weight.grad
    assert gradient is not None
    assert gradient.dtype == torch.float32
    assert model["lstm"].weight_ih_l0.grad is not None
    reference = model["a"].weight.detach().clone()
    with torch.no_grad():
        model["a"].weight.add_(1)
    with masters.active():
        assert torch.equal(model["a"].weight, (reference + 1).bfloat16())
        with masters.exposed():
            assert model["a"].weight.dtype == torch.float32
        assert model["a"].weight.dtype == torch.bfloat16


def test_random_numbers_follow_from_seed_step_micro_batch_and_data_rank() -> None:
    def draw(*key: int) -> float:
        seed_micro_batch(*key)
        return float(torch.rand(()))

    assert draw(1, 2, 0, 0) == draw(1, 2, 0, 0)
    assert len({draw(*key) for key in [(1, 2, 0, 0), (2, 2, 0, 0), (1, 3, 0, 0), (1, 2, 1, 0), (1, 2, 0, 1)]}) == 5
