"""The vLLM connector where something refuses, stands still or is in the way: nothing waits for ever, nothing wrong crosses, and
nobody else's transfer is touched."""

import dataclasses
import os
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest
from ends import owned_schema, pools_of, until
from engine_side import LAYERS, values
from real_daemon import running
from test_owners import OTHER, as_user
from test_vllm import HERE, THERE, TOKENS, d, p, push, receiving, rng, side

from spectrumkv import requests
from spectrumkv.v1 import admin_service_pb2, report_pb2, worker_service_pb2

POISON = 99.0
ENDED = [getattr(report_pb2, f"TRANSFER_STATE_{how}") for how in ("COMMITTED", "FAILED", "CANCELLED", "EXPIRED")]


def sending(p, name, params, blocks=HERE, tokens=TOKENS, **options):
    """A request that is computed and sent in one step."""
    request = p.add(name, tokens, do_remote_decode=True, **params)
    p.step(new=[(request, blocks, 0, tokens)], **options)
    return request


# ---- what is computed in the step that sends it ------------------------------------------------------------------------


# Chunks have at most 1 MiB, and none leaves before all its tokens are written: here two of them are in the prefix.
WIDE = {"heads": 8, "dim": 128}
PREFIX, LONG, CHUNK = 256, 272, 128
LONG_HERE, LONG_THERE = list(range(17)), list(range(40, 57))


@pytest.fixture
def wide(prefill, decode):
    with side(prefill, block=16, **WIDE) as p, side(decode, block=16, **WIDE) as d:
        yield p, d


@pytest.mark.parametrize("again", [False, True], ids=["new", "resumed"])
def test_a_prefix_that_this_step_computes_is_not_sent_before(wide, decode, transfer_id, rng, again):
    """vLLM caches full blocks when it allocates them, so a request may hit the prefix of another one of the same step."""
    p, d = wide
    kv, mine = values(rng, LONG, **WIDE), [*LONG_HERE[:16], 20]
    receiving(d, transfer_id, push(transfer_id, decode), LONG_THERE, LONG)
    first = p.add("first", LONG)
    second = p.add(transfer_id, LONG, do_remote_decode=True, **push(transfer_id, decode))
    p.kv[:] = POISON
    if again:
        p.step(new=[(second, [60], 0, 4)])
        p.step(preempted=[transfer_id])
    hit = [(second, mine, PREFIX, LONG - PREFIX)]
    more = dict(more=hit, resumed=[transfer_id]) if again else {}
    p.step(new=[(first, LONG_HERE, 0, LONG), *([] if again else hit)], layers=0, **more)
    time.sleep(0.5)
    for layer in range(LAYERS):
        p.writer(kv, mine)(layer)
    p.finish_step()
    d.until(lambda: transfer_id in d.received)
    assert not d.failed
    np.testing.assert_array_equal(d.read(LONG_THERE, LONG), kv)


def test_earlier_chunks_leave_before_the_last_one_is_computed(wide, decode, transfer_id, rng):
    p, d = wide
    kv = values(rng, LONG, **WIDE)
    receiving(d, transfer_id, push(transfer_id, decode), LONG_THERE, LONG)
    request = p.add(transfer_id, LONG, do_remote_decode=True, **push(transfer_id, decode))
    p.step(new=[(request, LONG_HERE[:16], 0, PREFIX)], write=p.writer(kv, LONG_HERE, 0, PREFIX))
    p.step(more=[(request, LONG_HERE[16:], PREFIX, LONG - PREFIX)], layers=0)
    until(lambda: np.array_equal(d.read(LONG_THERE, CHUNK), kv[:, :, :CHUNK]))
    for layer in range(LAYERS):
        p.writer(kv, LONG_HERE, PREFIX)(layer)
    p.finish_step()
    d.until(lambda: transfer_id in d.received)
    np.testing.assert_array_equal(d.read(LONG_THERE, LONG), kv)


# ---- what the daemon refuses for ever ----------------------------------------------------------------------------------


def open_another_users(daemon, name):
    """Opens both halves of a transfer of this name as another user."""
    before = set(pools_of(daemon))
    register = worker_service_pb2.RegisterPoolRequest(request_id=name, schema=owned_schema())
    assert as_user(OTHER, daemon, ("RegisterPool", register))[0][0] == "OK"
    (pool_id,) = set(pools_of(daemon)) - before
    calls = [("Publish", requests.publish(name, 4, [1], None, b"", 0, True, b"", requests.WHOLE)),
             ("Expect", requests.expect(name, 4, [2], b"", 0, False, False, requests.WHOLE))]  # fmt: skip
    for _, call in calls:
        call.pool.pool_id, call.pool.epoch = pool_id, daemon.epoch
    assert [code for code, *_ in as_user(OTHER, daemon, *calls)] == ["OK", "OK"]


def ends_soon(one, name, ended):
    start = time.monotonic()
    one.until(lambda: name in ended)
    assert time.monotonic() - start < 2


def with_id(wanted, transfer_id):
    wanted.handover = dataclasses.replace(wanted.handover, transfer_id=transfer_id)


@pytest.mark.parametrize("field", ["arrived_s", "transfer_id", "transfer_token", "decode_peer", "policy", "do_remote_decode"])
@pytest.mark.parametrize("value", [[1], {"a": 1}, float("nan"), "\ud800", 10**400], ids=["list", "map", "nan", "surrogate", "huge"])
def test_parameters_of_any_json_are_refused_and_nothing_more(p, field, value):
    """vLLM's engine ends with an exception of on_new_request."""
    request = p.add("request", TOKENS, **{"do_remote_decode": True, field: value})
    assert p.scheduler.take_counts() == {"requests_refused": 1}
    assert p.scheduler.num_new_matched_tokens(request, 0) == (0, False)


@pytest.mark.parametrize("wrong", ["a b", "x" * 129], ids=["letters", "length"])
def test_an_id_that_the_daemon_does_not_take(p, d, prefill, decode, transfer_id, wrong):
    """Handover.of refuses such an id; were the daemon's rule another one, the request would end all the same."""
    request = d.add(transfer_id, TOKENS, do_remote_prefill=True, **push(transfer_id, decode))
    with_id(d.scheduler._wanted[transfer_id], wrong)
    d.allocate(request, THERE)
    ends_soon(d, transfer_id, d.received)
    assert d.failed == set(THERE)
    request = p.add(transfer_id, TOKENS, do_remote_decode=True, **push(transfer_id, decode))
    with_id(p.scheduler._prompts[transfer_id], wrong)
    p.step(new=[(request, HERE, 0, TOKENS)])
    assert p.scheduler.request_finished(request, aborted=True)[0]
    ends_soon(p, transfer_id, p.sent)


@pytest.mark.skipif(os.geteuid() != 0, reason="SKIPPED: not root, so no call can be another user's")
@pytest.mark.parametrize("aborted", [False, True])
def test_an_id_of_another_user(transfer_id, aborted):
    with running() as daemon:
        daemon.folder.chmod(0o711)
        open_another_users(daemon, transfer_id)
        with side(daemon) as one:
            receiving(one, "load", push(transfer_id, daemon))
            request = sending(one, "send", push(transfer_id, daemon))
            if aborted:
                one.scheduler.request_finished(one.scheduler._wanted["load"].request, aborted=True)
            assert one.scheduler.request_finished(request, aborted=aborted)[0]
            ends_soon(one, "load", one.received)
            ends_soon(one, "send", one.sent)
            assert one.failed <= set(THERE) and (aborted or one.failed)
        with daemon.admin() as admin:  # the other user's halves live on
            assert len(admin.ListTransfers(admin_service_pb2.ListTransfersRequest()).transfers) == 2
        daemon.kill()  # it would wait for them


@pytest.mark.parametrize("aborted", [False, True])
def test_a_token_that_the_daemon_does_not_take_any_more(transfer_id, aborted):
    with running(worker__tcp_address="127.0.0.1:0") as daemon:
        over_tcp = SimpleNamespace(worker=daemon.worker_tcp, peer=daemon.peer)
        with side(over_tcp, token_file=f"{daemon.folder}/token") as one:
            one.courier.client._metadata = [("authorization", "Bearer of-yesterday")]
            one.scheduler.set_pools([])  # it is left to the worker
            receiving(one, "load", push("load", daemon))
            request = sending(one, transfer_id, push(transfer_id, daemon))
            if aborted:
                one.scheduler.request_finished(one.scheduler._wanted["load"].request, aborted=True)
            assert one.scheduler.request_finished(request, aborted=aborted)[0]
            ends_soon(one, "load", one.received)
            ends_soon(one, transfer_id, one.sent)
            assert one.failed <= set(THERE) and (aborted or one.failed)


# ---- somebody else's transfer of the same id ---------------------------------------------------------------------------


@pytest.mark.parametrize("left", [False, True], ids=["scheduler", "worker"])
@pytest.mark.parametrize("aborted", [False, True])
def test_two_loads_of_one_id(p, d, decode, transfer_id, rng, left, aborted):
    """`n: 2` makes two requests of one: the first gets the KV, the other computes, whoever finds it out, and whenever it ends."""
    kv, others = values(rng, TOKENS), [60, 61, 62, 50, 51]
    receiving(d, transfer_id, push(transfer_id, decode))
    if left:
        d.scheduler.set_pools([])
    request = d.add("other", TOKENS, do_remote_prefill=True, **push(transfer_id, decode))
    d.allocate(request, others)
    if aborted:
        d.scheduler.request_finished(request, aborted=True)
    ends_soon(d, "other", d.received)
    assert d.failed <= set(others) and (aborted or d.failed == set(others))
    d.failed.clear()
    sending(p, transfer_id, push(transfer_id, decode), write=p.writer(kv, HERE))
    d.until(lambda: transfer_id in d.received)
    assert not d.failed
    np.testing.assert_array_equal(d.read(THERE, TOKENS), kv)


def test_one_ranks_part_is_somebody_elses(d, decode, transfer_id):
    """The rank that has its part gives it back; the other has nothing, and touches nothing."""
    with decode.client() as client:
        client.expect(f"{transfer_id}.tp1", pool=d.pool, token_count=4, blocks=[60])
        d.scheduler.set_pools([d.pool.ref, d.pool.ref])
        d.worker.size = 2
        for d.worker.rank in (0, 1):
            name = f"{transfer_id}-{d.worker.rank}"
            request = d.add(name, TOKENS, do_remote_prefill=True, **push(transfer_id, decode))
            d.allocate(request, THERE)
            ends_soon(d, name, d.received)
            assert d.failed == set(THERE)
            transfer = client.get_transfer(f"{transfer_id}.tp0", role="RECEIVER")
            assert transfer.state == report_pb2.TRANSFER_STATE_CANCELLED
            d.failed.clear()
        assert client.get_transfer(f"{transfer_id}.tp1", role="RECEIVER").state not in ENDED
        client.cancel(f"{transfer_id}.tp1", role="RECEIVER")


@pytest.mark.parametrize("end", ["finished", "aborted", "preempted"])
def test_two_sends_of_one_id(p, d, decode, transfer_id, rng, end):
    kv, others = values(rng, TOKENS), [60, 61, 62, 50, 51]
    receiving(d, transfer_id, push(transfer_id, decode))
    sending(p, transfer_id, push(transfer_id, decode), write=p.writer(kv, HERE), layers=2)
    until(lambda: np.array_equal(d.read(THERE, TOKENS)[:2], kv[:2]))
    first = list(p.worker._now)
    request = sending(p, "other", push(transfer_id, decode), others)
    if end == "preempted":
        p.step(preempted=["other"])
    else:
        assert p.scheduler.request_finished(request, aborted=end == "aborted")[0]
        ends_soon(p, "other", p.sent)
    p.worker._now = first
    for layer in range(2, LAYERS):
        p.writer(kv, HERE)(layer)
    p.finish_step()
    d.until(lambda: transfer_id in d.received)
    assert not d.failed
    np.testing.assert_array_equal(d.read(THERE, TOKENS), kv)


# ---- a daemon that cannot just now -------------------------------------------------------------------------------------


def test_a_daemon_that_stands_still_is_waited_for_once(p, transfer_id, rng):
    """The scheduler waits for one call, whatever number of requests there is; the workers' threads wait for the rest."""
    names = [f"{transfer_id}-{i}" for i in range(10)]
    kv = {name: values(rng, 4) for name in names}
    with running() as stopped, side(stopped) as d:
        requests = [d.add(name, 4, do_remote_prefill=True, **push(name, stopped)) for name in names]
        os.kill(stopped.process.pid, signal.SIGSTOP)
        try:
            start = time.monotonic()
            for i, request in enumerate(requests):
                assert d.allocate(request, [i]) == (4, True)
            d.step()
            assert time.monotonic() - start < 4
        finally:
            os.kill(stopped.process.pid, signal.SIGCONT)
        new = [(p.add(name, 4, do_remote_decode=True, **push(name, stopped)), [i], 0, 4) for i, name in enumerate(names)]
        p.step(new=new, write=lambda layer: [p.writer(kv[name], [i])(layer) for i, name in enumerate(names)])
        d.until(lambda: d.received == set(names))
        assert not d.failed
        for i, name in enumerate(names):
            np.testing.assert_array_equal(d.read([i], 4), kv[name])


def test_a_load_that_there_is_no_room_for_yet(p, transfer_id, rng):
    """The daemon says when to ask again: the worker does."""
    first, second = f"{transfer_id}-1", f"{transfer_id}-2"
    kv = values(rng, TOKENS)
    with running(transfer__max_active=1) as small, side(small) as d:
        receiving(d, first, push(first, small))
        receiving(d, second, push(second, small), list(range(50, 55)))
        sending(p, first, push(first, small), write=p.writer(kv, HERE))
        d.until(lambda: first in d.received)
        assert second not in d.received and not d.scheduler.take_counts()
        sending(p, second, push(second, small), write=p.writer(kv, HERE))
        d.until(lambda: second in d.received)
        assert not d.failed
        np.testing.assert_array_equal(d.read(range(50, 55), TOKENS), kv)
