"""Python sources: imports, attributes, strings, and CUDA text inside of strings."""

import pytest
from tests.port.source.snippets import python_findings

from crosstie_port.source.python import python_hazards
from crosstie_port.source.rules import KINDS, python_rules


def found(text: str, on: str = "mi300x") -> list[tuple[str, int | None, str]]:
    return [(one.check, one.where.line, one.severity) for one in python_findings(text, on)]


USES = [
    ("nvidia-package", "import pynvml"), ("nvidia-package", "import cupy as cp"), ("nvidia-package", "from flash_attn import flash_attn_func"),
    ("nvidia-package", "from xformers.ops import memory_efficient_attention"), ("nvidia-package", "import nvtx"), ("nvidia-package", "from numba import cuda"),
    ("nvidia-package", "from triton.language.extra.cuda import libdevice"), ("nvidia-package", "import transformer_engine.pytorch as te"),
    ("torch-version", "v = torch.version.cuda.split('.')"), ("torch-version", "from torch.version import cuda\nprint(cuda)"),
    ("compute-capability", "if torch.cuda.get_device_capability() >= (9, 0): pass"), ("compute-capability", "ok = torch.cuda.get_device_properties(0).major >= 9"),
    ("nccl", "torch.cuda.nccl.version()"), ("fp8-dialect", "x = x.to(torch.float8_e4m3fn)"), ("fp8-dialect", "y = tl.dot(a.to(tl.float8e4nv), b)"),
    ("inline-ptx", "tl.inline_asm_elementwise('prmt.b32', '=r', [x], tl.int32, True, 1)"), ("triton-nvidia", "tl.extra.cuda.globaltimer()"),
    ("triton-nvidia", "triton.Config({}, num_ctas=2)"), ("tf32", "torch.backends.cuda.matmul.allow_tf32 = True"), ("run-time-compile", "torch.cuda._compile_kernel(s, 'k')"),
    ("extension", "from torch.utils.cpp_extension import CUDAExtension\nsetup(ext_modules=[CUDAExtension('a', ['a.cu'])])"), ("nvcc-flag", "flags = ['-gencode', 'arch=compute_90,code=sm_90']"),
    ("nvcc-flag", "flags = ['--expt-relaxed-constexpr']"), ("nvcc-flag", "flags = ['-arch=sm_80']"), ("cuda-library", "lib = ctypes.CDLL('libcudart.so.12')"),
    ("cuda-library", "libraries = ['-lcudart']"), ("cuda-library", "CUDAExtension('a', [], libraries=['cublas'])"), ("cuda-library", "libraries.append('nccl')"), ("cuda-library", "extra_link_args = ['-lcusparse']"), ("nvidia-tool", "subprocess.run(['nvidia-smi'])"), ("cuda-environment", "os.environ['TORCH_CUDA_ARCH_LIST'] = '9.0'"),
    ("triton-warps", "kernel[grid](x, num_warps=32)"), ("triton-warps", "configs = [{'BLOCK': 64, 'num_warps': 32}]"), ("warp-size", "WARP_SIZE = 32"),
    ("cuda-home", "from torch.utils.cpp_extension import CUDA_HOME\nuse_cuda = torch.cuda.is_available() and CUDA_HOME is not None"),
    ("cuda-home", "from torch.utils import cpp_extension\nnvcc_version(cpp_extension.CUDA_HOME)"), ("half-flags", "flags = ['-O3', '-U__CUDA_NO_HALF_OPERATORS__']"),
    ("extension", "from torch.utils.cpp_extension import load\nload(name='k', sources=['k.cu'])"), ("nvcc-flag", "flags = ['--forward-unknown-opts']"),
    ("nvidia-tool", "subprocess.check_output([home + '/bin/nvcc', '-V'])"), ("nvidia-tool", "subprocess.run(['nvcc', '--version'])"),
    ("nvidia-package", "requires = ['nvidia-cuda-runtime-cu11>=11.8.89']"), ("nvidia-package", "requires = ['cupy-cuda12x']"),
    ("triton-warps", "num_warps = 32\nkernel[grid](x, num_warps=num_warps)"), ("nvidia-package", "from triton.backends.nvidia.driver import libcuda_dirs"),
    ("cuda-home", "assert envs.CUDA_HOME, 'set it'"), ("torch-version", "if torch.hip.is_available(): pass"),
    ("cudnn", "name = 'aten::cudnn_convolution_backward'"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "line"), USES)
def test_every_use_in_python_is_found_where_it_counts(check: str, line: str) -> None:
    assert check in {one[0] for one in found("\n" + line)}
    assert all(one.where.line and one.where.line > 1 for one in python_findings("\n" + line))
    indented = "\n".join("    " + part for part in line.split("\n"))
    for twin in (
        f"# {line}",
        f'"""\n{line}\n"""',
        f"if torch.version.hip is None:\n{indented}",
        f"def f():\n    '''{line.replace(chr(39), ' ')}'''",
    ):
        assert check not in {one[0] for one in found(twin)}, twin
    assert python_findings(line, on="h200") == []


def test_every_kind_of_row_is_used() -> None:
    used = {check for check, _ in USES}
    assert {one.id for kind in KINDS if kind != "build" for one in python_rules(kind)} <= used


@pytest.mark.parametrize(
    "line",
    [
        "import torch", "torch.cuda.is_available()", "x.cuda()", "torch.device('cuda')", "is_cuda = torch.version.cuda is not None",
        "if torch.version.hip:\n    pass\nelse:\n    import pynvml", "x = torch.float8_e4m3fnuz if hip else torch.float8_e4m3fn", "kernel[grid](x, num_warps=8)",
        "import triton.language as tl\ntl.dot(a, b)", "cuda = 1\nprint(cuda)", "WARP_SIZE = 64", "from .pynvml import local", "num_warps = 16", "assert CUDA_HOME or ROCM_HOME", "name = 'nvidia-smi-wrapper'", "print('see the nvcc manual')", "args = {'nvcc': ['-O3']}",
        "major = 9\nassert major >= 8", "ok = torch.cuda.get_device_capability() >= (8, 0)", "ok = torch.cuda.get_device_properties(0).major >= 10",
        "old = torch.cuda.get_device_capability()[0] < 8", "with torch.cuda.stream(s): pass", "a = torch.version.hip or torch.version.cuda",
    ],
)  # fmt: skip
def test_code_that_is_right(line: str) -> None:
    assert found(line) == []


HOME = "from torch.utils.cpp_extension import CUDA_HOME, ROCM_HOME\n"


@pytest.mark.parametrize(
    "line",
    [
        "if CUDA_HOME is None and ROCM_HOME is None: raise SystemExit", "gpu = CUDA_HOME is not None or ROCM_HOME is not None",
        "if torch.version.hip is None and CUDA_HOME is None: raise SystemExit", "flags['nvcc'].append('-g')", "flags.get('nvcc')",
        "if 'nvcc' in flags: pass", "args = ['-U__CUDA_NO_HALF_OPERATORS__', '-U__HIP_NO_HALF_OPERATORS__']",
    ],
)  # fmt: skip
def test_builds_that_know_rocm(line: str) -> None:
    assert found(HOME + line) == []


def test_a_build_that_asks_for_cuda_home_alone() -> None:
    text = (
        HOME
        + "if CUDA_HOME is None:\n    raise SystemExit\nif ROCM_HOME is None and not CUDA_HOME or fast:\n    pass\n"
    )
    assert found(text) == [("cuda-home", 2, "error")]


def test_an_import_that_may_fail_is_a_note() -> None:
    assert found("try:\n    import pynvml\nexcept ImportError:\n    pynvml = None") == [("nvidia-package", 2, "note")]
    assert found("try:\n    import pynvml\nexcept KeyError:\n    pass")[0][2] == "error"


def test_the_target_decides() -> None:
    assert found("kernel[grid](x, num_warps=32)", on="rx-7900-xtx") == []
    assert found("x = x.to(torch.float8_e4m3fn)", on="mi355x") == []


def test_cuda_text_in_strings() -> None:
    text = 'SOURCE = """\n__global__ void k(float* x) {\n  x[0] = __shfl_xor_sync(0xffffffff, x[0], 1);\n}\n"""\nload_inline("k", cuda_sources=SOURCE)\n'
    assert ("mask-32-bit", 3, "error") in found(text)
    continued = 'SOURCE = """\\\n__global__ void k() {\n  asm volatile("bar.sync 0;");\n}\n"""\n'
    assert ("inline-ptx", 3, "error") in found(continued)
    assert ("inline-ptx", 1, "error") in found("cp.RawKernel('__global__ void k() { asm(\"membar.gl;\"); }', 'k')")
    formatted = 'S = f"""\n__global__ void k() {{\n  __shared__ float s[{n}];\n  __syncwarp(0xffffffff);\n}}\n"""\n'
    assert ("mask-32-bit", 4, "error") in found(formatted)
    assert found('S = """__global__ void k(float* x) { x[0] = 1; }"""') == []


def test_files_that_are_no_python() -> None:
    assert found("print 'hello'") == [("unread", 1, "unknown")]
    assert found("x = " + "(" * 5000)[0][0] == "unread"
    assert found("x = " + "-" * 100_000 + "1")[0][0] == "unread"
    assert found("x = 1\0")[0][0] == "unread"


def test_repetition_is_one_finding() -> None:
    made = python_findings("a = torch.float8_e4m3fn\nb = 1\nc = torch.float8_e4m3fn\n")
    assert len(made) == 1
    assert "and 1 more line: 3" in made[0].evidence


IMPORT = "import pynvml"


@pytest.mark.parametrize(
    "condition",
    [
        "not torch.version.hip", "torch.version.hip is None", "torch.version.cuda", "torch.version.cuda is not None", "not is_rocm()",
        "current_platform.is_cuda()", "fast and not is_hip()", "sys.platform == 'win32'", "target.backend == 'cuda'", "backend() != 'hip'",
        "getattr(torch.version, 'hip', None) is None", "'rocm' not in torch.__version__", "TYPE_CHECKING", "not os.environ.get('USE_ROCM')",
        "not (is_hip() or fast)", "platform.system() == 'Darwin'", "not utils.IS_ROCM", "bool(torch.version.cuda)",
    ],
)  # fmt: skip
def test_what_rocm_does_not_run(condition: str) -> None:
    assert found(f"if {condition}:\n    {IMPORT}") == []
    assert found(f"if {condition}:\n    pass\nelse:\n    {IMPORT}") != []
    assert found(f"x = torch.float8_e4m3fn if {condition} else 1") == []
    assert found(f"def f():\n    if not ({condition}):\n        return\n    {IMPORT}") == []
    assert found(f"def f():\n    if {condition}:\n        raise ValueError\n    {IMPORT}") != []
    assert found(f"assert {condition}\n{IMPORT}") == []


@pytest.mark.parametrize(
    "condition",
    [
        "torch.version.hip", "is_hip()", "torch.version.cuda is None", "current_platform.is_rocm()", "x.is_cuda", "torch.cuda.is_available()",
        "current_platform.is_cuda_alike()", "fast or is_hip()", "damp", "amd_epyc_host", "use_hip_graphs", "device.type == 'cuda'", "no_rocm",
        "sys.platform == 'linux'", "use_cuda", "gfx942", "torch.version.hip >= '6'", "is_hip", "x == y == 'cuda'", "fast and x.is_cuda",
    ],
)  # fmt: skip
def test_what_rocm_may_run(condition: str) -> None:
    assert found(f"if {condition}:\n    {IMPORT}") != []
    assert found(f"if fast:\n    pass\nelif {condition}:\n    {IMPORT}") != []


def test_names_stand_for_what_they_are_set_to() -> None:
    use = f"if is_cuda:\n    {IMPORT}"
    assert found(f"is_cuda = torch.version.cuda is not None\n{use}") == []
    assert found(f"is_cuda = torch.cuda.is_available()\n{use}") != []
    assert found(f"is_cuda = torch.version.cuda is not None\nis_cuda = True\n{use}") != []
    assert found(f"from utils import is_cuda\n{use}") == []
    assert found(f"def f(is_cuda):\n    if is_cuda:\n        {IMPORT}") != []
    assert found(f"a = b\nb = a\nif a:\n    {IMPORT}") != []
    ask = f"if is_cuda():\n    {IMPORT}"
    assert found(f"def is_cuda():\n    return torch.cuda.is_available()\n{ask}") != []
    assert found(f"def is_cuda():\n    return torch.version.cuda is not None\n{ask}") == []


def test_tests_that_are_skipped() -> None:
    body = f"def test_it():\n    {IMPORT}"
    assert found(f"@pytest.mark.skipif(is_hip(), reason='x')\n{body}") == []
    assert found(f"@pytest.mark.skipif(not is_hip(), reason='x')\n{body}") != []


def test_things_named_in_strings() -> None:
    assert found("importlib.import_module('pynvml')") == [("nvidia-package", 1, "error")]
    assert found("importlib.import_module('json')") == []
    assert found("ctypes.util.find_library('cudart')") == [("cuda-library", 1, "error")]
    assert found("ctypes.util.find_library('c')") == []
    assert found("getattr(torch, 'float8_e4m3fn')") == [("fp8-dialect", 1, "error")]
    assert found("getattr(torch, 'float16')") == []


def test_warps_from_loops_and_names() -> None:
    loop = "configs = [triton.Config({}, num_warps=w) for w in (4, %d)]"
    assert found(loop % 32) == [("triton-warps", 1, "error")]
    assert found(loop % 16) == []
    assert found("n = 32\nkernel[grid](x, num_warps=n)") == [("triton-warps", 2, "error")]
    assert found("n = f()\nkernel[grid](x, num_warps=n)") == []


def test_the_trees_own_package_may_be_imported() -> None:
    text = "import flashinfer\nimport pynvml\n"
    assert {one.name for one in python_hazards("a.py", text)} == {"flashinfer", "pynvml"}
    assert {one.name for one in python_hazards("a.py", text, frozenset({"flashinfer"}))} == {"pynvml"}


def test_a_tool_that_may_be_missing_is_a_note() -> None:
    call = "subprocess.check_output(['which', 'nvcc'])"
    assert [one.severity for one in python_findings(call)] == ["error"]
    assert [one.severity for one in python_findings(f"try:\n    {call}\nexcept Exception:\n    pass")] == ["note"]


def test_options_of_a_program_are_its_own() -> None:
    assert "nvcc-flag" in {one.check for one in python_findings("flags = ['--threads=4']")}
    assert not python_findings("parser.add_argument('--threads', type=int)\nparser.add_option('-D', '--diag_x')")


@pytest.mark.parametrize(
    ("text", "on", "expected"),
    [
        ("archs = ('gfx940', 'gfx942')", "mi355x", True),
        ("archs = ['gfx90a', 'gfx942']", "mi300x", False),
        ("archs = {'gfx90a', 'gfx950'}", "mi300x", True),
        ("archs = ['gfx942', 'gfx950']", "mi355x", False),
        ("arch = 'gfx942'", "mi355x", False),
    ],
)
def test_lists_of_targets_in_python(text: str, on: str, expected: bool) -> None:
    assert ("target-list" in {check for check, _, _ in found(text, on)}) is expected
