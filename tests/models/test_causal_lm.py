"""The reference LightningModule: its loss, its optimizer, its scheduler, and that it knows nothing of the suite."""

import ast
import inspect
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from lightning_fms.models import CausalLM, Llama, WarmupCosine, causal_lm, generate
from lightning_fms.models.schedule import cosine_multiplier


def tiny(**changes) -> CausalLM:
    torch.manual_seed(0)
    net = Llama(31, dim=32, n_layers=1, n_heads=2)
    return CausalLM(net, partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1), **changes)


def test_the_module_imports_nothing_of_the_suite() -> None:
    for node in ast.walk(ast.parse(inspect.getsource(causal_lm))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not any(name.startswith("lightning_fms") for name in names)


def test_loss_is_the_mean_over_labels_that_count() -> None:
    module = tiny()
    ids = torch.randint(31, (2, 8))
    labels = torch.randint(31, (2, 8))
    labels[0, :5] = -100
    per_token = F.cross_entropy(module(ids).flatten(0, 1), labels.flatten(), reduction="none")
    expected = per_token.sum() / (labels != -100).sum()
    batch = {"input_ids": ids, "labels": labels, "position_ids": torch.arange(8).expand(2, 8)}
    torch.testing.assert_close(module.training_step(batch, 0), expected)


def test_only_matrices_decay_and_every_parameter_is_trained_once() -> None:
    module = tiny()
    optimizer = module.configure_optimizers()
    decayed, kept = optimizer.param_groups
    assert decayed["weight_decay"] == 0.1
    assert kept["weight_decay"] == 0.0
    assert all(p.ndim == 2 for p in decayed["params"])
    assert all(p.ndim == 1 for p in kept["params"])
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    assert sorted(map(id, trained)) == sorted(map(id, module.parameters()))


def test_the_scheduler_is_stepped_by_the_step() -> None:
    config = tiny(scheduler=partial(WarmupCosine, warmup_steps=2, total_steps=10)).configure_optimizers()
    assert config["lr_scheduler"]["interval"] == "step"
    rates = []
    for _ in range(12):
        rates.append(config["optimizer"].param_groups[0]["lr"])
        config["optimizer"].step()
        config["lr_scheduler"]["scheduler"].step()
    assert rates[:3] == pytest.approx([0.005, 0.01, 0.01])
    assert rates[3:10] == sorted(rates[3:10], reverse=True)
    assert rates[10:] == pytest.approx([0.001, 0.001])


def test_the_warm_up_is_a_tenth_of_a_short_schedule() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    first = [WarmupCosine(optimizer, total_steps=steps).get_last_lr()[0] for steps in (2, 50, 5000)]
    assert first == pytest.approx([1, 1 / 5, 1 / 100])  # of 0, 5 and 100 steps


def test_the_schedule_is_refused_when_its_warm_up_does_not_end() -> None:
    assert cosine_multiplier(5, 0, 10, 0.0) == pytest.approx(0.5)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match="warmup_steps=10 is not below total_steps=10"):
        WarmupCosine(optimizer, warmup_steps=10, total_steps=10)
    with pytest.raises(ValueError, match="final_fraction=2"):
        WarmupCosine(optimizer, warmup_steps=1, total_steps=10, final_fraction=2)


def successor(ids: torch.Tensor) -> torch.Tensor:
    """A model that predicts (token + 1) mod 31 at every position."""
    return 20.0 * F.one_hot((ids + 1) % 31, 31).float()


def test_generation_continues_from_the_last_token_of_the_prompt() -> None:
    assert generate(successor, [3, 4], 5, context=8) == [5, 6, 7, 8, 9]
    assert generate(successor, list(range(20)), 4, context=8) == [20, 21, 22, 23]
    assert generate(successor, [3], 5, context=8, eos_id=6) == [4, 5]


def test_the_number_of_forwards_does_not_depend_on_the_text() -> None:
    calls = []
    generate(lambda ids: calls.append(1) or successor(ids), [3], 7, context=8, eos_id=5)
    assert len(calls) == 7


def test_draws_depend_on_the_seed_alone_and_follow_the_temperature() -> None:
    module = tiny()
    draw = partial(generate, module, [1, 2, 3], 20, context=16, temperature=1.0)
    assert draw(seed=1) == draw(seed=1) != draw(seed=2)
    greedy = generate(module, [1, 2, 3], 20, context=32)
    torch.testing.assert_close(torch.tensor(greedy[0]), module(torch.tensor([[1, 2, 3]]))[0, -1].argmax())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": []}, "prompt"),
        ({"context": 1}, "context=1"),
        ({"temperature": -1.0}, "temperature=-1"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
    ],
)
def test_generation_refuses_what_it_cannot_do(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(successor, **{"prompt": [1], "max_new_tokens": 1, "context": 8, **arguments})
