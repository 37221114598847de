"""Graph-capture cases, third set: errors that user code catches, logs or cleans up after, around each kind of hazard."""
# ruff: noqa: BLE001, SIM105 - code that catches too much is what these cases are about
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import contextlib
import logging

import torch
from tests.port.capture.cases import setting
from tests.port.capture.cases.setting import B, D, collected, inputs, registry

__all__ = ["CASES", "State", "inputs"]
CASES, _ = registry(globals())
State = setting.State
LOG = logging.getLogger("cases3")
LOG.addHandler(logging.NullHandler())
LOG.propagate = False


def caught_pageable_upload(s, q, k, v, lens, score):
    try:
        scale = s.host_row.to(q.device).sum()
    except RuntimeError:
        scale = 28.0
    return q * scale


def caught_pageable_upload_other_value(s, q, k, v, lens, score):
    try:
        scale = s.host_row.to(q.device).sum()
    except RuntimeError:
        scale = 1.0
    return q * scale


def caught_constant_upload(s, q, k, v, lens, score):
    try:
        bias = torch.tensor([1.0, 2.0], device=q.device).sum()
    except RuntimeError as error:
        LOG.warning("no upload: %s", error)
        bias = 3.0
    return q + bias


def caught_download(s, q, k, v, lens, score):
    try:
        s.history.append(score.cpu())
    except RuntimeError:
        pass
    return q * 2


def caught_download_by_base_exception(s, q, k, v, lens, score):
    try:
        s.table["seen"] = lens.tolist()
    except BaseException:
        s.table["seen"] = None
    return q * 2


def caught_item(s, q, k, v, lens, score):
    with contextlib.suppress(Exception):
        s.table["max"] = score.max().item()
    return q * 2


def caught_float(s, q, k, v, lens, score):
    try:
        s.table["norm"] = float(score.norm())
    except Exception:
        LOG.exception("no norm")
    return q * 2


def caught_synchronize(s, q, k, v, lens, score):
    out = q * 2
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize()
    return out


def caught_nonzero(s, q, k, v, lens, score):
    try:
        s.table["hits"] = (score > 0).nonzero().shape[0]
    except RuntimeError:
        s.table["hits"] = -1
    return q * 2


def caught_mask_index(s, q, k, v, lens, score):
    try:
        s.table["rows"] = score[score > 0].sum()
    except RuntimeError:
        pass
    return q * 2


def caught_blocking_pinned(s, q, k, v, lens, score):
    with contextlib.suppress(RuntimeError):
        s.buf.copy_(s.pinned)
    return q + s.buf[0]


def caught_generator(s, q, k, v, lens, score):
    try:
        generator = torch.Generator(device=q.device).manual_seed(3)
        noise = torch.rand(1, device=q.device, generator=generator)
    except RuntimeError:
        noise = 0.0
    return q + 0 * noise


def caught_numpy_refusal(s, q, k, v, lens, score):
    try:
        values = score.numpy()
    except TypeError:
        values = None
    return q * 2 if values is None else q


def caught_numpy_of_cpu(s, q, k, v, lens, score):
    try:
        s.table["values"] = score.cpu().numpy()
    except Exception:
        s.table.pop("values", None)
    return q - 1


def finally_after_upload(s, q, k, v, lens, score):
    try:
        return q * torch.tensor(2.0).to(q.device)
    finally:
        s.calls += 1


def finally_swallows_upload(s, q, k, v, lens, score):
    out = q * 2
    try:
        out = q * torch.as_tensor([2.0], device=q.device)
    finally:
        return out  # noqa: B012


def raised_again_as_other(s, q, k, v, lens, score):
    try:
        return q * torch.tensor([2.0] * D, device=q.device)
    except RuntimeError as error:
        raise ValueError("no scale") from error


def caught_shape_error_each_call(s, q, k, v, lens, score):
    try:
        return q @ score
    except RuntimeError:
        return q @ s.w


def caught_missing_attribute(s, q, k, v, lens, score):
    try:
        return s.no_such(q)
    except AttributeError:
        return q * 4


def caught_index_put_number(s, q, k, v, lens, score):
    row = torch.zeros(8, device=q.device)
    with contextlib.suppress(RuntimeError):
        row[0] = 5.0
    row[1:2] = 5.0
    return q + row[1]


def caught_list_index(s, q, k, v, lens, score):
    try:
        part = k[:, :, [0, 1]].sum()
    except RuntimeError:
        part = k[:, :, :2].sum()
    return q + part


def context_manager_swallows_item(s, q, k, v, lens, score):
    class Quiet:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            return True

    with Quiet():
        s.table["x"] = int(lens[0])
    return q + 1


def context_manager_swallows_cpu(s, q, k, v, lens, score):
    @contextlib.contextmanager
    def best_effort():
        try:
            yield
        except Exception as error:
            s.history.append(str(error))

    with best_effort():
        s.table["x"] = lens.to("cpu")
    return q + 1


def retried_with_pinned(s, q, k, v, lens, score):
    try:
        s.buf.copy_(s.host_row, non_blocking=True)
    except RuntimeError:
        s.buf.copy_(s.pinned, non_blocking=True)
    return q + s.buf.sum()


def retried_with_same_pinned(s, q, k, v, lens, score):
    s.pinned_out.copy_(s.host_row)
    try:
        s.buf.copy_(s.host_row)
    except RuntimeError:
        s.buf.copy_(s.pinned_out, non_blocking=True)
    return q + s.buf.sum()


def caught_equal(s, q, k, v, lens, score):
    try:
        same = torch.equal(q, q.clone())
    except Exception:
        same = True
    return q * (2 if same else 3)


def caught_cholesky(s, q, k, v, lens, score):
    try:
        factor = torch.linalg.cholesky(s.w @ s.w.T + 100 * torch.eye(D, device=q.device))
    except Exception:
        factor = s.w
    return q @ factor


def caught_event_query(s, q, k, v, lens, score):
    event = torch.cuda.Event()
    event.record()
    with contextlib.suppress(Exception):
        event.query()
    return q * 2


def nested_try_around_upload(s, q, k, v, lens, score):
    try:
        try:
            lens.copy_(torch.tensor([3, 4]))
        except RuntimeError:
            raise KeyError("again") from None
    except KeyError:
        pass
    return q * B


CASES |= collected(globals())
