"""Graph-capture cases, third set: streams and events that are made, waited for, asked and left."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from tests.port.capture.cases import setting
from tests.port.capture.cases.setting import collected, inputs, registry

__all__ = ["CASES", "State", "inputs"]
CASES, _ = registry(globals())


class State(setting.State):
    def __init__(self, dev):
        super().__init__(dev)
        self.side = torch.cuda.Stream()
        self.other = torch.cuda.Stream()
        self.event = torch.cuda.Event()
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))


def events_fork_and_join(s, q, k, v, lens, score):
    s.event.record()
    with torch.cuda.stream(s.side):
        s.event.wait()
        part = k.sum(2)
        done = s.side.record_event()
    out = q * 2
    torch.cuda.current_stream().wait_event(done)
    return out + part.unsqueeze(2)


def events_waited_by_other_stream_only(s, q, k, v, lens, score):
    main = torch.cuda.current_stream()
    s.side.wait_stream(main)
    with torch.cuda.stream(s.side):
        part = k.sum(2)
    s.other.wait_stream(s.side)
    with torch.cuda.stream(s.other):
        part = part * 2
    main.wait_stream(s.other)
    return q + part.unsqueeze(2)


def events_two_branches_one_joined(s, q, k, v, lens, score):
    main = torch.cuda.current_stream()
    s.side.wait_stream(main)
    s.other.wait_stream(main)
    with torch.cuda.stream(s.side):
        a = k.sum(2)
    with torch.cuda.stream(s.other):
        v.sum(2)
    main.wait_stream(s.side)
    return q + a.unsqueeze(2)


def events_recorded_before_capture_waited_inside(s, q, k, v, lens, score):
    if not torch.cuda.is_current_stream_capturing():
        s.event.record()
    s.event.wait()
    return q * 2


def events_made_each_call(s, q, k, v, lens, score):
    event = torch.cuda.Event(blocking=True)
    out = q * 2
    event.record(torch.cuda.current_stream())
    event.wait(torch.cuda.current_stream())
    return out


def events_timed_and_read(s, q, k, v, lens, score):
    s.begin.record()
    out = q * 2
    s.end.record()
    s.end.synchronize()
    s.table["ms"] = s.begin.elapsed_time(s.end)
    return out


def events_elapsed_without_sync(s, q, k, v, lens, score):
    out = q * 2
    if torch.cuda.is_current_stream_capturing():
        return out
    s.begin.record()
    s.end.record()
    s.end.synchronize()
    s.table["ms"] = s.begin.elapsed_time(s.end)
    return out


def streams_side_waits_for_nobody(s, q, k, v, lens, score):
    with torch.cuda.stream(s.side):
        s.buf.add_(1)
    return q * 2


def streams_side_writes_then_main_waits(s, q, k, v, lens, score):
    with torch.cuda.stream(s.side):
        s.buf.add_(1)
    torch.cuda.current_stream().wait_stream(s.side)
    return q + s.buf[0]


def streams_default_used_inside(s, q, k, v, lens, score):
    with torch.cuda.stream(torch.cuda.default_stream()):
        s.buf.add_(1)
    return q * 2


def streams_default_forked_in(s, q, k, v, lens, score):
    main, default = torch.cuda.current_stream(), torch.cuda.default_stream()
    default.wait_stream(main)
    with torch.cuda.stream(default):
        s.buf.add_(1)
    main.wait_stream(default)
    return q + s.buf[0]


def streams_new_each_call(s, q, k, v, lens, score):
    side = torch.cuda.Stream(priority=-1)
    side.wait_stream(torch.cuda.current_stream())
    with side:
        out = q * 2
    torch.cuda.current_stream().wait_stream(side)
    out.record_stream(torch.cuda.current_stream())
    return out


def streams_none_context(s, q, k, v, lens, score):
    with torch.cuda.stream(None):
        return q * 2


def streams_joined_then_used_again(s, q, k, v, lens, score):
    main = torch.cuda.current_stream()
    s.side.wait_stream(main)
    with torch.cuda.stream(s.side):
        a = k.sum(2)
    main.wait_stream(s.side)
    with torch.cuda.stream(s.side):
        v.sum(2)
    return q + a.unsqueeze(2)


def streams_copy_out_beside(s, q, k, v, lens, score):
    main = torch.cuda.current_stream()
    s.side.wait_stream(main)
    with torch.cuda.stream(s.side):
        s.pinned_out.copy_(score[0, :8], non_blocking=True)
    out = q * 2
    main.wait_stream(s.side)
    return out


def streams_sync_outside_capture_only(s, q, k, v, lens, score):
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream().synchronize()
    return q * 2


def threads_pool_on_host(s, q, k, v, lens, score):
    with ThreadPoolExecutor(1) as pool:
        n = pool.submit(sum, [1, 2, 3]).result()
    return q * n


def threads_pool_reads_device(s, q, k, v, lens, score):
    with ThreadPoolExecutor(1) as pool:
        n = pool.submit(lambda: torch.ones(3).sum().item()).result()
    return q * n


def threads_launch_and_write(s, q, k, v, lens, score):
    worker = threading.Thread(target=lambda: s.buf.add_(1))
    worker.start()
    worker.join()
    return q * 2


def threads_read_item(s, q, k, v, lens, score):
    worker = threading.Thread(target=lambda: s.table.update(x=score.max().item()))
    worker.start()
    worker.join()
    return q * 2


def device_context_entered(s, q, k, v, lens, score):
    with torch.cuda.device(0):
        return torch.arange(4, device="cuda").sum() + q


def device_as_default(s, q, k, v, lens, score):
    with torch.device("cuda"):
        table = torch.arange(32) * torch.ones(32)
    return q + table


def device_as_default_from_list(s, q, k, v, lens, score):
    with torch.device("cuda"):
        table = torch.tensor([1.0] * 32)
    return q + table


CASES |= collected(globals())
