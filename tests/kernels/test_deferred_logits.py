"""Deferred logits: every way to write the loss gives eager's numbers, and the stated ways compute no logits."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fms.kernels import DeferredLogits

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # in Dynamo
B, T, D, V = 2, 9, 8, 13
Y = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(1))
Y[0, 2] = -100

Loss = Callable[[Tensor], Tensor]


class Square(torch.autograd.Function):
    """A loss that looks at tensors from C++ only."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * x).sum()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0]


def flat(logits: Tensor, **options: object) -> Tensor:
    return F.cross_entropy(logits.view(-1, V), Y.view(-1), **options)  # type: ignore[arg-type]


def written_in_place(logits: Tensor) -> Tensor:
    before, view = logits.float().clone(), logits.view(-1, V)
    logits.mul_(2)
    logits[0, 0, 0] = 1.0
    return flat(logits) + F.cross_entropy(view, Y.view(-1)) + flat(before)


def masked_vocabulary(logits: Tensor) -> Tensor:
    logits[..., V - 3 :] = -30.0
    return flat(logits)


def hooked(logits: Tensor) -> Tensor:
    logits.register_hook(lambda grad: 2 * grad)
    return flat(logits)


def hooked_view(logits: Tensor) -> Tensor:
    view = logits.view(-1, V)
    view.register_hook(lambda grad: 2 * grad)
    return F.cross_entropy(view, Y.view(-1)) + flat(logits)


def retained(logits: Tensor) -> Tensor:
    view = logits.float().view(-1, V)
    logits.retain_grad()
    F.cross_entropy(view, Y.view(-1)).backward(retain_graph=True)
    assert logits.grad is not None
    return (logits * logits.grad.detach()).sum()


def of_view_without_gradient(logits: Tensor) -> Tensor:
    with torch.no_grad():
        view = logits.transpose(1, 2)
    return F.cross_entropy(view, Y) + view.square().mean()


def looked_at_in_inference_mode(logits: Tensor) -> Tensor:
    view = logits[:, 1:]
    with torch.inference_mode():
        assert logits.argmax(-1).shape == (B, T)
        made_inside = logits.transpose(1, 2)
        made_inside[:, 0].sum()
    z = logits.logsumexp(-1).square().mean() + view.logsumexp(-1).mean() + made_inside.logsumexp(1).mean()
    return flat(logits) + z + F.cross_entropy(made_inside, Y)


FUSED: dict[str, Loss] = {
    "view": flat,
    "reshape of float": lambda x: F.cross_entropy(x.float().reshape(-1, V), Y.reshape(-1)),
    "module on flatten": lambda x: nn.CrossEntropyLoss(label_smoothing=0.1)(x.flatten(0, 1), Y.flatten()),
    "shift, contiguous": lambda x: F.cross_entropy(x[..., :-1, :].contiguous().view(-1, V), Y[:, 1:].reshape(-1)),
    "shift, reshape": lambda x: F.cross_entropy(x[:, :-1].reshape(-1, x.size(-1)), Y[:, 1:].reshape(-1)),
    "transpose": lambda x: F.cross_entropy(x.transpose(1, 2), Y),
    "permute": lambda x: F.cross_entropy(x.permute(0, 2, 1), Y, reduction="sum", label_smoothing=0.1),
    "permute of rows too": lambda x: F.cross_entropy(x.permute(1, 2, 0), Y.t()),
    "mT": lambda x: F.cross_entropy(x.mT, Y, reduction="none").square().sum(),
    "last token": lambda x: F.cross_entropy(x[:, -1], Y[:, -1]),
    "one token": lambda x: F.cross_entropy(x[1, 3], Y[1, 3]),
    "to": lambda x: F.cross_entropy(x.to(torch.float32).to(x.device).to(dtype=x.dtype).view(-1, V), Y.view(-1)),
    "shift after transpose": lambda x: F.cross_entropy(x.transpose(1, 2)[..., :-1], Y[:, 1:]),
    "one token after transpose": lambda x: F.cross_entropy(x.mT[0, None, :, 2:4], Y[0, None, 2:4], reduction="sum"),
    "unsqueeze": lambda x: F.cross_entropy(x[None].squeeze(0).flatten(0, 1), Y.flatten()),
    "other ignore_index": lambda x: F.cross_entropy(x.view(-1, V), Y.view(-1).clamp(min=0), ignore_index=4),
}
MATERIALISED: dict[str, Loss] = {
    "softmax": lambda x: -x.softmax(-1).log().view(-1, V).gather(1, Y.clamp(0).view(-1, 1)).mean(),
    "z-loss after": lambda x: flat(x) + 0.1 * x.logsumexp(-1).square().mean(),
    "z-loss before": lambda x: 0.1 * x.logsumexp(-1).square().mean() + flat(x),
    "soft cap": lambda x: flat(3 * torch.tanh(x / 3)),
    "class weights": lambda x: flat(x, weight=torch.arange(1.0, V + 1)),
    "accuracy": lambda x: flat(x) + 0 * (x.argmax(-1) == Y).float().mean(),
    "accuracy on a view": lambda x: flat(x) + 0 * (x.view(-1, V).detach().argmax(-1) == 1).sum() + x.sum(),
    "a view made without gradient": lambda x: flat(x) + of_view_without_gradient(x) + 0 * x.mean(),
    "detach": lambda x: flat(x) + x.detach().mean(),
    "autograd function": Square.apply,
    "autograd function on a view": lambda x: Square.apply(x.float().transpose(1, 2)),
    "in place": written_in_place,
    "augmented": lambda x: flat(x.__itruediv__(0.7)),
    "masked vocabulary": masked_vocabulary,
    "memory handed out": lambda x: x.sum() + 0 * x.data.sum(),
    "class probabilities": lambda x: F.cross_entropy(x.view(-1, V), torch.ones(B * T, V) / V),
    "hook": hooked,
    "hook on a view": hooked_view,
    "retained gradient": retained,
    "a look in inference mode": looked_at_in_inference_mode,
    "hardtanh in place": lambda x: F.hardtanh(x, -0.1, 0.1, inplace=True).sum() + flat(x),
    "ReLU module in place": lambda x: nn.ReLU(True)(x.view(-1, V)).sum() + flat(x),
    "threshold in place": lambda x: F.threshold(x, 0.2, -1.0, inplace=True).sum() + flat(x),
    "dropout in place": lambda x: F.dropout(x, 1.0, inplace=True).sum() + flat(x),
    "part of the vocabulary": lambda x: F.cross_entropy(x[..., :5].reshape(-1, 5), Y.reshape(-1).clamp(max=4)),
    "float64": lambda x: F.cross_entropy(x.double().view(-1, V), Y.view(-1)).float(),
}


@pytest.fixture
def leaves() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).requires_grad_() for s in ((B, T, D), (V, D), (V,))]


@pytest.fixture(autouse=True)
def counter() -> None:
    DeferredLogits.materialisations = 0


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", [*FUSED, *MATERIALISED])
def test_loss_and_gradients_equal_eager(name: str, bias: bool, leaves: list[Tensor]) -> None:
    loss, inputs = {**FUSED, **MATERIALISED}[name], leaves[: 2 + bias]
    hidden, weight, *rest = inputs
    ours = loss(DeferredLogits.wrap(hidden * 1, weight, *rest))
    gradients = torch.autograd.grad(ours, inputs)
    assert DeferredLogits.materialisations == (name in MATERIALISED)
    theirs = loss(F.linear(hidden * 1, weight, *rest))
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradients, torch.autograd.grad(theirs, inputs))


def test_looks_like_a_tensor_without_being_computed(leaves: list[Tensor]) -> None:
    ours, theirs = DeferredLogits.wrap(*leaves), F.linear(*leaves)
    assert isinstance(ours, Tensor)
    for look in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "is_cuda"):
        assert getattr(ours, look) == getattr(theirs, look), look
    for a, b in ((ours, theirs), (ours[:, 1:], theirs[:, 1:]), (ours.transpose(1, 2), theirs.transpose(1, 2))):
        assert (a.size(), a.stride(), a.numel(), len(a)) == (b.size(), b.stride(), b.numel(), len(b))
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        ours[:, 1:].view(-1, V)
    assert not ours.detach().requires_grad
    assert DeferredLogits.materialisations == 0


def test_printing_pickling_and_copying_give_the_real_thing(leaves: list[Tensor]) -> None:
    ours, theirs = DeferredLogits.wrap(*leaves), F.linear(*leaves)
    assert repr(ours).splitlines()[0] == repr(theirs).splitlines()[0]
    for copied in (pickle.loads(pickle.dumps(ours.detach())), copy.deepcopy(ours.detach()), ours.detach().clone()):
        assert type(copied) is Tensor
        torch.testing.assert_close(copied, theirs.detach())
    assert DeferredLogits.materialisations == 1


def test_dtype_is_that_of_the_real_head_under_autocast(leaves: list[Tensor]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = DeferredLogits.wrap(*leaves), F.linear(*leaves)
        assert ours.dtype == theirs.dtype == torch.bfloat16
        losses = flat(ours), flat(theirs)
    assert losses[0].dtype == losses[1].dtype
    exact = flat(F.linear(*(t.double() for t in leaves)))
    true = torch.autograd.grad(exact, leaves)
    got, eager = (torch.autograd.grad(loss, leaves) for loss in losses)
    for mine, theirs, t in zip(got, eager, true, strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine - t).norm() <= 1.3 * (theirs - t).norm()  # 17 tokens: noise
    torch.testing.assert_close(ours.float(), F.linear(*(t.bfloat16() for t in leaves)).float())  # outside the context


def test_loss_dtype_without_autocast_is_the_logits(leaves: list[Tensor]) -> None:
    low = [t.detach().bfloat16().requires_grad_() for t in leaves]
    assert flat(DeferredLogits.wrap(*low)).dtype == torch.bfloat16
    assert flat(DeferredLogits.wrap(*low).float()).dtype == torch.float32


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation(mode: Callable[[], torch.no_grad], leaves: list[Tensor]) -> None:
    with mode():
        ours, theirs = DeferredLogits.wrap(*leaves), F.linear(*leaves)
        torch.testing.assert_close(flat(ours), flat(theirs))
        assert DeferredLogits.materialisations == 0
        assert torch.equal(ours[:, -1].argmax(-1), theirs[:, -1].argmax(-1))
    assert not ours.requires_grad
    if mode is torch.no_grad:
        assert not flat(ours).requires_grad
        assert not ours.softmax(-1).requires_grad


def test_generation_computes_the_last_token_only(leaves: list[Tensor]) -> None:
    seen = []
    real = torch.nn.functional.linear
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(F, "linear", lambda x, *rest: (seen.append(x.shape), real(x, *rest))[1])
        DeferredLogits.wrap(*leaves)[:, -1, :].softmax(-1)
    assert seen == [(B, D)]


def test_stale_weight_is_an_error(leaves: list[Tensor]) -> None:
    for use in (flat, torch.sum):
        ours = DeferredLogits.wrap(*leaves)
        with torch.no_grad():
            leaves[1].add_(1)
        with pytest.raises(RuntimeError, match="weight changed after these logits were made"):
            use(ours)


def test_resharded_weight_is_an_error(leaves: list[Tensor]) -> None:
    weight = leaves[1].detach().clone()
    ours = DeferredLogits.wrap(leaves[0], weight)
    weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="weight was resharded"):
        flat(ours)


def test_used_before_the_weight_changed_is_fine(leaves: list[Tensor]) -> None:
    ours = DeferredLogits.wrap(*leaves)
    before = ours.sum()
    with torch.no_grad():
        leaves[1].add_(1)
    torch.testing.assert_close(ours.sum(), before)


def test_compiled_loss_function_runs_fused(leaves: list[Tensor]) -> None:
    compiled = torch.compile(lambda x: F.cross_entropy(x.float().view(-1, V), Y.view(-1)), backend="aot_eager")
    ours = compiled(DeferredLogits.wrap(*leaves))
    torch.testing.assert_close(ours, flat(F.linear(*leaves)))
    torch.testing.assert_close(torch.autograd.grad(ours, leaves), torch.autograd.grad(flat(F.linear(*leaves)), leaves))
    assert DeferredLogits.materialisations == 0
