"""What is recomputed, and what is kept: counted operator by operator, with the gradients of a plain backward."""

from collections import Counter
from typing import Any

import pytest
import torch
from tiny import Block, D, Tiny, fit
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fms.distributed import FSDPCompileStrategy
from lightning_fms.distributed.activation import check_mode, checkpoint_blocks

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*treespec.*")


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def backward(mode: str, **options: Any) -> tuple[Counter[str], list[Tensor]]:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block() for _ in range(4)))
    checkpoint_blocks(dict(blocks.named_children()), mode, **options)
    x = torch.randn(2, 3, D, requires_grad=True)
    with Count() as count:
        blocks(x).square().sum().backward()
    return count.calls, [p.grad for p in blocks.parameters()]


def test_saved_operators_are_not_run_again_and_the_rest_is() -> None:
    plain, gradients = backward("none")
    for options, products, others in [
        ({"mode": "full"}, 1.5, 2),  # nothing in backward needs the output of a block's second product
        ({"mode": "selective", "every": 2}, 1.25, 1.5),
        ({"mode": "selective", "save_ops": "compute"}, 1, 2),
        ({"mode": "selective", "save_ops": ["aten.addmm", "aten.gelu"]}, 1, 1),
    ]:
        calls, again = backward(**options)
        assert calls["addmm"] == products * plain["addmm"], options
        assert calls["gelu"] == others * plain["gelu"], options
        for gradient, expected in zip(again, gradients, strict=True):
            assert torch.equal(gradient, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "selective", "save_ops": ["aten.mm", "aten.matrix"]}, "there is no operator 'aten.matrix' here"),
        ({"mode": "selective", "save_ops": "products"}, "give 'compute', or a list of operators"),
        ({"mode": "full", "save_ops": "compute"}, "does nothing under activation_checkpointing='full'"),
        ({"mode": "budget", "budget": 1.5}, "activation_budget=1.5: give the share"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_mode(**options)


def test_a_budget_without_a_compiler_is_refused() -> None:
    with pytest.raises(ValueError, match="compile='auto' runs none on cpu: set compile=True"):
        fit(strategy=FSDPCompileStrategy(activation_checkpointing="budget"), max_steps=1)


def test_a_budget_keeps_losses_and_is_given_back() -> None:
    before = torch._functorch.config.activation_memory_budget
    seen = []

    class Look(Tiny):
        def on_train_start(self) -> None:
            seen.append(torch._functorch.config.activation_memory_budget)

    strategy = FSDPCompileStrategy(
        activation_checkpointing="budget", activation_budget=0.25, compile=True,
        compile_options={"backend": "aot_eager_decomp_partition"},
    )  # fmt: skip
    run = fit(Look, strategy=strategy, max_steps=3)
    assert seen == [0.25]
    assert torch._functorch.config.activation_memory_budget == before
    torch.testing.assert_close(run.losses, fit(max_steps=3).losses, rtol=1e-6, atol=1e-6)
