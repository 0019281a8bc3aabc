"""The worker socket as a server of its own making: connections are accepted by the daemon and handed to gRPC by number."""

import json
import os
import random
import socket
import struct
import subprocess
import sys
import time

import grpc
import pytest
from ends import owned_schema
from moves import small_group, unique
from real_daemon import RealDaemon, running

from spectrumkv.errors import error_from_rpc
from spectrumkv.v1 import worker_service_pb2

USERS = (54321, 54322)
FILES, SECONDS, THREADS = 256, 8, 3
MAX_MESSAGE = 16 << 20

# A user's process: short connections from several threads, of which each says whose pools it is answered about. Closed in
# the middle of calls, too. Prints what must not be, and how many connections there were.
_RUSH = """
import json, os, random, sys, threading, time
import grpc
from spectrumkv.errors import error_from_rpc
from spectrumkv.v1 import worker_service_pb2 as pb, worker_service_pb2_grpc
uid, path, threads, seconds, schema = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5]
os.setresuid(uid, uid, uid)
wrong, connections, lock = [], 0, threading.Lock()

def connect():
    channel = grpc.insecure_channel("unix:" + path, [("grpc.use_local_subchannel_pool", 1)])
    return channel, worker_service_pb2_grpc.WorkerServiceStub(channel)

def reason(call, request, **options):
    try:
        answer = call(request, timeout=20, **options)
        return list(answer) if hasattr(answer, "__next__") else answer
    except grpc.RpcError as error:
        ours = error_from_rpc(error)
        return ours.reason or ours.code

def expect(what, got, wanted):
    if got != wanted:
        with lock:
            wrong.append([uid, what, str(got)[:200]])

held, keeper = connect()
request = pb.RegisterPoolRequest(request_id=f"own-{uid}", schema=pb.RegisterPoolRequest.FromString(bytes.fromhex(schema)).schema,
                                 lease_ttl_ms=300000)
own = keeper.RegisterPool(request, timeout=20).pool
print(own.SerializeToString().hex(), flush=True)
others = [type(own).FromString(bytes.fromhex(line)) for line in json.loads(sys.stdin.readline())]
blocks = {"data": bytes([uid % 251]) * 256, "plane": pb.PLANE_K, "block": 1}

def rush(seed):
    global connections
    dice, end, n = random.Random(seed), time.monotonic() + seconds, 0
    while time.monotonic() < end:
        channel, stub = connect()
        n += 1
        for kind in dice.sample(["own", "other", "data", "request id", "cut"], dice.randint(1, 3)):
            if kind == "own":
                expect(kind, getattr(reason(stub.RenewLease, pb.RenewLeaseRequest(pool=own)), "lease_ttl_ms", None), 300000)
            elif kind == "other":
                for other in others:
                    expect(kind, reason(stub.RenewLease, pb.RenewLeaseRequest(pool=other)), "NOT_OWNER")
            elif kind == "data":
                got = reason(stub.GetBlocks, pb.GetBlocksRequest(pool=own, layers=[0], runs=[dict(first=1, count=1)]))
                data = b"".join(b.data for m in got for b in m.blocks if b.plane == pb.PLANE_K) if isinstance(got, list) else got
                expect(kind, data, blocks["data"])
                got = reason(stub.GetBlocks, pb.GetBlocksRequest(pool=others[0], layers=[0], runs=[dict(first=1, count=1)]))
                expect(kind, got, "NOT_OWNER")
            elif kind == "request id":  # repeated: the pool that this user made, and not the other's of that id
                pool = reason(stub.RegisterPool, request)
                expect(kind, getattr(pool, "pool", pool), own)
            else:
                calls = [stub.RenewLease.future(pb.RenewLeaseRequest(pool=pool), timeout=20) for pool in (own, *others)]
                hold = stub.HoldPool(iter([pb.HoldPoolRequest(pool=others[0])]), timeout=20)
                if dice.random() < 0.5:
                    try:
                        hold.next()
                        expect("hold", "answered", "NOT_OWNER")
                    except grpc.RpcError as error:
                        expect("hold", error_from_rpc(error).reason, "NOT_OWNER")
                break
        channel.close()  # whatever is under way
    with lock:
        connections += n

put = pb.PutBlocksRequest(pool=own)
put.blocks.add(**blocks)
keeper.PutBlocks(iter([put]), timeout=20)
rushes = [threading.Thread(target=rush, args=(uid * 100 + i,)) for i in range(threads)]
for one in rushes:
    one.start()
for one in rushes:
    one.join()
expect("own at the end", getattr(reason(keeper.RenewLease, pb.RenewLeaseRequest(pool=own)), "lease_ttl_ms", None), 300000)
print(json.dumps([wrong, connections]))
held.close()
"""


class FewFiles(RealDaemon):
    """Numbers of connections begin again after a few hundred."""

    launcher = ("sh", "-c", f'ulimit -n {FILES} && exec "$0" "$@"')


def files_of(daemon):
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


@pytest.mark.skipif(os.geteuid() != 0, reason="SKIPPED: not root, so no call can be another user's")
def test_numbers_that_are_used_again_never_name_another_user():
    """Short connections of two users and of this one, thousands, over a few hundred numbers, many cut in the middle of
    calls: each is answered about its own pools, and refused everything about the others'."""
    daemon = FewFiles(worker__max_connections=48)
    try:
        daemon.folder.chmod(0o711)
        schema = worker_service_pb2.RegisterPoolRequest(schema=owned_schema()).SerializeToString().hex()
        with daemon.client() as client, client.daemon_owned_pool([small_group()], model="m") as mine:
            before = files_of(daemon)
            rushes = [
                subprocess.Popen([sys.executable, "-c", _RUSH, str(uid), daemon.worker, str(THREADS), str(SECONDS), schema],
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
                for uid in USERS
            ]
            pools = [rush.stdout.readline().strip() for rush in rushes]
            for i, rush in enumerate(rushes):
                rush.stdin.write(json.dumps([*pools[:i], *pools[i + 1 :], mine.ref.SerializeToString().hex()]) + "\n")
                rush.stdin.flush()
            renew = worker_service_pb2.RenewLeaseRequest(pool=mine.ref)
            answered, random_ = 0, random.Random(3)
            while any(rush.poll() is None for rush in rushes):
                with daemon.client() as short:
                    short.worker.RenewLease(renew, timeout=20)
                    theirs = worker_service_pb2.RenewLeaseRequest(pool=mine.ref)
                    theirs.pool.ParseFromString(bytes.fromhex(random_.choice(pools)))
                    with pytest.raises(grpc.RpcError) as error:
                        short.worker.RenewLease(theirs, timeout=20)
                    assert error_from_rpc(error.value).reason == "NOT_OWNER"
                answered += 1
                time.sleep(0.01)
            connections = answered
            for rush in rushes:
                assert rush.returncode == 0
                wrong, count = json.loads(rush.stdout.read())
                assert wrong == []
                connections += count
            numbers = FILES // 2
            print(f"\n{connections} connections of three users over {numbers} numbers: {connections / numbers:.1f} times round")
            assert connections > 2 * numbers, "too few to use numbers again"
            end = time.monotonic() + 20
            while files_of(daemon) > before + 4 and time.monotonic() < end:
                time.sleep(0.1)
            assert files_of(daemon) <= before + 4, "connections are left"
            assert daemon.alive
    finally:
        daemon.remove()


def frame(kind, flags, stream, payload=b""):
    """An HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def literal(name, value):
    """A header, not indexed and not compressed (HPACK)."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


class FrozenWorker:
    """A worker that opened a HoldPool by hand and then does nothing more, as one that is stopped: its kernel keeps the
    connection, but nobody answers."""

    def __init__(self, path, ref):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        headers = {":method": "POST", ":scheme": "http", ":path": "/spectrumkv.v1.WorkerService/HoldPool",
                   ":authority": "localhost", "content-type": "application/grpc", "te": "trailers"}  # fmt: skip
        message = worker_service_pb2.HoldPoolRequest(pool=ref).SerializeToString()
        self.socket.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0)
            + frame(1, 4, 1, b"".join(literal(*header) for header in headers.items()))
            + frame(0, 0, 1, b"\0" + struct.pack(">I", len(message)) + message)
        )  # fmt: skip

    def hear(self, until):
        """What comes, until the end of the connection or of time; whether it ended."""
        data = b""
        while time.monotonic() < until:
            self.socket.settimeout(max(0.01, until - time.monotonic()))
            try:
                got = self.socket.recv(65536)
            except TimeoutError:
                break
            except ConnectionResetError:
                return data, True
            if not got:
                return data, True
            data += got
        return data, False


def test_a_worker_that_is_frozen_is_noticed_by_keepalive():
    """Its lease is long, and its kernel answers: only pings that nobody acknowledges tell."""
    with running() as daemon, daemon.client() as client:
        request = worker_service_pb2.RegisterPoolRequest(request_id=unique("r"), schema=owned_schema(), lease_ttl_ms=600000)
        registered = client.worker.RegisterPool(request, timeout=20)
        assert registered.lease_ttl_ms == 600000
        begin = time.monotonic()
        worker = FrozenWorker(daemon.worker, registered.pool)
        data, over = worker.hear(begin + 5)
        assert b"application/grpc" in data and not over, "the hold was answered and is open"
        data, over = worker.hear(begin + 60)
        seconds = time.monotonic() - begin
        assert over and b"keepalive watchdog timeout" in data, data
        print(f"\nnoticed after {seconds:.0f} s")
        assert 20 < seconds < 50
        end = time.monotonic() + 5
        while True:
            try:
                client.worker.RenewLease(worker_service_pb2.RenewLeaseRequest(pool=registered.pool), timeout=20)
            except grpc.RpcError as error:
                assert error_from_rpc(error).reason == "UNKNOWN_POOL"
                break
            assert time.monotonic() < end, "its pool is still held"
            time.sleep(0.05)


@pytest.mark.parametrize("size, refused", [(MAX_MESSAGE - 1, False), (MAX_MESSAGE, False), (MAX_MESSAGE + 1, True), (64 << 20, True)])
def test_message_limits(size, refused, source, prefill):
    """A longer request is refused by its length, before it is read; the connection goes on serving."""
    with grpc.insecure_channel(f"unix:{prefill.worker}", [("grpc.max_send_message_length", -1)]) as channel:
        call = channel.unary_unary("/spectrumkv.v1.WorkerService/GetTransfer", lambda data: data, lambda data: data)
        # A field that nobody knows: 15, of `size` bytes with its tag and length.
        body = size - 5
        message = b"\x7a" + bytes([body & 0x7F | 0x80, body >> 7 & 0x7F | 0x80, body >> 14 & 0x7F | 0x80, body >> 21]) + bytes(body)
        assert len(message) == size
        with pytest.raises(grpc.RpcError) as error:
            call(message, timeout=60)
        if refused:
            assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        else:
            assert error_from_rpc(error.value).reason == "INVALID_TRANSFER_ID"
        with pytest.raises(grpc.RpcError) as error:
            call(b"", timeout=20)
        assert error_from_rpc(error.value).reason == "INVALID_TRANSFER_ID"
