"""The callback on modules it has never seen: what is found, what is refused and why, and that it can be undone."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from user_models import D, Decoder, RMSNorm, TiedDecoder, V, ZeroCentredRMSNorm

from lightning_fms.kernels import DeferredLogits, TritonKernels
from lightning_fms.kernels.swap import find_head, is_swapped
from lightning_fms.models import Llama

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # in Dynamo
IDS = torch.randint(0, V, (2, 11), generator=torch.Generator().manual_seed(0))


def kernels(**options: object) -> TritonKernels:
    return TritonKernels(**{"linear_cross_entropy": True, "rms_norm": True, **options})  # type: ignore[arg-type]


def transformers_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 (seconds, only for the tests that use it)

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=V,
            hidden_size=D,
            intermediate_size=2 * D,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def transformers_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def transformers_shifted_loss(model: nn.Module, ids: Tensor) -> Tensor:
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
    return model(input_ids=ids, labels=labels, shift_labels=labels).loss


def own_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return model.loss(ids)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor], str, int]] = {
    "own": (Decoder, own_loss, "to_vocabulary", 4),
    "tied": (TiedDecoder, own_loss, "lm_head", 3),
    "transformers": (transformers_llama, transformers_loss, "lm_head", 5),
    "transformers, shift_labels": (transformers_llama, transformers_shifted_loss, "lm_head", 5),
}


def step(model: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    value = loss(model, IDS)
    value.backward()
    return {"loss": value.detach(), **{n: p.grad.clone() for n, p in model.named_parameters()}}


@pytest.mark.parametrize("case", CASES)
def test_same_numbers_no_logits_same_names_and_undone(case: str) -> None:
    make, loss, head, norms = CASES[case]
    torch.manual_seed(0)
    model = make()
    parameters, state = dict(model.named_parameters()), list(model.state_dict())
    plain = step(model, loss)
    callback = kernels()
    callback.transform_module(model)
    report = callback.report
    callback.transform_module(model)
    assert callback.report == report  # again: nothing changes
    assert head in report[0]
    assert "linear cross-entropy" in report[0]
    assert sum(is_swapped(m) for m in model.modules()) == norms + 1
    DeferredLogits.materialisations = 0
    torch.testing.assert_close(step(model, loss), plain)
    assert DeferredLogits.materialisations == 0
    assert list(model.state_dict()) == state
    assert all(p is parameters[n] for n, p in model.named_parameters())
    torch.testing.assert_close(step(copy.deepcopy(model), loss), plain)
    callback.restore()
    assert not any(is_swapped(m) or "forward" in m.__dict__ for m in model.modules())
    torch.testing.assert_close(step(model, loss), plain, rtol=0, atol=0)


@pytest.mark.parametrize("name", [None, "to_vocabulary"])
def test_a_head_that_became_another_class_after_the_swap_is_no_second_problem(name: str | None) -> None:
    class Other(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input)

    model, callback = Decoder(), kernels(rms_norm=False, head=name)
    callback.transform_module(model)
    report = callback.report
    model.to_vocabulary.__class__ = Other
    callback.transform_module(model)
    assert callback.report == report


def test_generation_of_transformers_works() -> None:
    torch.manual_seed(0)
    model = transformers_llama().eval()
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(IDS), "pad_token_id": 0}
    plain = model.generate(IDS, **options)
    kernels().transform_module(model)
    assert torch.equal(model.generate(IDS, **options), plain)


def test_the_suites_own_model() -> None:
    model = Llama(vocab_size=V, dim=16, n_layers=2, n_heads=2)
    callback = kernels()
    callback.transform_module(model)
    assert callback.report == [
        "linear cross-entropy: deferred logits at head (as large as the vocabulary)",
        "RMSNorm: fused at layers.0.attention_norm, layers.0.ffn_norm, ... norm (5 in all)",
    ]


def test_a_module_on_meta_is_swapped_too() -> None:
    with torch.device("meta"):
        model = Decoder()
    callback = kernels()
    callback.transform_module(model)
    assert sum(is_swapped(m) for m in model.modules()) == 5


def test_alike_but_different_norms_are_left_alone_with_a_reason() -> None:
    model = Decoder(ZeroCentredRMSNorm)
    callback = kernels()
    callback.transform_module(model)
    (reason,) = [line for line in callback.report if "ZeroCentredRMSNorm" in line]
    assert "numbers are not an RMSNorm's" in reason
    assert "final (4 in all)" in reason


class WithBuffer(RMSNorm):
    def __init__(self) -> None:
        super().__init__(D)
        self.register_buffer("seen", torch.zeros(1))


class WrongEpsilonRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


WithBuffer.__name__ = "BufferedRMSNorm"


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (nn.RMSNorm((3, D)), "not one vector"),
        (WithBuffer(), "modules or buffers"),
        (WrongEpsilonRMSNorm(D), "off by"),
    ],
)
def test_odd_norms_are_refused(norm: nn.Module, reason: str) -> None:
    callback = kernels(linear_cross_entropy=False)
    callback.transform_module(nn.ModuleDict({"norm": norm}))
    assert reason in callback.report[-1]
    assert not is_swapped(norm)


@pytest.mark.parametrize("norm", [nn.RMSNorm(D), RMSNorm(D), nn.RMSNorm(D, elementwise_affine=False)])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_a_norm_keeps_its_output_dtype(
    norm: nn.Module, autocast: bool, dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    norm = copy.deepcopy(norm).to(weight_dtype)
    x = torch.randn(3, D).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain = norm(x)
        kernels(linear_cross_entropy=False).transform_module(nn.ModuleList([norm]))
        fused = norm(x)
    assert is_swapped(norm)
    assert fused.dtype == plain.dtype
    torch.testing.assert_close(fused, plain, rtol=2e-2, atol=2e-2)


def test_swapped_modules_compile_without_a_graph_break() -> None:
    torch.manual_seed(0)
    model = Decoder()
    plain = step(model, own_loss)
    kernels().transform_module(model)
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    DeferredLogits.materialisations = 0
    torch.testing.assert_close(step(model, own_loss), plain)
    assert DeferredLogits.materialisations == 0


def test_a_compiled_whole_model_gives_real_logits() -> None:
    model = Decoder()
    plain = model(IDS)
    kernels().transform_module(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(IDS)
    assert type(compiled) is Tensor
    torch.testing.assert_close(compiled, plain)


def test_head_is_not_guessed() -> None:
    two = Decoder()
    two.second_head = nn.Linear(D, V)
    assert find_head(two)[0] is None
    assert "head='second_head'" in find_head(two)[1]
    assert find_head(two, "to_vocabulary")[0] == "to_vocabulary"
    assert find_head(nn.Sequential(nn.Linear(3, 4)))[1].startswith("the module has no nn.Embedding")
    padded = Decoder()
    padded.to_vocabulary = nn.Linear(D, V + 11)
    assert f"size of a vocabulary ({V})" in find_head(padded)[1]
    square = Decoder()
    square.embed = nn.Embedding(D, D)  # vocabulary as large as the width: Linears inside the blocks look like a head
    square.to_vocabulary = nn.Linear(D, D)
    square.blocks[0].ff[0] = nn.Linear(D, D)
    assert find_head(square)[0] == "to_vocabulary"
    with pytest.raises(ValueError, match=r"head='lm_head' is no nn\.Linear"):
        kernels(head="lm_head").transform_module(Decoder())


def test_defaults_on_cpu_and_options() -> None:
    callback = TritonKernels()
    model = Decoder()
    callback.transform_module(model)
    assert not any(is_swapped(m) for m in model.modules())
    assert [line.split(":")[1].strip() for line in callback.report] == ["linear_cross_entropy", "rms_norm"]
    reference = TritonKernels(backend="reference", verify=True)
    reference.transform_module(model)
    assert is_swapped(model.to_vocabulary)
    with pytest.raises(ValueError, match="rms_norm='yes'"):
        TritonKernels(rms_norm="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backend='cuda'"):
        TritonKernels(backend="cuda")
