"""Segments that are not what a worker says, or change later: refused or failed, counted, and no harm to others."""

import os
import pathlib
import signal
import uuid

import numpy as np
import pytest
from bad_schemas import good_schema, register
from ends import until
from moves import small_group
from real_daemon import refused, running
from small_sides import RAW, TOKENS, sent_words

import spectrumkv as skv
from spectrumkv.errors import rpc
from spectrumkv.v1 import worker_service_pb2


def _bad_file(name, folder, size):
    """A schema over a FILE segment, after making the file that `name` says. (schema, code, reason)"""
    path = name + "-" + uuid.uuid4().hex[:8]
    full, bytes_there = folder / path, b"\1" * size
    code, reason = "INVALID_ARGUMENT", "SEGMENT_OUTSIDE_DIR"
    if name == "missing":
        code, reason = "NOT_FOUND", "SEGMENT_NOT_FOUND"
    elif name == "short":
        full.write_bytes(bytes_there[:-1])
        reason = "SEGMENT_TOO_SHORT"
    elif name == "sparse":
        with open(full, "wb") as file:
            file.truncate(size)
        reason = "SEGMENT_SPARSE"
    elif name == "symlink":
        (folder / (path + ".real")).write_bytes(bytes_there)
        full.symlink_to(path + ".real")
    elif name == "symlink_out":
        (folder.parent / path).write_bytes(bytes_there)
        full.symlink_to(folder.parent / path)
    elif name == "dotdot":
        (folder.parent / path).write_bytes(bytes_there)
        path = f"../{path}"
    elif name == "absolute":
        full.write_bytes(bytes_there)
        path = str(full)
    elif name == "folder":
        full.mkdir()
        reason = "SEGMENT_NOT_REGULAR"
    elif name == "fifo":
        os.mkfifo(full)
        reason = "SEGMENT_NOT_REGULAR"
    elif name == "nul":
        full.write_bytes(bytes_there)
        path += "\0x"
    elif name == "empty":
        path, reason = "", "INVALID_SCHEMA"
    schema = good_schema()
    schema.segments[0].file.path, schema.segments[0].file.size_bytes = path, size
    return schema, code, reason


FILES = ["missing", "short", "sparse", "symlink", "symlink_out", "dotdot", "absolute", "folder", "fifo", "nul", "empty"]


@pytest.mark.parametrize("name", FILES)
def test_region_file(name, source, prefill, counted, next_is_served):
    schema, code, reason = _bad_file(name, prefill.shared_dir, 1 << 14)
    with refused(code, reason):
        register(source, schema)


@pytest.mark.parametrize("name, code, reason", [
    ("/" + "skv-never-made", "NOT_FOUND", "SEGMENT_NOT_FOUND"),
    ("no-slash", "INVALID_ARGUMENT", "SEGMENT_OUTSIDE_DIR"),
    ("/a/b", "INVALID_ARGUMENT", "SEGMENT_OUTSIDE_DIR"),
    ("/..", "INVALID_ARGUMENT", "SEGMENT_OUTSIDE_DIR"),
])  # fmt: skip
def test_shared_memory_name(name, code, reason, source, counted, next_is_served):
    schema = good_schema()
    schema.segments[0].posix_shm.name, schema.segments[0].posix_shm.size_bytes = name, 1 << 14
    with refused(code, reason):
        register(source, schema)


@pytest.mark.parametrize("kind", ["symlink", "symlink_out", "folder", "fifo"])
def test_what_is_no_shared_memory_object(kind, source, prefill, counted, next_is_served, tmp_path):
    """What a worker puts into /dev/shm itself is opened by the same rule as a file."""
    name = f"/skv-odd-{uuid.uuid4().hex[:8]}"
    real = tmp_path / "real" if kind == "symlink_out" else pathlib.Path(f"/dev/shm{name}.real")
    odd, reason = pathlib.Path(f"/dev/shm{name}"), "SEGMENT_OUTSIDE_DIR"
    schema = good_schema()
    schema.segments[0].posix_shm.name, schema.segments[0].posix_shm.size_bytes = name, 1 << 14
    real.write_bytes(b"\1" * (1 << 14))
    try:
        if kind == "folder":
            odd.mkdir()
            reason = "SEGMENT_NOT_REGULAR"
        elif kind == "fifo":
            os.mkfifo(odd)
            reason = "SEGMENT_NOT_REGULAR"
        else:
            odd.symlink_to(real)
        with refused("INVALID_ARGUMENT", reason):
            register(source, schema)
    finally:
        real.unlink()
        odd.rmdir() if kind == "folder" else odd.unlink(missing_ok=True)


# What its owner does to the file of an idle pool of three pages, one truncate after the other.
CUTS = {"everything": [0], "the last page": [8192], "cut and grown again": [0, 12288]}


@pytest.mark.parametrize("use", ["send", "publish", "plan", "expect", "fetch", "put", "get"])
@pytest.mark.parametrize("cut", CUTS)
def test_segment_that_was_cut_while_idle(cut, use, source, decode, transfer_id, counted, next_is_served):
    """Refused at the next use, before anything is promised or read as zeros."""
    group = small_group()
    with source.shared_memory_pool([group], model="m") as pool:
        assert pool.segment.size_bytes == 12288
        common = dict(pool=pool, token_count=TOKENS, blocks=[0, 1, 2])
        kv = np.zeros((2, 2, 1, 4, 2, 16), np.float16)
        for length in CUTS[cut]:
            os.truncate("/dev/shm" + pool.segment.name, length)
        with refused("FAILED_PRECONDITION", "SEGMENT_FAILED"):
            {
                "send": lambda: source.send(transfer_id, peer=decode.peer, policy=skv.policy(**RAW), **common),
                "publish": lambda: source.publish(transfer_id, policy=skv.policy(**RAW), **common),
                "plan": lambda: source.plan(pool, TOKENS, [0, 1, 2], skv.policy(**RAW)),
                "expect": lambda: source.expect(transfer_id, **common),
                "fetch": lambda: source.fetch(transfer_id, peer=decode.peer, **common),
                "put": lambda: pool.put(kv, [0]),
                "get": lambda: pool.get([0]),
            }[use]()
        with refused("NOT_FOUND", "UNKNOWN_TRANSFER"):
            source.get_transfer(transfer_id)


@pytest.mark.parametrize("landed", [0, 1])
@pytest.mark.parametrize("cut", ["everything", "cut and grown again"])
@pytest.mark.parametrize("side", ["source", "target"])
def test_segment_that_shrinks_under_a_transfer(
    side, cut, landed, sides, source, target, prefill, decode, transfer_id, next_is_served
):
    """Cut before anything has landed, or between two layers, also so that nobody faults: the transfer fails, on both sides,
    and its pool alone. The mark is looked at before words are sent and before they are committed."""
    here, there = sides
    errors = prefill.errors() + decode.errors()
    target.expect(transfer_id, pool=there.pool, token_count=TOKENS, blocks=there.blocks)
    source.send(transfer_id, peer=decode.peer, pool=here.pool, token_count=TOKENS, blocks=here.blocks, layerwise=True,
                policy=skv.policy(**RAW))  # fmt: skip
    if landed:
        source.advance(transfer_id, layers=landed, tokens=TOKENS)
        until(lambda: target.get_transfer(transfer_id).layers_ready == landed)
    owner = here if side == "source" else there
    assert owner.pool.segment.size_bytes == 12288
    for length in CUTS[cut]:
        os.truncate("/dev/shm" + owner.pool.segment.name, length)
    source.advance(transfer_id, layers=2, tokens=TOKENS)
    gone = {"source": "SOURCE_GONE", "target": "DESTINATION_GONE"}[side]
    if (side, cut, landed) == ("target", "cut and grown again", 0):  # nothing was lost
        for client in (source, target):
            client.wait(transfer_id, timeout_s=20)
        assert (there.pool.read_tokens(TOKENS, there.blocks[0]).view("<u2") == sent_words()).all()
        return
    for client in (source, target):
        with pytest.raises(skv.TransferFailed) as failed:
            client.wait(transfer_id, timeout_s=20)
        # Found by the scan or told by the pool, whichever comes first.
        assert failed.value.code == "FAILED_PRECONDITION", failed.value
        assert failed.value.reason in ("SEGMENT_FAILED", gone) and "truncated" in failed.value.message, failed.value
    assert prefill.errors() + decode.errors() > errors


def test_any_other_sigbus_ends_the_daemon():
    """Also where a pool is registered, whose guard is in force: only faults in registered memory are caught."""
    with running() as daemon, daemon.client() as client:
        register(client, good_schema())
        with client.shared_memory_pool([small_group()], model="m"):
            daemon.process.send_signal(signal.SIGBUS)
            assert daemon.process.wait(20) == -signal.SIGBUS


def test_a_pool_of_more_segments_than_a_process_may_open_files_by_default(source, prefill):
    """Each stays open, so that a cut is seen: 1024 are allowed where nobody asks for more."""
    group = small_group(layers=[0], num_blocks=1)
    segments = [skv.SharedSegment(group.size_bytes) for _ in range(1100)]
    schema = skv.pools.schema_pb2.PoolSchema(model="m", groups=[group.to_proto(0, 0)])
    for segment in segments:
        schema.segments.add().posix_shm.name = segment.name
        schema.segments[-1].posix_shm.size_bytes = group.size_bytes
    pool = register(source, schema).pool
    for segment in segments:
        segment.close()
    files = f"/proc/{prefill.process.pid}/fd"
    assert len(os.listdir(files)) > 1100
    rpc(source.worker.UnregisterPool, worker_service_pb2.UnregisterPoolRequest(pool=pool), 20)
    assert len(os.listdir(files)) < 1100
