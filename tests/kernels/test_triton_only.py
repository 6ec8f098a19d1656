"""The mode without CUDA's libraries: how their kernels are known, and what is refused or named. The kernels themselves run
in interpreted_kernels.py, and `benchmarks/triton_only.py` looks at what really ran on a GPU."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType

from lightning_fms.kernels import TritonKernels, callback
from lightning_fms.kernels.library_kernels import cuda_libraries_used
from lightning_fms.kernels.swap import Swaps, swap_rms_norms
from lightning_fms.kernels.triton_only import library_layers, swap_linears
from lightning_fms.models import Llama

LIBRARIES = {
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN": "cuBLAS",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "cuBLAS",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>": "cuBLAS",
    "void gemv2T_kernel_val<int, int, __nv_bfloat16>": "cuBLAS",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128": "cuDNN",
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x>": "CUTLASS",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80": "CUTLASS",
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel": "FlashAttention",
}
OTHERS = [
    "triton_tem_fused_mm_t_7",
    "triton_tem_fused__fused_sdp_flex_attention_backward_3",
    "triton_poi_fused__to_copy_silu_mul_2",
    "triton_per_fused_gemm_like_name",
    "_matmul_kernel",
    "_rows_kernel",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>",
    "Memcpy DtoD (Device -> Device)",
    "ncclDevKernel_AllGather_RING_LL",
]


@dataclass
class Event:
    name: str
    device_type: DeviceType = DeviceType.CUDA
    is_user_annotation: bool = False


def test_kernels_of_libraries_are_known_by_name() -> None:
    found = cuda_libraries_used([Event(name) for name in (*LIBRARIES, *OTHERS, *LIBRARIES)])
    assert found == sorted(f"{library}: {name}" for name, library in LIBRARIES.items())
    assert cuda_libraries_used(LIBRARIES) == found
    assert cuda_libraries_used([Event("gemm", DeviceType.CPU), Event("gemm", is_user_annotation=True)]) == []


def test_events_of_a_real_profile_are_understood() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(4, 4) @ torch.ones(4, 4)
    assert cuda_libraries_used(profiler.events()) == []


def test_layers_that_would_call_a_library_are_named() -> None:
    module = nn.ModuleDict({"conv": nn.Conv1d(2, 2, 3), "rnn": nn.GRU(4, 4), "fine": nn.Linear(4, 4)})
    assert library_layers(module) == [
        "Conv1d calls a CUDA library outside compiled blocks: conv",
        "GRU calls a CUDA library outside compiled blocks: rnn",
    ]


def test_linears_and_norms_step_aside_in_a_compiled_block() -> None:
    net, swaps = Llama(53, 32, 1, 4), Swaps()
    block, tokens = net.layers[0], torch.arange(8)[None] % 53
    calls: list[tuple] = []
    watch = block.register_forward_pre_hook(
        lambda _, inputs: calls.append([t.detach() for t in inputs if t is not None])
    )
    net(tokens)
    watch.remove()
    expected = block(*calls[0])
    assert len(swap_linears(net, swaps)) == 7 + 1  # attention, MLP, head
    swap_rms_norms(net, swaps, "auto", True)
    torch.testing.assert_close(torch.compile(block, backend="eager", fullgraph=True)(*calls[0]), expected)
    swaps.restore()


def test_each_kernel_is_verified_once_and_the_matrix_product_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[tuple[str, str]] = []
    for name in ("linear_cross_entropy", "rms_norm", "matmul"):
        monkeypatch.setattr(
            callback, f"verify_{name}", lambda device, backend="triton_only", name=name: checked.append((name, backend))
        )
    monkeypatch.setattr(callback, "INTERPRETED", True)
    kernels = TritonKernels(triton_only=True, verify=True)
    try:
        for _ in range(2):
            kernels.transform_module(Llama(53, 32, 1, 4))
    finally:
        kernels.restore()
    assert checked == [("linear_cross_entropy", "auto"), ("rms_norm", "auto"), ("matmul", "triton_only")]


def test_options_that_contradict_it_are_refused_and_a_device_without_triton_is_said() -> None:
    with pytest.raises(ValueError, match="attention='cudnn'"):
        TritonKernels(triton_only=True, attention="cudnn")
    with pytest.raises(ValueError, match="triton_only=True"):
        TritonKernels(backend="triton_only")
    if not torch.cuda.is_available():
        callback = TritonKernels(triton_only=True)
        callback.transform_module(Llama(53, 32, 1, 4))
        assert any("triton_only: there is no Triton on cpu" in line for line in callback.report)
        assert torch._inductor.config.max_autotune_gemm_backends != "TRITON"
