"""The client library against a daemon that misbehaves on demand."""

import logging
import os
import threading
import time

import grpc
import numpy as np
import pytest

import spectrumkv as skv
from spectrumkv.v1 import policy_pb2, report_pb2, worker_service_pb2


def until(condition, timeout_s=5.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def test_pool_tells_its_schema_and_goes(daemon, client, group):
    with client.shared_memory_pool([group], model="m", revision="r") as pool:
        (schema,) = daemon.worker.pools.values()
        assert (schema.model, schema.revision) == ("m", "r")
        assert schema.segments[0].posix_shm.size_bytes == pool.segment.size_bytes == group.size_bytes + -group.size_bytes % 4096
        path = "/dev/shm" + schema.segments[0].posix_shm.name
        assert os.path.exists(path)
        assert pool.k(5).shape == (7, 4, 3, 16)
        pool.v(2)[6, 3, 2, 15] = 2.5
        assert pool.kv()[0, 1, 6, 3, 2, 15] == 2.5
        with pytest.raises(KeyError, match="layer 3"):
            pool.k(3)
    assert not daemon.worker.pools
    assert not os.path.exists(path)


def test_pool_in_a_file(daemon, client, group, tmp_path):
    with client.shared_memory_pool([group], model="m", shared_dir=str(tmp_path)) as pool:
        (schema,) = daemon.worker.pools.values()
        path = tmp_path / schema.segments[0].file.path
        assert path.stat().st_size == schema.segments[0].file.size_bytes
        pool.k(2)[0, 0, 0, 0] = 1.0
        assert path.read_bytes()[:2] == np.float16(1).tobytes()
    assert not path.exists()


def test_tokens_go_to_scattered_blocks_and_back(client, group):
    with client.shared_memory_pool([group], model="m") as pool:
        kv = np.random.default_rng(1).normal(size=(2, 2, 10, 3, 16)).astype(np.float16)
        pool.write_tokens(kv, [6, 0, 3])
        assert (pool.k(5)[3, :2] == kv[1, 0, 8:]).all()
        assert (pool.read_tokens(10, [6, 0, 3]) == kv).all()
        with pytest.raises(ValueError, match="do not fit"):
            pool.write_tokens(kv, [1, 2])


def test_generations_lie_behind_the_groups(daemon, client, group):
    other = skv.Group(layers=[0], heads=1, head_dim=8, block_tokens=2, num_blocks=600)
    with client.shared_memory_pool([group, other], model="m", generations=True) as pool:
        (schema,) = daemon.worker.pools.values()
        at = schema.generations.offset_bytes
        assert at % 4096 == 0 and at >= group.size_bytes + other.size_bytes and schema.generations.segment == 0
        assert schema.segments[0].posix_shm.size_bytes == pool.segment.size_bytes >= at + 8 * 600
        table = pool.segment.memory[at : at + 8 * 600].view("<u8")
        assert not table.any()
        with pool.writing([599, 0]):
            assert list(np.flatnonzero(table % 2)) == [0, 599]
        assert list(np.flatnonzero(table)) == [0, 599] and table[0] == table[599] == 2
    with client.shared_memory_pool([group], model="m") as pool:
        assert pool.generations is None and not pool.schema.HasField("generations")
        with pytest.raises(ValueError, match="without generations"):
            pool.writing([0])


def test_blocks_are_odd_while_anybody_writes_them():
    table = np.zeros(5, np.uint64)
    generations = skv.BlockGenerations(table)
    with generations.writing([1, 3, 1]):
        assert list(table) == [0, 1, 0, 1, 0]
        with generations.writing(range(2, 4)):
            assert list(table) == [0, 1, 1, 1, 0]
        assert list(table) == [0, 1, 2, 1, 0]
    assert list(table) == [0, 2, 2, 2, 0]
    with pytest.raises(KeyError), generations.writing([4]):
        raise KeyError("the writer failed")
    assert list(table) == [0, 2, 2, 2, 2]
    with generations.writing([]):
        assert list(table) == [0, 2, 2, 2, 2]
    for wrong in ([0, 5], [-1], [2**40]):
        with pytest.raises(IndexError, match=f"block {wrong[-1]} is not one of 5"), generations.writing(wrong):
            pass
    assert list(table) == [0, 2, 2, 2, 2]


def test_many_threads_write_one_block():
    table = np.zeros(2, np.uint64)
    generations = skv.BlockGenerations(table)
    even = []

    def write():
        for _ in range(500):
            with generations.writing([0]):
                if table[0] % 2 == 0:
                    even.append(int(table[0]))

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert even == [] and table[0] % 2 == 0 and 0 < table[0] <= 2 * 4 * 500 and table[1] == 0


def test_write_tokens_marks_its_blocks(client, group):
    with client.shared_memory_pool([group], model="m", generations=True) as pool:
        kv = np.ones((2, 2, 10, 3, 16), np.float16)
        pool.write_tokens(kv, [6, 0, 3])
        assert list(pool.generations.table) == [2, 0, 0, 2, 0, 0, 2]
        assert (pool.read_tokens(10, [6, 0, 3]) == kv).all()


def test_hold_pings_within_the_lease(daemon, client, group):
    with client.shared_memory_pool([group], model="m") as pool:
        first = daemon.worker.pings.get(timeout=5)
        start = time.monotonic()
        for _ in range(3):
            assert daemon.worker.pings.get(timeout=5) == first == pool.ref
        assert time.monotonic() - start < 10 * daemon.worker.lease_ttl_ms / 1000


def test_lost_hold_registers_again(daemon, client, group):
    with client.shared_memory_pool([group], model="m") as pool:
        daemon.worker.pings.get(timeout=5)
        old = pool.ref
        daemon.worker.restart()
        daemon.worker.hold_events.put("LEASE_EXPIRED")
        until(lambda: pool.ref.epoch == daemon.worker.epoch)
        assert pool.ref != old and pool.registrations == 2
        until(lambda: daemon.worker.pings.get(timeout=5) == pool.ref)


def test_wait_held_says_whether_the_daemon_would_notice_a_death(daemon, client, group):
    daemon.worker.answers_holds.clear()
    with client.shared_memory_pool([group], model="m") as pool:
        assert not pool.wait_held(timeout_s=0.1)  # registered, but nobody has answered the stream
        daemon.worker.answers_holds.set()
        assert pool.wait_held()
        # A hold that was lost is none until another one is answered.
        daemon.worker.answers_holds.clear()
        daemon.worker.restart()
        daemon.worker.hold_events.put("LEASE_EXPIRED")
        until(lambda: pool.registrations == 2)
        assert not pool.wait_held(timeout_s=0.1)
        daemon.worker.answers_holds.set()
        assert pool.wait_held()


def test_registers_again_when_the_daemon_says_that_it_may(daemon, client, group):
    with client.shared_memory_pool([group], model="m") as pool:
        daemon.worker.pings.get(timeout=5)
        full = (grpc.StatusCode.RESOURCE_EXHAUSTED, "POOLS_QUOTA", "full", None, 700)
        daemon.worker.registration_failures = [full, full]
        daemon.worker.restart()
        daemon.worker.hold_events.put("LEASE_EXPIRED")
        until(lambda: pool.registrations == 2, timeout_s=20)
        at = daemon.worker.registered_at
        assert len(at) == 4 and min(at[3] - at[2], at[2] - at[1]) >= 0.7


def test_a_registration_that_takes_long_holds_up_nobody_else(daemon, client, group):
    """`ref` is asked for on event loops and between two steps of an engine."""
    with client.shared_memory_pool([group], model="m") as pool:
        daemon.worker.answers_registrations.clear()
        daemon.worker.restart()
        daemon.worker.hold_events.put("LEASE_EXPIRED")
        until(lambda: len(daemon.worker.registered_at) == 2)
        stale = pool.ref
        waiting = threading.Thread(target=pool.register_again, args=(stale,))  # makes no other one
        waiting.start()
        for _ in range(5):
            start = time.monotonic()
            assert pool.ref == stale
            assert time.monotonic() - start < 0.05
            time.sleep(0.02)
        daemon.worker.answers_registrations.set()
        waiting.join(20)
        assert pool.ref.epoch == 2
        assert pool.registrations == len(daemon.worker.registered_at) == 2


def test_a_pool_that_is_closed_while_it_is_registered_again_leaves_nothing(daemon, client, group):
    pool = client.shared_memory_pool([group], model="m")
    daemon.worker.answers_registrations.clear()
    daemon.worker.restart()
    again = threading.Thread(target=lambda: answers.append(pool.register_again(pool.ref)))
    answers = []
    again.start()
    until(lambda: len(daemon.worker.registered_at) == 2)
    pool.close()
    daemon.worker.answers_registrations.set()
    again.join(20)
    assert answers == [False]
    until(lambda: not daemon.worker.pools)


@pytest.fixture
def noise(monkeypatch, caplog):
    """What threads died of, and what was logged as a warning or worse."""
    died = []
    monkeypatch.setattr(threading, "excepthook", lambda hook: died.append(hook.exc_value))
    return lambda: died + [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("kind", ["shared_memory_pool", "daemon_owned_pool"])
def test_client_that_closes_before_its_pool(kind, daemon, group, noise):
    """The thread that holds the pool ends without a word, and the pool can still be closed."""
    client = skv.Client(daemon.path, timeout_s=5)
    pool = getattr(client, kind)([group], model="m")
    daemon.worker.pings.get(timeout=5)
    hold = pool._hold._thread
    client.close()
    client.close()
    hold.join(5)
    assert not hold.is_alive() and pool.registrations == 1
    pool.close()
    pool.close()
    if kind == "shared_memory_pool":
        assert not os.path.exists("/dev/shm" + pool.segment.name)
    assert noise() == []


def test_client_that_closes_while_a_pool_waits_to_register_again(daemon, group, noise):
    client = skv.Client(daemon.path, timeout_s=5)
    with client.shared_memory_pool([group], model="m") as pool:
        daemon.worker.pings.get(timeout=5)
        daemon.stop()
        until(lambda: sum("cannot be registered again" in str(what) for what in noise()) >= 3)
        assert sum("no longer held" in str(what) for what in noise()) == 1  # it was lost once
        warned = len(noise())
        client.close()
        pool._hold._thread.join(15)
        assert not pool._hold._thread.is_alive()
        assert [what for what in noise()[warned:] if isinstance(what, Exception)] == []


def test_calls_of_a_closed_client(daemon, group):
    client = skv.Client(daemon.path, timeout_s=5)
    pool = client.daemon_owned_pool([group], model="m")
    data = np.zeros((2, 2, 1, 4, 3, 16), np.float16)
    client.close()
    common = dict(pool=pool, token_count=4, blocks=[1])
    calls = {
        "register": lambda: client.daemon_owned_pool([group], model="m"),
        "put": lambda: pool.put(data, [1]),
        "get": lambda: pool.get([1]),
        "plan": lambda: client.plan(pool, 4, [1]),
        "send": lambda: client.send("t", peer="h:1", **common),
        "publish": lambda: client.publish("t", **common),
        "advance": lambda: client.advance("t", layers=1, tokens=1),
        "expect": lambda: client.expect("t", **common),
        "fetch": lambda: client.fetch("t", peer="h:1", **common),
        "watch": lambda: list(client.watch("t")),
        "wait": lambda: client.wait("t"),
        "get_transfer": lambda: client.get_transfer("t"),
        "cancel": lambda: client.cancel("t"),
        "release": lambda: client.release("t"),
        "report_first_token": lambda: client.report_first_token("t", 1.0),
    }
    for name, call in calls.items():
        with pytest.raises(skv.SpectrumKVError, match="the client is closed") as error:
            call()
        assert error.value.code == "CANCELLED", name
    pool.close()


def test_stale_epoch_registers_again_and_repeats_the_call(daemon, client, group):
    with client.shared_memory_pool([group], model="m") as pool:
        daemon.worker.restart()
        client.send("t", peer="h:1", pool=pool, token_count=4, blocks=[1])
        sends = [r for r in daemon.worker.requests if isinstance(r, worker_service_pb2.SendRequest)]
        assert [s.pool.epoch for s in sends] == [1, 2]
        assert pool.registrations == 2 and pool.ref.epoch == 2


def test_daemon_owned_pool_says_that_its_bytes_are_gone(daemon, client, group):
    with client.daemon_owned_pool([group], model="m") as pool:
        daemon.worker.restart()
        with pytest.raises(skv.SpectrumKVError) as error:
            client.send("t", peer="h:1", pool=pool, token_count=4, blocks=[1])
        assert (error.value.code, error.value.reason) == ("FAILED_PRECONDITION", "STALE_EPOCH")
        assert error.value.metadata == {"epoch": "2"}
        assert pool.registrations == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_put_and_get_whole_blocks(client, dtype):
    group = skv.Group(layers=[0, 1], heads=4, head_dim=128, block_tokens=256, num_blocks=9, dtype=dtype)
    with client.daemon_owned_pool([group], model="m") as pool:
        kv = np.random.default_rng(2).integers(0, 100, (2, 2, 3, 256, 4, 128)).astype(group.numpy_dtype)
        assert pool.put(kv, [8, 2, 3]) == kv.nbytes
        assert (pool.get([8, 2, 3]) == kv).all()
        assert (pool.get([3, 8]) == kv[:, :, [2, 0]]).all()
        with pytest.raises(ValueError, match="kv must be"):
            pool.put(kv, [8, 2])
        with pytest.raises(skv.SpectrumKVError, match="left out"):
            pool.get([4])


def test_put_keeps_messages_small(daemon, client):
    group = skv.Group(layers=[0], heads=4, head_dim=128, block_tokens=256, num_blocks=9)
    with client.daemon_owned_pool([group], model="m") as pool:
        pool.put(np.zeros((1, 2, 9, 256, 4, 128), np.float16), range(9))
        puts = [r for r in daemon.worker.requests if isinstance(r, worker_service_pb2.PutBlocksRequest)]
        assert len(puts) > 1 and max(r.ByteSize() for r in puts) < (1 << 20) + 4096
        assert puts[0].pool == pool.ref and not puts[1].HasField("pool")


def test_send_says_everything(daemon, client, group):
    with client.shared_memory_pool([group], model="m") as pool:
        policy = skv.policy(budget=0.3, allocator="GREEDY", tiers=["RAW", "P8"], scores=[1, 2, 3], sinks=0)
        client.send("t", peer="h:1", pool=pool, token_count=9, blocks=[4, 5, 1], policy=policy, token=b"x" * 16,
                    deadline_ms=77, layerwise=True)  # fmt: skip
        sent = daemon.worker.requests[-1]
        assert (sent.transfer_id, sent.peer, sent.token_count, sent.deadline_ms) == ("t", "h:1", 9, 77)
        assert sent.layerwise and sent.transfer_token == b"x" * 16
        assert sent.blocks[0] == skv.block_runs([4, 5, 1])
        assert sent.policy.allocator == policy_pb2.ALLOCATOR_GREEDY
        assert list(sent.policy.tiers) == [policy_pb2.TIER_RAW, policy_pb2.TIER_P8]
        assert list(sent.policy.importance.scores) == [1, 2, 3] and not sent.policy.importance.scores_per_layer
        assert sent.policy.importance.HasField("sinks") and sent.policy.HasField("budget")
        client.advance("t", layers=1, tokens=4, scores=np.ones(4))
        assert daemon.worker.requests[-1].layers == 1 and len(daemon.worker.requests[-1].scores) == 4


def test_policy_leaves_defaults_to_the_daemon():
    empty = skv.policy()
    assert not empty.HasField("budget") and not empty.importance.HasField("sinks") and empty.allocator == 0
    assert skv.policy(scores=np.ones((2, 5))).importance.scores_per_layer
    with pytest.raises(ValueError, match="'GREEDIEST' is none of GREEDY"):
        skv.policy(allocator="GREEDIEST")
    with pytest.raises(ValueError, match="scores"):
        skv.policy(scores=np.ones((1, 2, 3)))
    assert skv.tier_name(policy_pb2.TIER_Q4) == "Q4"


def test_wait_returns_the_report_and_tells_layers(daemon, client):
    report = report_pb2.TransferReport(transfer_id="t", state=report_pb2.TRANSFER_STATE_COMMITTED, wire_bytes=5)
    daemon.worker.events = [
        worker_service_pb2.WatchTransferResponse(layers_ready={"layers": 1}),
        worker_service_pb2.WatchTransferResponse(progress={"chunks_done": 1}),
        worker_service_pb2.WatchTransferResponse(layers_ready={"layers": 2}),
        worker_service_pb2.WatchTransferResponse(terminal=report),
    ]
    layers = []
    assert client.wait("t", role="RECEIVER", on_layers_ready=layers.append) == report
    assert layers == [1, 2]
    assert daemon.worker.requests[-1].transfer.role == report_pb2.TRANSFER_ROLE_RECEIVER


def test_wait_raises_what_ended_the_transfer(daemon, client):
    report = report_pb2.TransferReport(
        transfer_id="t", state=report_pb2.TRANSFER_STATE_EXPIRED, code=4, reason="DEADLINE", message="too late"
    )
    daemon.worker.events = [worker_service_pb2.WatchTransferResponse(terminal=report)]
    with pytest.raises(skv.TransferFailed, match="DEADLINE_EXCEEDED DEADLINE: too late") as error:
        client.wait("t")
    assert error.value.report == report
    daemon.worker.events = []
    with pytest.raises(skv.SpectrumKVError, match="without a last event"):
        client.wait("t")


def test_retry_waits_as_the_daemon_asks(daemon, client):
    full = (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOTS_FULL", "full", {"slots": "4"}, 30)
    daemon.worker.failures = [full, full]
    start = time.monotonic()
    assert skv.retry(lambda: client.cancel("t")).transfer_id == "t"
    assert time.monotonic() - start >= 0.06
    daemon.worker.failures = [full, full]
    with pytest.raises(skv.SpectrumKVError) as error:
        skv.retry(lambda: client.cancel("t"), attempts=2)
    assert (error.value.reason, error.value.retry_after_ms, error.value.metadata) == ("SLOTS_FULL", 30, {"slots": "4"})
    assert not daemon.worker.failures


def test_retry_does_not_repeat_what_is_hopeless(daemon, client):
    daemon.worker.failures = [(grpc.StatusCode.NOT_FOUND, "UNKNOWN_TRANSFER", "no", None, None)] * 2
    with pytest.raises(skv.SpectrumKVError):
        skv.retry(lambda: client.cancel("t"))
    assert len(daemon.worker.failures) == 1
    daemon.worker.failures = [(grpc.StatusCode.RESOURCE_EXHAUSTED, "FULL", "no", None, 60_000)]
    start = time.monotonic()
    with pytest.raises(skv.SpectrumKVError):
        skv.retry(lambda: client.cancel("t"), timeout_s=1)
    assert time.monotonic() - start < 5


def test_a_client_may_retry_by_itself(daemon, group):
    full = (grpc.StatusCode.RESOURCE_EXHAUSTED, "POOLS_FULL", "full", {}, 30)
    with skv.Client(daemon.path, timeout_s=5, retry_s=1.5) as client:
        daemon.worker.failures = [full, full]
        start = time.monotonic()
        with client.daemon_owned_pool([group], model="m") as pool:
            client.send("t", peer="h:1", pool=pool, token_count=4, blocks=[1])
            assert time.monotonic() - start >= 0.06 and not daemon.worker.failures
            daemon.worker.failures = [full] * 1000
            with pytest.raises(skv.reasons.POOLS_FULL):
                client.send("t", peer="h:1", pool=pool, token_count=4, blocks=[1])
            assert 0 < len(daemon.worker.failures) < 1000
            daemon.worker.failures = [(grpc.StatusCode.NOT_FOUND, "UNKNOWN_TRANSFER", "no", None, None)] * 2
            with pytest.raises(skv.NotFound):
                client.cancel("t")
            assert len(daemon.worker.failures) == 1  # no delay, no second try
            daemon.worker.failures = []


def test_close_that_is_refused_leaves_the_pool(daemon, client, group):
    pool = client.shared_memory_pool([group], model="m")
    daemon.worker.failures = [(grpc.StatusCode.DEADLINE_EXCEEDED, "POOL_BUSY", "transfers are left", None, None)]
    with pytest.raises(skv.SpectrumKVError, match="POOL_BUSY"):
        pool.close(timeout_ms=1)
    assert daemon.worker.pools and os.path.exists("/dev/shm" + pool.segment.name)
    pool.close()
    pool.close()
    assert not daemon.worker.pools


def test_daemon_that_is_not_there(tmp_path, group):
    with skv.Client(str(tmp_path / "nobody.sock"), timeout_s=5) as client:
        before = set(os.listdir("/dev/shm"))
        with pytest.raises(skv.SpectrumKVError) as error:
            client.shared_memory_pool([group], model="m")
        assert error.value.code == "UNAVAILABLE" and error.value.reason == ""
        assert not [name for name in set(os.listdir("/dev/shm")) - before if f"-{os.getpid()}-" in name]


def test_first_error_is_not_hidden_by_the_close(daemon, client, group):
    with pytest.raises(ZeroDivisionError):
        with client.shared_memory_pool([group], model="m"):
            daemon.stop()
            raise ZeroDivisionError
