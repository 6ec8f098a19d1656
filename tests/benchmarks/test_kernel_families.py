"""Names of kernels as an H200 shows them, and the family that each belongs to."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def families(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("kernel_families")


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN", "gemm bf16"),
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_TNT", "gemm bf16"),
        ("nvjet_qqtst_128x256_128x4_2x1_v_bz_coopA_TNT", "gemm fp8"),
        ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128", "gemm fp8"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::float_e4m3_t>", "gemm fp8"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128x128", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>", "attention"),
        ("triton_red_fused__log_softmax__to_copy_nll_loss_forward_view_0", "loss"),
        ("_rows_kernel", "loss"),
        ("liger_cross_entropy_kernel", "loss"),
        ("triton_red_fused__fused_rms_norm__to_copy_add_3", "RMSNorm"),
        ("_rms_norm_backward_kernel", "RMSNorm"),
        ("triton_red_fused_abs_max_silu_mul_4", "fp8 scales and casts"),
        ("triton_poi_fused_mul_silu_5", "elementwise, compiled"),
        ("void at::native::multi_tensor_apply_kernel<at::native::FusedOptimizerTensorListMetadata<4>, "
         "at::native::FusedAdamMathFunctor<float, 4, (at::native::ADAM_MODE)1, false>>", "optimizer"),
        ("void at::native::multi_tensor_apply_kernel<TensorListMetadata<1>, at::native::LpNormFunctor<float, (NormType)1>",
         "gradient norm, clipping"),
        ("void at::native::multi_tensor_apply_kernel<TensorListMetadata<1>, at::native::BinaryOpScalarTensorFunctor<float>",
         "gradient norm, clipping"),
        ("void at::native::multi_tensor_apply_kernel<TensorListMetadata<2>, at::native::CopyFunctor<c10::BFloat16, float>",
         "copies, casts"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda", "copies, casts"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>", "elementwise, eager"),
        ("Memcpy DtoD (Device -> Device)", "memcpy, memset"),
        ("something_new", "other"),
    ],
)  # fmt: skip
def test_the_family_of_a_kernel(families, name, family):
    assert families.family_of(name) == family


def test_overlapping_kernels_keep_the_device_busy_once(families):
    kernels = [families.Kernel(name, *at) for name, at in (("a", (0, 1000)), ("b", (500, 1500)), ("a", (3000, 4000)))]
    assert families.busy_ms(kernels) == 2.5
    assert families.by_name(kernels) == [("a", 2.0, 2), ("b", 1.0, 1)]
