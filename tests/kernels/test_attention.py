"""What stands in for `scaled_dot_product_attention`: same numbers, in one graph, and PyTorch's own again at the end."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.attention.flex_attention as flex
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention

from lightning_fms.kernels import TritonKernels, attention, flex_sdpa, sdpa
from lightning_fms.models import Llama

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # in Dynamo
]
IDS = torch.randint(0, 53, (2, 17), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def replaced() -> Iterator[sdpa.ReplacedSDPA]:
    places = sdpa.ReplacedSDPA()
    yield places
    places.restore()


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention refuses a backward on CPU; its plain formula has one."""
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)


def step(model: Llama, compiled: bool = False) -> list[Tensor]:
    model.zero_grad()
    forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager") if compiled else model.forward
    y = forward(IDS)
    y.square().mean().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_a_model_in_one_graph_computes_the_same_with_either_replacement(
    replaced: sdpa.ReplacedSDPA, flex_on_cpu: None
) -> None:
    torch.manual_seed(0)
    model = Llama(53, 32, 1, 4, 2)
    plain, order = step(model), torch._C._get_sdp_priority_order()
    for function in (attention.preferring("cudnn"), flex_sdpa.flex_sdpa):
        replaced.replace(function)
        torch.testing.assert_close(step(model), plain)
        torch.testing.assert_close(step(model, compiled=True), plain)
        replaced.restore()
        assert torch._C._get_sdp_priority_order() == order
    torch.testing.assert_close(step(model), plain, rtol=0, atol=0)


def test_names_that_were_imported_are_replaced_and_put_back(replaced: sdpa.ReplacedSDPA) -> None:
    def mine(*_: Tensor) -> Tensor:
        return torch.zeros(())

    own = scaled_dot_product_attention
    replaced.replace(mine)
    assert scaled_dot_product_attention is mine
    assert F.scaled_dot_product_attention is mine
    with pytest.raises(RuntimeError, match="already"):
        sdpa.ReplacedSDPA().replace(mine)
    replaced.restore()
    assert scaled_dot_product_attention is own
    assert F.scaled_dot_product_attention is own


def test_cudnn_comes_first_only_without_a_mask_and_where_the_user_left_the_choice_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    firsts = []

    def seen(*_: object, **__: object) -> Tensor:
        firsts.append(torch._C._get_sdp_priority_order()[0])
        return torch.zeros(())

    monkeypatch.setattr(attention, "SDPA", seen)
    q, mask = torch.randn(1, 2, 4, 8), torch.ones(4, 4, dtype=torch.bool)
    default = torch._C._get_sdp_priority_order()[0]
    attend = attention.preferring("cudnn")
    attend(q, q, q, is_causal=True)
    attend(q, q, q, mask)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        attend(q, q, q, is_causal=True)
    assert firsts == [int(SDPBackend.CUDNN_ATTENTION), default, default]


@pytest.mark.parametrize("shapes", [((3, 17, 8),) * 3, ((2, 2, 1, 5, 8), (2, 2, 1, 9, 8), (2, 2, 1, 9, 8))])
def test_flex_takes_inputs_of_any_number_of_dimensions(shapes: tuple[tuple[int, ...], ...]) -> None:
    q, k, v = (torch.randn(shape) for shape in shapes)
    torch.testing.assert_close(flex_sdpa.flex_sdpa(q, k, v, scale=0.3), sdpa.SDPA(q, k, v, scale=0.3))
    torch.testing.assert_close(flex_sdpa.flex_sdpa(q, k, v, is_causal=True), sdpa.SDPA(q, k, v, is_causal=True))


@pytest.mark.parametrize("shape", [(17, 17), (2, 1, 17, 17), (1, 17)])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_flex_takes_masks_as_eager_does(shape: tuple[int, ...], kind: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 3, 17, 8) for _ in range(3))
    mask = torch.rand(shape) > 0.3 if kind == torch.bool else torch.randn(shape)
    if kind == torch.bool:
        mask[..., 0] = True
    torch.testing.assert_close(flex_sdpa.flex_sdpa(q, k, v, mask), sdpa.SDPA(q, k, v, mask))


@pytest.mark.parametrize(("queries", "keys"), [(256, 256), (300, 300), (384, 128), (100, 300), (128, 384), (1, 1)])
def test_causal_tiles_cover_what_flex_finds_by_looking(queries: int, keys: int) -> None:
    ours = flex_sdpa.causal_blocks(queries, keys, torch.device("cpu"))
    theirs = create_block_mask(flex_sdpa._causal, None, None, queries, keys, device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    backward = torch.zeros_like(ours.to_dense()[0, 0].T)  # what the gradients of keys and values go through
    for counts, tiles in ((ours.q_num_blocks, ours.q_indices), (ours.full_q_num_blocks, ours.full_q_indices)):
        for key in range(len(backward)) if counts is not None else ():
            backward[key].index_add_(
                0, tiles[0, 0, key, : counts[0, 0, key]], backward.new_ones(int(counts[0, 0, key]))
            )
    assert torch.equal(backward, ours.to_dense()[0, 0].T)


def test_what_flex_cannot_do_is_refused() -> None:
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match=r"dropout_p=0\.1"):
        flex_sdpa.flex_sdpa(q, q, q, dropout_p=0.1)
    with pytest.raises(ValueError, match="attn_mask without a gradient"):
        flex_sdpa.flex_sdpa(q, q, q, torch.zeros(4, 4, requires_grad=True))


def test_options() -> None:
    with pytest.raises(ValueError, match="attention='fast'"):
        TritonKernels(attention="fast")
    callback = TritonKernels(attention="cudnn")
    callback.transform_module(Llama(53, 32, 1, 4))
    if not torch.cuda.is_available():
        assert any("attention='cudnn': there is no choice on cpu" in line for line in callback.report)
