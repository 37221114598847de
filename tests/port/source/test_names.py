"""Rows of names.toml: each fires on a use, and not on a comment, a string, guarded code or a name of the project."""

from pathlib import Path

import pytest
from tests.port.source.snippets import checks, findings, kernel, names

from crosstie.core.errors import BadData
from crosstie_port.source.rules import name_rules

USES = [
    ("cutlass", "#include <cutlass/gemm/device/gemm.h>"), ("cutlass", "cute::Tensor<int> t;"), ("fp8-types", "#include <cuda_fp8.h>"),
    ("fp8-types", "__nv_fp8_e4m3 x;"), ("fp8-dialect", "void cuda(at::Tensor t) { t.to(at::kFloat8_e4m3fn); }"),
    ("fp8-dialect", "cudaDataType_t t = CUDA_R_8F_E4M3;"), ("fp8-dialect", "__hip_fp8_e4m3 x;"), ("fp8-range", "float fp8_max = 448.0f;"), ("fp4-types", "__nv_fp4_e2m1 x;"), ("wmma", "#include <mma.h>"),
    ("wmma", "nvcuda::wmma::fragment<int> f;"), ("tensor-map", "CUtensorMap map;"), ("cluster-launch", "cudaLaunchConfig_t config;"),
    ("cluster-launch", "__cluster_dims__(2, 1, 1) void k();"), ("libcudacxx", "#include <cuda/barrier>"), ("libcudacxx", "cuda::atomic_ref<int> a(x);"),
    ("async-copy", "__pipeline_commit();"), ("async-copy", "cg::memcpy_async(block, a, b, n);"), ("cooperative-groups", "#include <cooperative_groups/reduce.h>"),
    ("tiled-partition", "auto tile = cg::tiled_partition<32>(block);"), ("grid-sync", "cg::this_grid().sync();"), ("missing-intrinsic", "__nanosleep(40);"),
    ("missing-intrinsic", "__trap();"), ("graphs", "cudaKernelNodeParams node;"), ("hipify-leftover", "#define cudaUnspecified cudaErrorApiFailureBase"), ("missing-intrinsic", "int c = __dp4a(a, b, c);"), ("missing-intrinsic", "x = __vadd4(a, b);"), ("cache-hint", "__stcs(p, v);"),
    ("texture", "float v = tex2D<float>(t, x, y);"), ("cudnn", "#include <cudnn.h>"), ("cudnn", "cudnnHandle_t handle;"), ("nvml", "nvmlInit();"),
    ("nvshmem", "nvshmem_barrier_all();"), ("nccl", "#include <nccl.h>"), ("multicast", "cuMulticastCreate(&h, &p);"), ("device-binary", "cuModuleLoadData(&m, ptx);"),
    ("managed-memory", "cudaMallocManaged(&p, n);"), ("graphs", "cudaStreamBeginCapture(s, m);"), ("cublaslt", "cublasLtMatmul(h);"),
    ("tensorrt", "#include <NvInfer.h>"), ("tensorrt", "#include <flashinfer/norm.cuh>"), ("clock", "long long t = clock64();"), ("clock", "if (clock64() - start > 200000000000ull) fail();"),
    ("shared-memory-query", "int n = prop.sharedMemPerBlockOptin;"), ("cub", "cub::WarpReduce<float> r;"), ("thrust", "#include <thrust/sort.h>"),
    ("thrust", "thrust::fill_n(thrust::omp::par, p, n, 0);"), ("cuda-release", "cudaRuntimeGetVersion(&version);"),
    ("overload", "cublasHgemm(handle, op, op, m, n, k, a, x, 1, y, 1, b, z, 1);"), ("syncwarp", "__syncwarp();"),
    ("cub-internal", "cub::CTA_SYNC();"), ("cub-internal", "bool whole = lanes == CUB_WARP_THREADS(0);"),
    ("compute-capability", "cudaDeviceGetAttribute(&v, cudaDevAttrComputeCapabilityMajor, 0);"), ("missing-intrinsic", "atomicAdd_block(p, v);"),
    ("missing-intrinsic", "float f = __fadd_rz(a, b);"), ("hip-release", "#include <hip/hcc_detail/device_library.h>"), ("hip-release", "int t = attributes.memoryType;"),
    ("hip-release", "hipblasDatatype_t t;"), ("hip-release", "#define CUBLAS_COMPUTE_32F HIPBLAS_R_32F"), ("hip-release", "hipMemImportFromShareableHandle(&h, &fd, t);"), ("dlpack-device", "device.set_options<kDLCUDA>();"),
    ("memory-coherence", "cudaMalloc(&p, n); cudaIpcGetMemHandle(&h, p);"), ("overload", 'extern "C" __device__ void __assert_fail(const char* a) __THROW;'),
    ("tensorrt", "#include <moderngpu/transform.hxx>"), ("cooperative-groups", "x = cg::reduce(tile, x, cg::plus<float>());"),
    ("hip-release", "hipblasGemmEx_v2(h);"), ("overload", "__device__ inline void __syncwarp() { fence(); }"),
    ("device-linking", "extern __device__ int counter;"), ("half-flags", "__device__ half f(int v) { return static_cast<float>(v); }"),
    ("launch-bounds", "__global__ void __launch_bounds__(256, 2) k() {}"), ("compute-capability", "bool hopper = p.major >= 9;"), ("compute-capability", "int arch = p->major * 10;"), ("launch-size", "constexpr int kMaxWarps = 32;"),
    ("launch-size", "dim3 block(kWarpSize, kWarpSize);"), ("overload", "float2& operator+=(float2& a, const float2& b);"),
    ("hip-release", "f(reinterpret_cast<hipblasComplex*>(x));"), ("cub-warp", "cub::WarpReduce<float> r; int lane = threadIdx.x % 32;"),
]  # fmt: skip


def test_the_unsigned_scales_of_nvfp4_are_no_fp8() -> None:
    assert "fp8-range" not in names("float to_ue4m3(float x) { return x > 448.0f ? 448.0f : x; }")


@pytest.mark.parametrize(("check", "line"), USES)
def test_every_use_of_a_name_is_found_where_it_counts(check: str, line: str) -> None:
    assert (check, 2) in checks("\n" + line + "\n")
    # A comment, a string, code for NVIDIA, and a target of NVIDIA's.
    quoted = line.replace("\\", "\\\\").replace('"', '\\"')
    for twin in (f"// {line}", f"/*\n{line}\n*/", f'const char* s = "{quoted}";', f"#ifndef USE_ROCM\n{line}\n#endif"):
        assert check not in names(twin + "\n"), twin
    assert check not in names(line, on="h200")


def test_a_namespace_of_the_tree_itself() -> None:
    own = "namespace tl {\nnamespace cute {\nstruct Layout {};\n}\n}\n"
    assert "cutlass" not in names("cute::Layout f();\n", layout_h=own)
    assert "cutlass" in names("cute::Layout f();\n")
    assert "cutlass" in names(
        '#include "shared.h"\ncute::Layout f();\n', layout_h=own, shared_h="#include <cute/layout.hpp>\n"
    )


def test_a_timeout_by_the_clock_is_more_than_a_note() -> None:
    assert {one.severity for one in findings("if (clock64() - start > LIMIT) fail();\n")} == {"setting", "note"}
    assert {one.severity for one in findings("t = clock64() - start;\n")} == {"note"}


def test_only_a_condition_around_it_asks_for_the_release() -> None:
    old, asked = "#define T hipblasDatatype_t\n", "#if HIP_VERSION < 70000000\n#else\n{}#endif\n"
    assert "hip-release" in names(old + asked.format(""))
    assert "hip-release" in names(asked.format("") + old)
    assert "hip-release" not in names(asked.format(old))


def test_a_name_behind_a_condition_on_itself_is_there() -> None:
    text = "#{} __AMDGCN_WAVEFRONT_SIZE\nint lanes() {{ return __AMDGCN_WAVEFRONT_SIZE; }}\n#endif\n"
    assert "hip-release" not in names(text.format("ifdef"))
    assert "hip-release" in names(text.format("ifndef"))


def test_every_row_has_a_use_here() -> None:
    assert {rule.id for rule in name_rules()} == {check for check, _ in USES}


def test_the_target_decides() -> None:
    text = "__nv_fp8_e4m3 x;\n"
    assert {(one.target, "half as much" in one.what) for one in findings(text, on="mi300x,mi355x")} == {
        ("mi300x", True),
        ("mi355x", False),
    }
    assert "no FP8 arithmetic" in findings(text, on="rx-7900-xtx")[0].what
    for check, line in (
        ("texture", "tex2D<float>(t, x, y);"),
        ("cub", "cub::WarpReduce<float> r;"),
        ("fp8-range", "float fp8 = 448.f;"),
    ):
        assert check not in names(line, on="rx-7900-xtx")
    assert "fp8-dialect" not in names("void cuda() { f(at::kFloat8_e4m3fn); }", on="mi355x")


def test_files_that_know_the_other_dialect() -> None:
    assert "fp8-dialect" not in names("void cuda() { f(at::kFloat8_e4m3fn, at::kFloat8_e4m3fnuz); }")
    assert "fp8-range" not in names("float m = is_fnuz ? 224.f : 448.f; // fp8")
    assert "fp8-range" not in names("float hidden = 448.0f;")


def test_names_of_the_project_are_its_own() -> None:
    assert "missing-intrinsic" not in names("#define __dp4a(a, b, c) dot4(a, b, c)\nint x = __dp4a(1, 2, 3);")
    own = "#ifdef USE_ROCM\nstatic __device__ int __vsub4(int a, int b) {\n  return a;\n}\n#endif\n"
    assert "missing-intrinsic" not in names(own + kernel("n = __vsub4(n, n);"))
    assert "libcudacxx" not in names("at::cuda::pipeline x; c10::cuda::device();")
    assert "cutlass" not in names("int cutlass = 1; cutlass = 2;")
    assert "wmma" not in names('#include "mma.h"\n', mma_h="int x;\n")


def test_one_finding_a_file_with_the_other_lines() -> None:
    found = findings("cute::A a;\ncute::B b;\n\ncute::C c;\n")
    assert len(found) == 1
    assert found[0].where.line == 1
    assert "2, 4" in found[0].evidence


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ('severity = "bad"', "severity"), ('on = "moon"', "on"), ('unless = "("', "unless"), ("extra = 1", "extra"), ('remedy = ""', "remedy"), ('source = "nowhere"', "a"),
    ],
)  # fmt: skip
def test_bad_rows_are_refused(tmp_path: Path, row: str, key: str) -> None:
    lines = {"id": '"a"', "severity": '"error"', "names": '["x"]', "says": '"s"', "remedy": '"r"', "source": '"s"'}
    name, _, value = row.partition(" = ")
    lines[name] = value
    body = "\n".join(f"{one} = {text}" for one, text in lines.items())
    file = tmp_path / "names.toml"
    file.write_text(f'[sources]\ns = {{ ref = "somewhere", date = "2026-11" }}\n[[rule]]\n{body}\n')
    with pytest.raises(BadData, match=key):
        name_rules(file)


def test_launch_bounds_with_a_second_number_are_found() -> None:
    assert "launch-bounds" in names("__global__ void __launch_bounds__(256, 2) k() {}")
    assert "launch-bounds" not in names(
        "__global__ void __launch_bounds__(256) k() {}\n__global__ void __launch_bounds__(256, 1) j() {}"
    )
    assert "compute-capability" in names("bool f(cudaDeviceProp p) { return p.major >= 9; }")
    assert "compute-capability" not in names("bool f(cudaDeviceProp p) { return p.major >= 9; }", on="rx-7900-xtx")
    assert "compute-capability" not in names(
        "#ifndef USE_ROCM\nbool f(cudaDeviceProp p) { return p.major >= 9; }\n#endif\nint major = 3;"
    )


def test_a_library_may_use_its_own_namespace() -> None:
    use = "#include <flashinfer/norm.cuh>\nflashinfer::norm(x);\n"
    assert "tensorrt" in names(use)
    assert "tensorrt" not in names(use, norm_cuh="namespace flashinfer::math {\n}\n")


def test_fp8_that_the_build_chooses() -> None:
    text = "#ifdef USE_ROCM\nauto kind = at::kFloat8_e4m3fnuz;\n#endif\n"
    assert ("fp8-dialect", 2) in checks(text, on="mi355x")
    assert "fp8-dialect" not in names(text) | names(text + "// gfx950 has another\n", on="mi355x")


@pytest.mark.parametrize(
    ("line", "found"), [("cudnnCreate(&h);", True), ("run(cudnn_handle);", False), ("nvmlInit();", True), ("nvmlite();", False)]
)  # fmt: skip
def test_a_library_has_a_capital_behind_its_name(line: str, found: bool) -> None:
    assert (not names(f"void f() {{\n{line}\n}}\n").isdisjoint({"cudnn", "nvml"})) == found


def test_names_that_hip_changed_are_other_things_elsewhere() -> None:
    assert "hip-release" not in names("int memoryType = 1; use(memoryType);") | names("using hip::gcnArchName;")
    assert "dlpack-device" not in names("device.set_options<kDLCUDA, kDLROCM>();")
    guarded = "#if hipblasVersionMajor >= 3\nusing T = hipDataType;\n#else\nusing T = hipblasDatatype_t;\n#endif\n"
    assert "hip-release" not in names(guarded)
    assert "nvidia-tool" not in names('bool ok = name == "nvidia_peermem" || name == "amdgpu";\n')


def test_libraries_and_tools_by_name() -> None:
    for check, name in (
        ("cuda-library", "libcuda.so.1"),
        ("nvidia-tool", "nvidia_peermem"),
        ("nvidia-tool", "/dev/nvidia0"),
    ):
        assert (check, 2) in checks(f'\nvoid* h = open("{name}");\n')
        assert check not in names(f'#ifndef USE_ROCM\nvoid* h = open("{name}");\n#endif\n')
    assert names('const char* s = "needs libcuda.so.1, which the driver brings";\n').isdisjoint({"cuda-library"})


def test_a_member_that_is_called_after_a_library() -> None:
    assert "nvshmem" in names("void f() { nvshmem_init(); }\n")
    assert "nvshmem" not in names("class M { int nvshmem_comm_; };\n")


def test_cub_with_a_width_is_no_hazard() -> None:
    assert "cub-warp" not in names("cub::WarpReduce<float, 32> r; int lane = threadIdx.x % 32;\n")
    assert "cub-warp" not in names("cub::WarpReduce<float> r; int lane = threadIdx.x % 64;\n")
