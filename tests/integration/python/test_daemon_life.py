"""Lives of daemons: drain, restart, death."""

import pathlib
import queue
import signal
import threading
import time

import grpc
import pytest
from ends import COMMITTED, TOKENS, Ends, ended, owned_schema, until
from moves import check, make_side, small_group
from real_daemon import refused, running
from tcp_proxy import Proxy

import spectrumkv as skv
from spectrumkv.errors import rpc
from spectrumkv.v1 import admin_service_pb2, schema_pb2, worker_service_pb2


def test_drain_waits_for_holds(target, decode, transfer_id):
    with running() as draining, draining.client() as source, draining.admin() as admin:
        ends = Ends(source, target, draining, decode, transfer_id)
        with ends.here.pool, ends.there.pool:
            ends.publish()
            with refused("DEADLINE_EXCEEDED", "DRAIN_TIMEOUT"):
                admin.Drain(admin_service_pb2.DrainRequest(timeout_ms=300), timeout=20)
            assert draining.metrics()["spectrumkv_draining"] == 1
            with refused("UNAVAILABLE", "DRAINING"):
                ends.source.publish(transfer_id + "b", **ends._here())
            with refused("UNAVAILABLE", "DRAINING"):
                make_side(source, draining, [small_group()], {0: [1]})
            ends.fetch()  # what was promised is kept
            ends.both_end(COMMITTED)
            check(ends.there, [ends.kv])
            done = admin.Drain(admin_service_pb2.DrainRequest(timeout_ms=5000), timeout=20)
            assert done.transfers_left == 0
        assert draining.stop() == 0


class HoldStream:
    """A HoldPool stream by hand: ping() asks, messages has the answers, `ended` is set at its end."""

    def __init__(self, client, ref):
        self.messages, self.ended, self.error = [], threading.Event(), None
        self._pings = queue.Queue()
        self._ref = ref
        self._stream = client.worker.HoldPool(iter(self._pings.get, None))
        threading.Thread(target=self._read, daemon=True).start()
        self.ping()

    def ping(self):
        self._pings.put(worker_service_pb2.HoldPoolRequest(pool=self._ref))

    def close(self):
        self._pings.put(None)

    def events(self):
        return [message.event for message in self.messages if message.event]

    def _read(self):
        try:
            for message in self._stream:
                self.messages.append(message)
        except grpc.RpcError as error:
            self.error = error
        self.ended.set()


def test_a_pool_stays_while_the_daemon_drains():
    """DRAINING is no end: pings renew, blocks are read and written, and the last event is another one."""
    with running() as daemon, daemon.client() as client, daemon.admin() as admin:
        request = worker_service_pb2.RegisterPoolRequest(request_id="r", schema=owned_schema(), lease_ttl_ms=1000)
        ref = rpc(client.worker.RegisterPool, request, 20).pool
        stream = HoldStream(client, ref)
        until(lambda: stream.messages)
        admin.Drain(admin_service_pb2.DrainRequest(timeout_ms=20000), timeout=30)  # nothing to wait for
        until(lambda: stream.events() == ["DRAINING"])
        answers = len(stream.messages)
        for _ in range(4):  # longer than the lease
            time.sleep(0.4)
            stream.ping()
        until(lambda: len(stream.messages) > answers)
        late = HoldStream(client, ref)  # a worker that connects again hears it, too
        until(lambda: late.events() == ["DRAINING"])
        assert rpc(client.worker.RenewLease, worker_service_pb2.RenewLeaseRequest(pool=ref), 20).lease_ttl_ms == 1000
        blocks = worker_service_pb2.GetBlocksRequest(pool=ref, runs=[schema_pb2.BlockRun(count=1)])
        assert sum(len(answer.blocks) for answer in client.worker.GetBlocks(blocks, timeout=20)) == 4  # 2 layers, K and V
        assert not stream.ended.is_set() and not late.ended.is_set()
        rpc(client.worker.UnregisterPool, worker_service_pb2.UnregisterPoolRequest(pool=ref), 20)
        for held in (stream, late):
            assert held.ended.wait(20) and held.error is None
            assert held.events() == ["DRAINING", "UNREGISTERED"]


def test_restart_of_the_daemon(target, decode, transfer_id):
    with running() as prefill, prefill.client() as source:
        ends = Ends(source, target, prefill, decode, transfer_id)
        with ends.here.pool, ends.there.pool:
            stale = ends.here.pool.ref
            ends.publish()
            prefill.restart()
            assert prefill.epoch != stale.epoch
            request = worker_service_pb2.RenewLeaseRequest(pool=stale)
            until(lambda: _code(source, request) == ("FAILED_PRECONDITION", "STALE_EPOCH"))
            # The client registers again by itself; what was published is gone with the daemon.
            with refused("NOT_FOUND", "UNKNOWN_TRANSFER"):
                source.get_transfer(ends.name)
            ends.publish()
            assert ends.here.pool.registrations == 2 and ends.here.pool.ref.epoch == prefill.epoch
            ends.fetch()
            ends.both_end(COMMITTED)
            check(ends.there, [ends.kv])


def _code(client, request):
    try:
        rpc(client.worker.RenewLease, request, 5)
    except skv.SpectrumKVError as error:
        return error.code, error.reason


@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
def test_daemon_that_restarts_in_the_middle(pull, source, target, prefill, decode, transfer_id):
    """The one that dialled comes back, and is told at once that there is nothing to go on with: the other half of the
    transfer went with the daemon that had it. At the address of a relay somebody always listens."""
    with running() as mortal, mortal.client() as its, Proxy(mortal.peer) as relay:
        ends = Ends(its, target, mortal, decode, transfer_id) if pull else Ends(source, its, prefill, mortal, transfer_id)
        with ends.here.pool, ends.there.pool:
            if pull:
                ends.publish(layerwise=True)
                ends.fetch(peer=relay.address)
            else:
                ends.send(layerwise=True, peer=relay.address)
                ends.expect()
            ends.source.advance(ends.name, layers=1, tokens=TOKENS)
            until(lambda: ends.target.get_transfer(ends.name).layers_ready == 1)
            dialler = target if pull else source
            mortal.restart()
            start = time.monotonic()
            report = ended(dialler, ends.name)
            assert (report.code, report.reason) == (9, "PEER_RESTARTED"), report  # FAILED_PRECONDITION
            assert time.monotonic() - start < 4
            assert report.attempts > 1
            # Its blocks are free for the next one, once the restarted daemon has its pool again.
            until(lambda: (ends.here if pull else ends.there).pool.registrations == 2)
            ends.name += ".again"
            (ends.publish if pull else ends.expect)()
            (ends.fetch if pull else ends.send)()
            ends.both_end(COMMITTED)
            check(ends.there, [ends.kv])


@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
def test_daemon_that_was_dialled_and_dies(pull, source, target, prefill, decode, transfer_id):
    """Its machine says that nobody listens any more: that is told at once, not after the progress timeout of 5 s."""
    with running() as mortal, mortal.client() as its:
        ends = Ends(its, target, mortal, decode, transfer_id) if pull else Ends(source, its, prefill, mortal, transfer_id)
        with (ends.there if pull else ends.here).pool:
            (ends.publish if pull else ends.send)(layerwise=True)
            (ends.fetch if pull else ends.expect)()
            ends.source.advance(ends.name, layers=1, tokens=TOKENS)
            until(lambda: ends.target.get_transfer(ends.name).layers_ready == 1)
            mortal.kill()
            start = time.monotonic()
            report = ended(target if pull else source, ends.name)
            took = time.monotonic() - start
            assert (report.code, report.reason) == (14, "PEER_GONE"), report  # UNAVAILABLE
            assert report.attempts > 1 and took < 2, (report.attempts, took)
        (ends.here if pull else ends.there).pool.close()


def test_daemon_that_dies_in_the_middle(target, decode, transfer_id):
    with running() as prefill, prefill.client() as source:
        ends = Ends(source, target, prefill, decode, transfer_id)
        with ends.there.pool:
            ends.expect()
            ends.send(layerwise=True)
            source.advance(ends.name, layers=1, tokens=TOKENS)
            until(lambda: target.get_transfer(ends.name).layers_ready == 1)
            prefill.kill()
            report = ended(target, ends.name)
            assert (report.code, report.reason) == (14, "PEER_GONE"), report  # UNAVAILABLE
        ends.here.pool.close()


@pytest.mark.parametrize("pull", [True, False], ids=["pulled", "pushed"])
def test_an_ending_daemon_keeps_its_promises(pull, target, decode, transfer_id):
    """SIGTERM with a transfer half done: new work is refused, the transfer commits, its worker hears so, then the
    daemon ends; sockets are closed last."""
    with running() as ending, ending.client() as its:
        ends = Ends(its, target, ending, decode, transfer_id)
        with ends.here.pool, ends.there.pool:
            if pull:
                ends.publish(layerwise=True)
                ends.fetch()
            else:
                ends.expect()
                ends.send(layerwise=True)
            its.advance(ends.name, layers=1, tokens=TOKENS)
            until(lambda: target.get_transfer(ends.name).layers_ready == 1)
            ending.process.send_signal(signal.SIGTERM)
            until(lambda: ending.metrics()["spectrumkv_draining"] == 1)
            with refused("UNAVAILABLE", "DRAINING"):
                its.publish(transfer_id + "b", **ends._here())
            assert ending.alive
            watched = []
            watcher = threading.Thread(target=lambda: watched.append(ended(its, ends.name).state))
            watcher.start()
            its.advance(ends.name, layers=2, tokens=TOKENS)
            assert ended(target, ends.name).state == COMMITTED
            watcher.join(20)
            assert watched == [COMMITTED]
            check(ends.there, [ends.kv])
            assert ending.process.wait(20) == 0
            assert not pathlib.Path(ending.worker).exists()
