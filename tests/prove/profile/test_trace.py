"""The formats. torch.profiler's and rocprofv3's JSON were seen as a GPU wrote them; the rest is written here as sources
and pages say: ROCm/rocm-systems projects/rocprofiler-sdk source/lib/output (d8adfc9ba850), NVIDIA's analysis guide."""

import gzip
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Command

from crosstie.core.errors import BadData
from crosstie_port.profile.shares import profile
from crosstie_port.profile.trace import ProfilerTrace, read_trace

DATA = Path(__file__).with_name("data")
GEMM = "Cijk_Alik_Bljk_BBS_BH_MT256x208x64"

ROCPROF_CSV = f'''"Kind","Agent_Id","Queue_Id","Stream_Id","Thread_Id","Dispatch_Id","Kernel_Id","Kernel_Name","Correlation_Id","Start_Timestamp","End_Timestamp","LDS_Block_Size","Scratch_Size","VGPR_Count","Accum_VGPR_Count","SGPR_Count","Workgroup_Size_X","Workgroup_Size_Y","Workgroup_Size_Z","Grid_Size_X","Grid_Size_Y","Grid_Size_Z"
"KERNEL_DISPATCH","Agent 2",1,0,99,1,5,"{GEMM}",7,1000,3000,0,0,8,0,16,256,1,1,4096,1,1
"KERNEL_DISPATCH","Agent 2",1,0,99,2,6,"void vllm::rms_norm_kernel<c10::BFloat16, float>(int, float)",8,4000,5000,0,0,8,0,16,256,1,1,4096,1,1
'''
COPY_CSV = """"Kind","Direction","Stream_Id","Source_Agent_Id","Destination_Agent_Id","Correlation_Id","Start_Timestamp","End_Timestamp"
"MEMORY_COPY","MEMORY_COPY_HOST_TO_DEVICE",0,"Agent 0","Agent 2",3,1000,2500
"""
STATS_CSV = f'''"Name","Calls","TotalDurationNs","AverageNs","Percentage","MinNs","MaxNs","StdDev"
"{GEMM}",4,8000,2000.0,80.0,1900,2100,10.0
"rocprim::detail::radix_sort_onesweep_kernel<>",2,2000,1000.0,20.0,900,1100,10.0
'''
NSYS_TRACE = """Processing [report.sqlite] with [/opt/nvidia/nsight-systems/host-linux-x64/reports/cuda_gpu_trace.py]...
Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,StcSMem (MB),DymSMem (MB),Bytes (MB),Throughput (MB/s),SrcMemKd,DstMemKd,Device,Ctx,GreenCtx,Strm,Name
1000,2000,7,8,1,1,128,1,1,32,0.0,0.0,,,,,NVIDIA H200 (0),1,,7,nvjet_sm90_tst_128x32_64x10
3500,500,8,,,,,,,,,,0.001,10,Device,Device,NVIDIA H200 (0),1,,7,[CUDA memcpy Device-to-Device]
"""
NSYS_SUM = """Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
75.0,3000,3,1000.0,1000.0,900,1100,10.0,nvjet_sm90_tst_128x32_64x10
25.0,1000,1,1000.0,1000.0,1000,1000,0.0,void mine::odd<int>(int)
"""


def rocprof_json() -> dict[str, Any]:
    def dispatch(kernel: int, start: int, end: int, number: int) -> dict[str, Any]:
        info = {"kernel_id": kernel, "agent_id": {"handle": 42}, "queue_id": {"handle": 1}}
        return {
            "start_timestamp": start,
            "end_timestamp": end,
            "correlation_id": {"internal": number},
            "dispatch_info": info,
        }

    run = {
        "metadata": {"pid": 1},
        "kernel_symbols": [{"kernel_id": 1, "kernel_name": "_Zx.kd", "formatted_kernel_name": GEMM}, {"kernel_id": 2, "kernel_name": "_Zy", "demangled_kernel_name": "paged_attention_ll4mi_QKV_mfma16_kernel<>"}],
        "buffer_records": {
            "kernel_dispatch": [dispatch(1, 1000, 2000, 5), dispatch(2, 4000, 5000, 6)],
            "hip_api": [{"start_timestamp": 100, "end_timestamp": 200, "correlation_id": {"internal": 5}}, {"start_timestamp": 2000, "end_timestamp": 3500, "correlation_id": {"internal": 6}}],
            "memory_copy": [{"start_timestamp": 5000, "end_timestamp": 5500, "dst_agent_id": {"handle": 42}}],
        },
    }  # fmt: skip
    return {"rocprofiler-sdk-tool": [run]}


def nsys_sqlite(path: Path) -> Path:
    with closing(sqlite3.connect(path)) as made:
        made.executescript(
            'CREATE TABLE StringIds(id INTEGER, value TEXT); CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL(start INTEGER, "end" INTEGER, deviceId INTEGER, correlationId INTEGER, demangledName INTEGER, shortName INTEGER);'
            'CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME(start INTEGER, "end" INTEGER, correlationId INTEGER, nameId INTEGER);'
            'CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY(start INTEGER, "end" INTEGER, deviceId INTEGER, correlationId INTEGER);'
            "INSERT INTO StringIds VALUES (1, 'nvjet_sm90_tst_128x32'), (2, 'void flash::flash_fwd_kernel<>');"
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1000, 3000, 0, 7, 1, 1), (6000, 7000, 0, 8, 2, 2);"
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (100, 200, 7, 1), (3000, 5000, 8, 1);"
            "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (7000, 7500, 0, 9);"
        )
    return path


def rocpd(path: Path) -> Path:
    """Tables end with the run's identifier, and views of the plain names stand over them."""
    with closing(sqlite3.connect(path)) as made:
        made.executescript(
            'CREATE TABLE rocpd_kernel_dispatch_1f(id INTEGER, kernel_id INTEGER, agent_id INTEGER, queue_id INTEGER, start BIGINT, "end" BIGINT);'
            "CREATE TABLE rocpd_info_kernel_symbol_1f(id INTEGER, display_name TEXT);"
            "CREATE VIEW rocpd_kernel_dispatch AS SELECT * FROM rocpd_kernel_dispatch_1f;"
            "CREATE VIEW rocpd_info_kernel_symbol AS SELECT * FROM rocpd_info_kernel_symbol_1f;"
            f"INSERT INTO rocpd_info_kernel_symbol_1f VALUES (3, '{GEMM}');"
            "INSERT INTO rocpd_kernel_dispatch_1f VALUES (1, 3, 2, 1, 1000, 3000), (2, 3, 2, 1, 3500, 4500);"
        )
    return path


def written(path: Path, text: str) -> ProfilerTrace:
    path.write_text(text)
    return read_trace(path)


def spent(trace: ProfilerTrace) -> dict[str, float]:
    """In nanoseconds."""
    return {one.sort: round(one.seconds * 1e9, 3) for one in profile(trace).shares}


def test_rocprofv3_s_csv(tmp_path: Path) -> None:
    trace = written(tmp_path / "1_kernel_trace.csv", ROCPROF_CSV)
    assert trace.made_by == "rocprofv3"
    assert spent(trace) == {"matrix products": 2000, "norms and activations": 1000, "gaps": 1000}
    copies = written(tmp_path / "1_memory_copy_trace.csv", COPY_CSV)
    assert spent(copies) == {"bookkeeping": 1500}


def test_rocprofv3_s_json(tmp_path: Path) -> None:
    trace = written(tmp_path / "1_results.json", json.dumps(rocprof_json()))
    assert spent(trace) == {
        "matrix products": 1000, "attention": 1000, "bookkeeping": 500,
        "gaps: the host launches late": 1500, "gaps: between kernels": 500,
    }  # fmt: skip


def test_rocprofv3_s_database(tmp_path: Path) -> None:
    assert spent(read_trace(rocpd(tmp_path / "1_results.db"))) == {"matrix products": 3000, "gaps": 500}


def test_nsys_s_database(tmp_path: Path) -> None:
    trace = read_trace(nsys_sqlite(tmp_path / "report.sqlite"))
    assert trace.made_by == "Nsight Systems"
    assert spent(trace) == {
        "matrix products": 2000, "attention": 1000, "bookkeeping": 500,
        "gaps: the host launches late": 2000, "gaps: between kernels": 1000,
    }  # fmt: skip


def test_nsys_s_csv(tmp_path: Path) -> None:
    assert spent(written(tmp_path / "trace.csv", NSYS_TRACE)) == {
        "matrix products": 2000,
        "bookkeeping": 500,
        "gaps": 500,
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (NSYS_SUM, {"matrix products": 3000, "not known": 1000}),
        (STATS_CSV, {"matrix products": 8000, "bookkeeping": 2000}),
    ],
)
def test_sums_have_no_gaps_and_say_so(text: str, expected: dict[str, float], tmp_path: Path) -> None:
    trace = written(tmp_path / "sums.csv", text)
    assert spent(trace) == expected
    assert "sums and no times" in profile(trace).verdict[-1]


@pytest.mark.parametrize(
    ("name", "carried"),
    [
        ("ProfilerStep#15", (None, None)),
        ("execute_context_1(1050)_generation_31(31)", (1050, 31)),
        ("execute_context_1(888_788544)_generation_0(0)", (888, 0)),
        ("execute_8192_context_9(sq8155sk8430sqsq7475785)_generation_37(sq37sk34489)", (8155, 37)),
        ("step[DECODE bs=32]", None),
    ],
)
def test_marks_say_what_a_step_carries(
    name: str, carried: tuple[int | None, int | None] | None, tmp_path: Path
) -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": GEMM, "ts": 1, "dur": 2},
        {"ph": "X", "cat": "gpu_user_annotation", "name": name, "ts": 1, "dur": 2},
    ]
    marks = written(tmp_path / "trace.json", json.dumps({"traceEvents": events})).marks
    assert [(mark.prompt_tokens, mark.sequences) for mark in marks] == ([] if carried is None else [carried])


def test_compressed_and_plain_are_the_same(tmp_path: Path) -> None:
    plain = gzip.decompress((DATA / "h200-index.json.gz").read_bytes())
    (tmp_path / "trace.json").write_bytes(plain)
    assert read_trace(tmp_path / "trace.json").events == read_trace(DATA / "h200-index.json.gz").events


REFUSALS = {
    "an empty file": (b"", "no table of a profiler that is known"),
    "prose": (b"hello", "no table of a profiler that is known"),
    "other JSON": (b'{"a": 1}', "traceEvents: missing"),
    "half of a JSON": (b'{"traceEvents": [', "not valid JSON"),
    "no GPU": (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2}]}', "nothing in it ran on a GPU"),
    "an event without a time": (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "x"}]}', "an event that cannot be read"),
    "another table": (b"Start_Timestamp,Other\n1,2\n", "a row that cannot be read"),
    "Perfetto's own": (b"\n\x8a\x01\xff\xfe\x00", "--output-format csv or json"),
    "half of a gzip": (gzip.compress(b"x" * 5000)[:-30], "cannot be read"),
    "another database": (b"SQLite format 3\0" + b"\0" * 100, "not as its profiler writes it"),
    "rocprofv3's without records": (b'{"rocprofiler-sdk-tool": [{"metadata": {}}]}', "not as rocprofv3 writes it"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_no_trace_is_refused_in_a_line(name: str, tmp_path: Path, crosstie: Command) -> None:
    raw, said = REFUSALS[name]
    (tmp_path / "trace").write_bytes(raw)
    with pytest.raises(BadData, match="trace"):
        read_trace(tmp_path / "trace")
    got = crosstie("profile", str(tmp_path / "trace"))
    assert (got.status, got.out, got.err.count("\n")) == (2, "", 1)
    assert said in got.err


def test_the_command(crosstie: Command) -> None:
    trace = str(DATA / "h200-dense.json.gz")
    got = crosstie(
        "profile", trace, "--model", "llama-3.1-8b", "--on", "h200", "--batch", "32", "--context", "2048", "-v"
    )
    assert got.status == 0
    assert "h200-dense.json.gz  torch.profiler, 1 step, device 0" in got.out
    assert "predicted" in got.out
    assert "- largest recoverable share: gaps: the host launches late" in got.out
    assert "nvjet_sm90_tst_128x32_64x10_2x1_v_bz_TNT" in got.out
    found = json.loads(crosstie("profile", trace, "--json").out)
    assert sum(one["fraction"] for one in found["shares"]) == pytest.approx(1.0)
    assert found["roofline"] is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "llama-3.1-8b"], "--model and --on go together"),
        (["--on", "h200"], "--model and --on go together"),
        (["--steps", "0"], "--steps 0: at least 1"),
        (["--device", "9"], "nothing ran on device 9"),
        (["--model", "llama-3.1-8", "--on", "h200"], "unknown model"),
        (["--model", "llama-3.1-8b", "--on", "h200", "--batch", "0"], "there must be a sequence or a prompt"),
    ],
)
def test_a_wrong_question_is_one_line(crosstie: Command, arguments: list[str], said: str) -> None:
    got = crosstie("profile", str(DATA / "h200-index.json.gz"), *arguments)
    assert (got.status, got.out) == (2, "")
    assert said in got.err
