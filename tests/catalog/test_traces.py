import gzip
from pathlib import Path

import numpy as np
import pytest

from crosstie.catalog.traces import Trace, find_trace, read_trace, shipped_traces
from crosstie.core.errors import BadData, BadInput

PLAIN = "timestamp,input_tokens,output_tokens\n0,10,1\n1.5,20,2\n4,30,3\n"
MOONCAKE = '{"timestamp": 1000, "input_length": 10, "output_length": 1, "hash_ids": [0, 7]}\n{"timestamp": 4000, "input_length": 20, "output_length": 2}\n'


def trace_of(text: str, folder: Path, name: str = "trace.csv") -> Trace:
    file = folder / name
    file.write_bytes(text.encode())
    return read_trace(file)


def arrivals(trace: Trace) -> list[float]:
    assert trace.arrival_s is not None
    return [float(when) for when in trace.arrival_s]


def test_a_trace_is_three_columns(tmp_path: Path) -> None:
    trace = trace_of(PLAIN, tmp_path)
    assert trace.file == str(tmp_path / "trace.csv")
    assert arrivals(trace) == [0, 1.5, 4]
    assert trace.input_tokens.tolist() == [10, 20, 30]
    assert trace.output_tokens.tolist() == [1, 2, 3]
    assert {str(trace.input_tokens.dtype), str(trace.output_tokens.dtype)} == {"int64"}
    assert (len(trace), trace.span_s, trace.requests_per_s, trace.empty_outputs) == (3, 4.0, 0.5, 0)
    with pytest.raises(ValueError, match="read-only"):
        trace.input_tokens[0] = 1


@pytest.mark.parametrize(
    ("header", "times"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens", ["2023-11-16 18:15:46.5", "2023-11-16 18:15:47.5000000"]),
        ("Timestamp,Input_Tokens,OUTPUT_TOKENS", ["2023-11-16T18:15:46Z", "2023-11-16T18:15:47Z"]),
        ("timestamp,input_tokens,output_tokens", ["2023-12-31T23:59:59-05:00", "2024-01-01T00:00:00-05:00"]),
        ("timestamp,input_tokens,output_tokens", ["2023-11-16 23:59+0100", "2023-11-16 23:59:01+0100"]),
        ("timestamp,input_tokens,output_tokens", ["1700158546.25", "1700158547.25"]),
        ("arrived_at,num_prefill_tokens,num_decode_tokens", ["3.0", "4.0"]),
        ("timestamp_ms,input_length,output_length", ["27482", "28482"]),
        (" arrival_time_ns , input_toks,output_toks", ["46926808", "1046926808"]),
    ],
)
def test_columns_and_times_are_read_in_every_spelling(header: str, times: list[str], tmp_path: Path) -> None:
    trace = trace_of(f"{header}\n{times[0]},374,44\n{times[1]},396,109\n", tmp_path)
    assert arrivals(trace) == pytest.approx([0, 1])
    assert trace.input_tokens.tolist() == [374, 396]
    assert trace.output_tokens.tolist() == [44, 109]


def test_other_columns_order_and_line_ends_do_not_matter(tmp_path: Path) -> None:
    trace = trace_of("pd_ratio,num_decode_tokens,num_prefill_tokens\r\n\r\n1.5,4,6\r\n2,3,6", tmp_path)
    assert (trace.arrival_s, trace.span_s, trace.requests_per_s) == (None, None, None)
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([6, 6], [4, 3])


def test_mooncake_is_in_milliseconds(tmp_path: Path) -> None:
    trace = trace_of(MOONCAKE, tmp_path, "trace.jsonl")
    assert arrivals(trace) == [0, 3]
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([10, 20], [1, 2])


@pytest.mark.parametrize("text", [PLAIN, MOONCAKE])
def test_gzipped_is_the_same(text: str, tmp_path: Path) -> None:
    (tmp_path / "packed").write_bytes(gzip.compress(text.encode(), mtime=0))
    packed, plain = read_trace(tmp_path / "packed"), trace_of(text, tmp_path)
    assert arrivals(packed) == arrivals(plain)
    assert packed.output_tokens.tolist() == plain.output_tokens.tolist()


def test_an_empty_answer_counts_as_one_token(tmp_path: Path) -> None:
    trace = trace_of(PLAIN.replace("20,2", "20,0"), tmp_path)
    assert (trace.output_tokens.tolist(), trace.empty_outputs) == ([1, 1, 3], 1)


def test_a_little_disorder_is_put_in_order(tmp_path: Path) -> None:
    trace = trace_of(PLAIN.replace("\n4,", "\n1.0,"), tmp_path)
    assert arrivals(trace) == [0, 1, 1.5]
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([10, 30, 20], [1, 3, 2])


def test_one_request_has_no_rate(tmp_path: Path) -> None:
    trace = trace_of("timestamp,input_tokens,output_tokens\n7,10,1\n", tmp_path)
    assert (arrivals(trace), trace.span_s, trace.requests_per_s) == ([0.0], 0.0, None)


DATES = "timestamp,input_tokens,output_tokens\n\n2023-11-16 18:15:46,10,1\n2023-11-16 18:15:47,20,2\n"


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        (PLAIN.replace("20,2", "20"), 3, "has 2 fields, the header 3"),
        (PLAIN.replace("20,2", "20,2,2"), 3, "has 4 fields, the header 3"),
        (PLAIN.replace("20,2", ",2"), 3, "input '' is not a whole number"),
        (PLAIN.replace("20,2", "many,2"), 3, "input 'many' is not a whole number"),
        (PLAIN.replace("20,2", "20,2.5"), 3, "output '2.5' is not a whole number"),
        (PLAIN.replace("20,2", "20,9" + "9" * 30), 3, "is not a whole number"),
        (PLAIN.replace("20,2", "-20,2"), 3, "input of -20 tokens: must be 1"),
        (PLAIN.replace("20,2", "0,2"), 3, "input of 0 tokens: must be 1"),
        (PLAIN.replace("20,2", "20,-1"), 3, "output of -1 tokens: must be 0"),
        (PLAIN.replace("20,2", "20,2000000000"), 3, "must be 0 to 1,000,000,000"),
        (PLAIN.replace("1.5", "soon"), 3, "time 'soon' is not a number, as that of the first row is"),
        (PLAIN.replace("1.5", "2023-11-16"), 3, "is not a number, as that of the first row"),
        (PLAIN.replace("\n0,", "\nnow,"), 2, "time 'now' is neither a number nor a date"),
        (PLAIN.replace("1.5", "-1.5"), 3, "'-1.5' is no number of seconds"),
        (PLAIN.replace("1.5", "nan"), 3, "'nan' is no number of seconds"),
        (PLAIN.replace("1.5", "1700158547000"), 3, "timestamp_ms and arrival_time_ns are for finer"),
        (PLAIN.replace("1.5", "9.5"), 4, "'4' is 5.5 s before that of an earlier row"),
        (PLAIN.replace("20,2", '"20,2'), 4, "not valid CSV"),
        (DATES.replace("18:15:47", "18:75:47"), 4, "'2023-11-16 18:75:47': "),
        (DATES.replace("2023-11-16 18:15:47", ""), 4, "'' is neither a number nor a date"),
        (DATES.replace("2023-11-16 18:15:47", "5"), 4, "'5' is neither a number nor a date"),
        (DATES.replace("2023-11-16 18:15:47", "9023-11-16"), 4, "'9023-11-16' is neither"),
        (DATES.replace("18:15:47", "18:15:40"), 4, "6 s before"),
        (DATES.replace("18:15:47", "18:15:47Z"), 4, "not of the first row's time zone"),
        (MOONCAKE.replace('"input_length": 20, ', ""), 2, "missing required field `input_length`"),
        (MOONCAKE.replace("20", '"20"'), 2, r"Expected `int`, got `str` - at `\$.input_length`"),
        (MOONCAKE.replace(": 2}", ": 2"), 2, "malformed|truncated"),
        (MOONCAKE.replace("20", "0"), 2, "input of 0 tokens"),
        ("\n" + MOONCAKE.replace("4000", "-4000"), 3, "is no number of seconds"),
        ("\n" + MOONCAKE.replace("1000", "9000"), 3, "5 s before"),
        (MOONCAKE + "timestamp,input_length\n", 3, "malformed"),
    ],
)
def test_a_bad_row_is_named(text: str, line: int, reason: str, tmp_path: Path) -> None:
    with pytest.raises(BadData, match=reason) as error:
        trace_of(text, tmp_path)
    assert error.value.file == str(tmp_path / "trace.csv")
    assert error.value.key == f"line {line}"


def test_unknown_columns_list_the_known(tmp_path: Path) -> None:
    with pytest.raises(
        BadData, match=r"contexttokens.*num_decode_tokens.*arrival_time_ns.*it has when, prompt"
    ) as error:
        trace_of("when,prompt\n1,2\n", tmp_path)
    assert error.value.key == "line 1"
    with pytest.raises(BadData, match="needs a column for the length of the prompt"):
        trace_of("timestamp,output_tokens\n1,2\n", tmp_path)


def test_two_spellings_of_one_thing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="several columns for the prompt: input_tokens, input_length"):
        trace_of("input_tokens,input_length,output_tokens\n1,2,3\n", tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"input_tokens,output_tokens\n\n", "has no requests"),
        (b"\xff\xfe,\n", "not UTF-8"),
        (gzip.compress(PLAIN.encode(), mtime=0)[:-9], "cannot be read"),
    ],
)
def test_a_file_without_requests(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_bytes(content)
    with pytest.raises(BadData, match=reason):
        read_trace(tmp_path / "trace.csv")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="cannot be read"):
        read_trace(tmp_path / "nothing.csv")


def test_a_name_is_a_file_first_and_a_shipped_trace_then(tmp_path: Path) -> None:
    shipped = shipped_traces()["azure-2023-code"]
    assert find_trace("azure-2023-code", tmp_path) == shipped
    assert find_trace("Azure-2023-Code", tmp_path) == shipped
    (tmp_path / "mine.csv").write_text(PLAIN)
    assert find_trace("mine.csv", tmp_path) == tmp_path / "mine.csv"
    assert find_trace(str(tmp_path / "mine.csv"), Path("elsewhere")) == tmp_path / "mine.csv"
    (tmp_path / "azure-2023-code").write_text(PLAIN)
    assert find_trace("azure-2023-code", tmp_path) == tmp_path / "azure-2023-code"


def test_an_unknown_trace_lists_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="azure-2023-code, azure-2023-conversation, mooncake-conversation") as error:
        find_trace("azure-2024-code", tmp_path)
    assert "Did you mean azure-2023-code" in str(error.value)
    with pytest.raises(BadInput, match="unknown trace ''"):
        find_trace("", tmp_path)
    with pytest.raises(BadInput, match="cannot be looked for"):
        find_trace("x" * 5000, tmp_path)


@pytest.mark.parametrize(
    ("name", "requests", "inputs", "outputs", "span"),
    # Counted with zcat and awk, apart from this reader; spans are the last timestamp less the first.
    [
        ("azure-2023-conversation", 19_366, 1154.697408, 211.125942, 3501.721937),
        ("azure-2023-code", 8_819, 2047.848282, 27.882526, 3435.948056),
        ("mooncake-conversation", 12_031, 12035.061342, 342.618901, 3536.999),
    ],
)
def test_what_is_shipped(name: str, requests: int, inputs: float, outputs: float, span: float) -> None:
    trace = read_trace(shipped_traces()[name])
    assert len(trace) == requests
    assert trace.input_tokens.mean() == pytest.approx(inputs, abs=1e-6)
    assert trace.output_tokens.mean() == pytest.approx(outputs, abs=1e-6)
    assert trace.span_s == pytest.approx(span, abs=1e-6)
    assert trace.requests_per_s == pytest.approx((requests - 1) / span)
    assert trace.arrival_s is not None
    assert (np.diff(trace.arrival_s) >= 0).all()
    assert trace.empty_outputs == 0


def test_every_shipped_trace_is_named_with_its_licence() -> None:
    readme = (next(iter(shipped_traces().values())).parent / "README.md").read_text()
    for name in shipped_traces():
        assert f"`{name}.csv.gz`" in readme


def test_blocks_that_prompts_share(tmp_path: Path) -> None:
    assert trace_of(MOONCAKE, tmp_path).blocks == ((0, 7), ())
    assert trace_of(PLAIN, tmp_path).blocks is None
    ranges = "timestamp,input_tokens,output_tokens,hash_ids\n3,1500,1,0;14-15\n2.5,10,1,\n"
    # In the order of arrival, as the lengths are.
    assert trace_of(ranges, tmp_path).blocks == ((), (0, 14, 15))
    shipped = read_trace(find_trace("mooncake-conversation", tmp_path))
    assert shipped.blocks is not None
    lengths = [-(-int(tokens) // 512) for tokens in shipped.input_tokens]
    assert [len(blocks) for blocks in shipped.blocks] == lengths


@pytest.mark.parametrize("bad", ["a", "3-", "7-3", "1;x", "0-99999999"])
def test_bad_blocks_name_their_line(bad: str, tmp_path: Path) -> None:
    with pytest.raises(BadData, match=r"line 3.*hash_ids"):
        trace_of(f"timestamp,input_tokens,output_tokens,hash_ids\n1,10,1,0\n2,10,1,{bad}\n", tmp_path)
