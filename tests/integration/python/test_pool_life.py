"""Lives of pools and workers: death, leases, unregistering."""

import threading
import time

import numpy as np
import pytest
from ends import COMMITTED, TOKENS, WAITING, Ends, ended, owned_schema, pools_of, until, worker_process
from moves import check, poison, unique
from real_daemon import refused

from spectrumkv.errors import rpc
from spectrumkv.v1 import schema_pb2, worker_service_pb2


@pytest.mark.parametrize("role", ["source", "target"])
@pytest.mark.parametrize("phase", ["nothing", "half"])
def test_worker_that_dies(phase, role, source, target, prefill, decode, transfer_id):
    """What a killed worker held is let go long before its lease ends, and its peer hears of it: before a layer was
    sent, and between two layers."""
    daemon = prefill if role == "source" else decode
    ends = Ends(source, target, prefill, decode, transfer_id)
    layers = 1 if phase == "half" else 0
    with ends.here.pool, ends.there.pool:
        with worker_process(daemon, role, ends.name, decode.peer, phase) as (worker, pool_id):
            if role == "source":
                ends.expect()
            else:
                ends.send(layerwise=True)
                if layers:
                    ends.source.advance(ends.name, layers=1, tokens=TOKENS)
            until(lambda: source.get_transfer(ends.name).state != WAITING)
            until(lambda: target.get_transfer(ends.name).layers_ready == layers)
            worker.kill()
            worker.wait()
            died = time.monotonic()
            reasons = {"source": "SOURCE_GONE", "target": "DESTINATION_GONE"}
            for client in (source, target):
                report = ended(client, ends.name)
                assert (report.code, report.reason) == (9, reasons[role]), report  # FAILED_PRECONDITION
                assert report.layers_ready <= layers
            assert time.monotonic() - died < 15
            until(lambda: pool_id not in pools_of(daemon))
        if role == "source":
            landed = ends.there.pool.segment.memory.copy()
            time.sleep(0.2)
            assert (ends.there.pool.segment.memory == landed).all(), "a byte landed late"
            assert ends.untouched() == (layers == 0)
            poison(ends.there)
        ends.name += ".again"
        ends.expect()
        ends.send()
        ends.both_end(COMMITTED)
        check(ends.there, [ends.kv])


@pytest.mark.parametrize("phase", ["final", "advanced"])
def test_worker_that_dies_after_its_last_word(phase, source, target, prefill, decode, transfer_id):
    """A source that was fully written may finish: its memory stays mapped until the transfer has ended."""
    ends = Ends(source, target, prefill, decode, transfer_id)
    words = np.empty((2, 2, TOKENS, 2, 16), "<u2")
    words[:] = 1000 * np.arange(2).reshape(2, 1, 1, 1, 1) + np.arange(TOKENS).reshape(1, 1, TOKENS, 1, 1)
    with ends.here.pool, ends.there.pool:
        with worker_process(prefill, "source", ends.name, "", phase) as (worker, pool_id):
            worker.kill()
            worker.wait()
            until(lambda: pools_of(prefill)[pool_id] == "lost")
            with refused("NOT_FOUND", "UNKNOWN_POOL"):  # nobody begins anything new with it
                ref = schema_pb2.PoolRef(pool_id=pool_id, epoch=prefill.epoch)
                rpc(source.worker.RenewLease, worker_service_pb2.RenewLeaseRequest(pool=ref), 20)
            ends.fetch()
            ends.both_end(COMMITTED)
            check(ends.there, [words])
            until(lambda: pool_id not in pools_of(prefill))


def test_lease(source, prefill):
    before = prefill.metrics()['spectrumkv_leases_expired_total{kind="pool"}']
    request = worker_service_pb2.RegisterPoolRequest(request_id=unique("r"), schema=owned_schema(), lease_ttl_ms=1000)
    answer = rpc(source.worker.RegisterPool, request, 20)
    assert answer.lease_ttl_ms == 1000
    renew = worker_service_pb2.RenewLeaseRequest(pool=answer.pool)
    for _ in range(4):  # longer than the lease
        time.sleep(0.4)
        assert rpc(source.worker.RenewLease, renew, 20).lease_ttl_ms == 1000
    until(lambda: prefill.metrics()['spectrumkv_leases_expired_total{kind="pool"}'] == before + 1)
    with refused("NOT_FOUND", "UNKNOWN_POOL"):
        rpc(source.worker.RenewLease, renew, 20)


def test_unregister_waits(ends, transfer_id):
    ends.expect()
    with refused("DEADLINE_EXCEEDED", "POOL_BUSY"):
        ends.there.pool.close(timeout_ms=200)
    ends.send(layerwise=True)  # the pool is as it was
    until(lambda: ends.target.get_transfer(ends.name).state != WAITING)
    closed = []
    closer = threading.Thread(target=lambda: closed.append(ends.there.pool.close(timeout_ms=20000)))
    closer.start()
    time.sleep(0.3)
    assert not closed
    with refused("FAILED_PRECONDITION", "POOL_CLOSING"):
        ends.target.expect(transfer_id + ".late", pool=ends.there.pool, token_count=1, blocks=[11])
    ends.source.advance(ends.name, layers=2, tokens=TOKENS)
    ends.both_end(COMMITTED)
    closer.join(20)
    assert closed == [None]
    check(ends.there, [ends.kv])


def test_worker_that_dies_before_it_begins(prefill, source):
    """A pool that was registered and never used goes with its worker, long before its lease ends."""
    with worker_process(prefill, "idle", unique("none"), "", "nothing") as (worker, pool_id):
        assert pool_id in pools_of(prefill)
        worker.kill()
        worker.wait()
        until(lambda: pool_id not in pools_of(prefill), timeout_s=10)


@pytest.mark.parametrize("by", ["source", "target"])
def test_a_wait_longer_than_the_lease(by, source, target, prefill, decode, transfer_id):
    """A worker that lives keeps its lease, however long its transfer waits for the other half."""
    before = {daemon: daemon.metrics()['spectrumkv_leases_expired_total{kind="pool"}'] for daemon in (prefill, decode)}
    ends = Ends(source, target, prefill, decode, transfer_id, lease_ttl_ms=1000)
    with ends.here.pool, ends.there.pool:
        assert ends.here.pool.lease_ttl_ms == ends.there.pool.lease_ttl_ms == 1000
        first, second = (ends.send, ends.expect) if by == "source" else (ends.expect, ends.send)
        first()
        time.sleep(3.5)
        second()
        ends.both_end(COMMITTED)
        check(ends.there, [ends.kv])
        assert ends.here.pool.registrations == ends.there.pool.registrations == 1
    for daemon, count in before.items():
        assert daemon.metrics()['spectrumkv_leases_expired_total{kind="pool"}'] == count
