"""Users of one daemon: each has its own pools, segments and transfers, and cannot touch the others'."""

import json
import os
import subprocess
import sys

import pytest
from ends import owned_schema
from moves import small_group, unique
from real_daemon import refused, running

import spectrumkv as skv
from spectrumkv.v1 import worker_service_pb2

RAW = dict(allocator="RAW", budget=1.5)
OTHER = 54321  # a user that the machine need not know

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="SKIPPED: not root, so no call can be another user's")

# Another user's process: modules are read before it gives its rights up, a connection is made afterwards. It keeps its
# group, which may open the socket.
_AS = """
import json, os, sys
import grpc
import spectrumkv as skv
from spectrumkv.errors import error_from_rpc
from spectrumkv.v1 import worker_service_pb2 as pb, worker_service_pb2_grpc
os.setresuid(*[int(sys.argv[1])] * 3)
stub = worker_service_pb2_grpc.WorkerServiceStub(grpc.insecure_channel("unix:" + sys.argv[2]))
service = pb.DESCRIPTOR.services_by_name["WorkerService"]
answers = []
for name, text in json.load(sys.stdin):
    method = service.methods_by_name[name]
    request = getattr(pb, method.input_type.name).FromString(bytes.fromhex(text))
    try:
        answer = getattr(stub, name)(iter([request]) if method.client_streaming else request, timeout=20)
        answers.append(["OK", "", {}] if not method.server_streaming else [str(list(answer)), "", {}])
    except grpc.RpcError as error:
        error = error_from_rpc(error)
        answers.append([error.code, error.reason, dict(error.metadata)])
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def shared():
    """A daemon whose socket's folder other users may pass."""
    with running() as daemon:
        daemon.folder.chmod(0o711)
        yield daemon


def as_user(uid, daemon, *calls):
    """[code, reason, metadata] of each call (name, request), made by a process of that user."""
    told = json.dumps([(name, request.SerializeToString().hex()) for name, request in calls])
    done = subprocess.run([sys.executable, "-c", _AS, str(uid), daemon.worker], input=told, capture_output=True,
                          text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def request_of(name, pool, transfer_id, peer):
    """The least request of a method that the owner itself would be answered, about that pool or that transfer."""
    service = worker_service_pb2.DESCRIPTOR.services_by_name["WorkerService"]
    request = getattr(worker_service_pb2, service.methods_by_name[name].input_type.name)()
    fields = request.DESCRIPTOR.fields_by_name
    if "pool" in fields:
        request.pool.pool_id, request.pool.epoch = pool.pool_id, pool.epoch
    if "transfer" in fields:
        request.transfer.transfer_id = transfer_id
    if "transfer_id" in fields:
        # What opens a transfer has an id of its own: the pool is what it may not use.
        request.transfer_id = "of-another-user" if "pool" in fields else transfer_id
    if "refine_id" in fields:  # a refinement is a transfer
        request.refine_id = "of-another-user" if "transfer_id" in fields else transfer_id
    if "token_count" in fields:
        request.token_count = 4
        request.blocks.add(group=0).runs.add(first=1, count=1)
    if "peer" in fields:
        request.peer = peer
    if "policy" in fields:
        request.policy.CopyFrom(skv.policy(**RAW))
    if name == "PutBlocks":
        request.blocks.add(plane=worker_service_pb2.PLANE_K, block=1, data=bytes(256))
    if name == "GetBlocks":
        request.layers.append(0)
        request.runs.add(first=1, count=1)
    if name == "Advance":
        request.layers, request.tokens = 1, 4
    if name == "ReportFirstToken":
        request.time_to_first_token_seconds = 1
    return request


def test_every_call_about_anothers_pool_or_transfer_is_refused(shared, transfer_id):
    """Found from the descriptor: a method that is added later is tried as well."""
    methods = [m.name for m in worker_service_pb2.DESCRIPTOR.services_by_name["WorkerService"].methods]
    methods.remove("RegisterPool")
    # They are of what has arrived, and nothing has here: RefineEngineTest.WhatIsNotKeptIsRefusedByReason.
    methods = [name for name in methods if name not in ("Refine", "ApplyRefinement")]
    assert len(methods) >= 16
    with shared.client() as client, client.daemon_owned_pool([small_group()], model="m") as pool:
        client.publish(transfer_id, pool=pool, token_count=4, blocks=[1], policy=skv.policy(**RAW), layerwise=True)
        calls = [(name, request_of(name, pool.ref, transfer_id, "127.0.0.1:9")) for name in methods]
        before = shared.errors("PERMISSION_DENIED")
        for (name, _), (code, reason, metadata) in zip(calls, as_user(OTHER, shared, *calls), strict=True):
            assert (code, reason) == ("PERMISSION_DENIED", "NOT_OWNER"), (name, code, reason)
            assert metadata["value"] == f"uid {OTHER}" and metadata["field"] in ("pool.pool_id", "transfer_id", "refine_id"), name
            assert pool.ref.pool_id not in str(metadata)
        assert shared.errors("PERMISSION_DENIED") == before + len(calls)
        # Nothing happened: the owner's are as they were.
        assert client.get_transfer(transfer_id).state
        client.cancel(transfer_id)


def test_anothers_segment_is_refused(shared):
    """A shared memory object of this user, and a file, registered by another; its own are taken."""
    name = f"/spectrumkv-owners-{os.getpid()}"
    places = {"posix_shm": f"/dev/shm{name}", "file": f"{shared.shared_dir}/kv"}
    schema = owned_schema()
    try:
        for kind, path in places.items():
            with open(path, "wb") as file:
                file.write(b"\1" * (1 << 16))
            os.chmod(path, 0o666)
            request = worker_service_pb2.RegisterPoolRequest(request_id=unique("r"), schema=schema)
            segment = request.schema.segments[0]
            segment.Clear()
            place = getattr(segment, kind)
            place.size_bytes = 1 << 16
            field = next(f.name for f in place.DESCRIPTOR.fields if f.name != "size_bytes")
            setattr(place, field, name if kind == "posix_shm" else "kv")
            ((code, reason, metadata),) = as_user(OTHER, shared, ("RegisterPool", request))
            assert (code, reason) == ("PERMISSION_DENIED", "SEGMENT_NOT_OWNED"), (kind, code, reason)
            assert (metadata["field"], metadata["value"], metadata["limit"]) == ("segments[0]", "0", str(OTHER))
            os.chown(path, OTHER, -1)
            assert as_user(OTHER, shared, ("RegisterPool", request))[0][0] == "OK"
    finally:
        for path in places.values():
            if os.path.exists(path):
                os.unlink(path)


def test_a_user_that_is_not_allowed_cannot_call():
    with running(worker__allowed_uids="[0]") as daemon:
        daemon.folder.chmod(0o711)
        request = worker_service_pb2.RegisterPoolRequest(request_id=unique("r"), schema=owned_schema())
        ((code, _, _),) = as_user(OTHER, daemon, ("RegisterPool", request))
        assert code == "UNAVAILABLE"
        assert daemon.metrics()['spectrumkv_worker_connections_refused_total{cause="uid"}'] >= 1
        assert "connection refused" in daemon.log() and f"uid {OTHER}" in daemon.log()
        with daemon.client() as client, client.daemon_owned_pool([small_group()], model="m") as pool:
            assert pool.ref.pool_id


def test_connections_one_after_another_keep_their_users(shared):
    """Descriptors and their numbers are used again; a pool is its maker's all the same."""
    request = worker_service_pb2.RegisterPoolRequest(request_id=unique("r"), schema=owned_schema())
    with shared.client() as first, first.daemon_owned_pool([small_group()], model="m") as pool:
        renew = worker_service_pb2.RenewLeaseRequest(pool=pool.ref)
        for uid in (OTHER, OTHER + 1, OTHER + 2):
            with shared.client() as client:
                client.worker.RenewLease(renew)
            answers = as_user(uid, shared, ("RenewLease", renew), ("RegisterPool", request))
            assert [answer[0] for answer in answers] == ["PERMISSION_DENIED", "OK"]


def test_quotas_of_one_user():
    keys = dict(quota__pools_per_user=2, quota__transfers_per_user=2, quota__transfers_per_pool=1)
    with running(**keys) as daemon:
        daemon.folder.chmod(0o711)
        request = worker_service_pb2.RegisterPoolRequest(request_id=unique("r"), schema=owned_schema())
        with daemon.client() as client:
            pools = [client.daemon_owned_pool([small_group()], model="m") for _ in range(2)]
            with refused("RESOURCE_EXHAUSTED", "POOLS_QUOTA", field="quota.pools_per_user", value="3", limit="2"):
                client.daemon_owned_pool([small_group()], model="m")
            assert as_user(OTHER, daemon, ("RegisterPool", request))[0][0] == "OK"
            common = dict(token_count=4, policy=skv.policy(**RAW), layerwise=True)
            client.publish("a", pool=pools[0], blocks=[1], **common)
            with refused("RESOURCE_EXHAUSTED", "POOL_TRANSFERS_QUOTA", limit="1"):
                client.publish("b", pool=pools[0], blocks=[2], **common)
            client.publish("b", pool=pools[1], blocks=[1], **common)
            with refused("RESOURCE_EXHAUSTED", "TRANSFERS_QUOTA", limit="2"):
                client.publish("c", pool=pools[1], blocks=[2], **common)
            client.cancel("a")
            client.publish("c", pool=pools[0], blocks=[2], **common)
            metrics = daemon.metrics()
            for quota in ("pools", "transfers", "pool_transfers"):
                assert metrics[f'spectrumkv_quota_refusals_total{{quota="{quota}"}}'] == 1, quota
            for name in ("b", "c"):
                client.cancel(name)
            for pool in pools:
                pool.close()
