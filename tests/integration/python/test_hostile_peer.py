"""A hostile peer: every lie ends its own transfer with a reason, is counted, and harms nothing else."""

import os
import time

import pytest
from hostile import CONTROL, DATA, EPOCH, HostilePeer, Stream, flipped, hostile_group, patched
from moves import POISON, check, make_side, poison, serves_the_next, unique
from real_daemon import refused, running

import spectrumkv as skv
from spectrumkv import wire
from spectrumkv.v1 import peer_service_pb2, report_pb2, schema_pb2

TOKENS = 10
# Tests without an error in the daemons that all tests share.
UNCOUNTED = ("test_an_honest_peer_would_commit", "test_chunks_without_credit")


@pytest.fixture
def there(target, decode):
    """A destination full of POISON."""
    side = make_side(target, decode, [hostile_group()], {0: [5, 0, 7]})
    poison(side)
    with side.pool:
        yield side


@pytest.fixture
def expected(there, target, transfer_id):
    target.expect(transfer_id, pool=there.pool, token_count=TOKENS, blocks=there.blocks, deadline_ms=20000)
    return there


@pytest.fixture
def peer(decode, transfer_id):
    with HostilePeer(decode.peer, transfer_id, hostile_group(), TOKENS) as hostile:
        yield hostile


@pytest.fixture(autouse=True)
def no_harm(request, source, target, prefill, decode, transfer_id):
    """Counted (a moment later, where no transfer was touched), and the next transfer goes through."""
    before = prefill.errors() + decode.errors()
    yield
    if request.function.__name__ not in UNCOUNTED:
        end = time.monotonic() + 5
        while prefill.errors() + decode.errors() <= before:
            assert time.monotonic() < end, "errors_total did not move"
            time.sleep(0.05)
    serves_the_next(transfer_id, source, target, prefill, decode)


def must_fail(target, transfer_id, code, reason):
    with refused(code, reason):
        target.wait(transfer_id, role="RECEIVER", timeout_s=30)


def untouched(side):
    assert (side.pool.segment.memory == POISON).all(), "something was written"


def test_an_honest_peer_would_commit(expected, peer, target, decode, transfer_id):
    stream = peer.join()
    peer.send_chunks(stream, peer.chunks())
    receipt = peer.hear("receipt")
    assert receipt.state == report_pb2.TRANSFER_STATE_COMMITTED and receipt.chunks_received == 2
    check(expected, [peer.words()])


# Bits of a RAW chunk of T=10, H=2, D=16: 64 header bytes, 16 of tier map, then words.
FLIPS = {
    "magic": (3, "BAD_MAGIC"),
    "version": (32, "UNSUPPORTED_VERSION"),
    "fence": (8 * 8, "BAD_CHECKSUM"),
    "token count": (8 * 28 + 2, "BAD_CHECKSUM"),
    "reserved": (8 * 50, "BAD_HEADER"),
    "body bytes": (8 * 40 + 1, "BAD_LENGTH"),
    "checksum": (8 * 60, "BAD_CHECKSUM"),
    "tier map": (8 * 64, "BAD_CHECKSUM"),
    "a value": (8 * 700 + 7, "BAD_CHECKSUM"),
    "the last bit": (-1, "BAD_CHECKSUM"),
}


@pytest.mark.parametrize("place", FLIPS)
def test_one_flipped_bit(place, expected, peer, target, transfer_id):
    bit, reason = FLIPS[place]
    stream = peer.join()
    peer.send_chunks(stream, [flipped(peer.chunks()[0], bit)])
    must_fail(target, transfer_id, "UNIMPLEMENTED" if reason == "UNSUPPORTED_VERSION" else "DATA_LOSS", reason)
    untouched(expected)
    told = peer.hear("receipt")
    assert told.state == report_pb2.TRANSFER_STATE_FAILED and told.reason == reason


@pytest.mark.parametrize("size, reason", [(0, "TRUNCATED"), (63, "TRUNCATED"), (64, "BAD_LENGTH"), (-1, "BAD_LENGTH")])
def test_truncated_chunk(size, reason, expected, peer, target, transfer_id):
    stream = peer.join()
    peer.send_chunks(stream, [peer.chunks()[0][:size]])
    must_fail(target, transfer_id, "DATA_LOSS", reason)
    untouched(expected)


# Offset and bytes in a chunk whose checksum is right.
LIES = {
    "another fence": (8, b"\1" * 8, "ABORTED", "FENCE_MISMATCH"),
    "chunk index beyond": (16, b"\xff\xff\xff\xff", "DATA_LOSS", "MANIFEST_MISMATCH"),
    "another chunk's index": (16, b"\1\0\0\0", "DATA_LOSS", "MANIFEST_MISMATCH"),
    "group": (20, b"\1\0", "DATA_LOSS", "MANIFEST_MISMATCH"),
    "layer": (22, b"\7\0", "DATA_LOSS", "MANIFEST_MISMATCH"),
    "first token": (24, b"\1\0\0\0", "DATA_LOSS", "MANIFEST_MISMATCH"),
    "dtype": (30, b"\2", "DATA_LOSS", "MANIFEST_MISMATCH"),
    "unknown dtype": (30, b"\7", "DATA_LOSS", "BAD_HEADER"),
    "flags": (31, b"\3", "DATA_LOSS", "BAD_HEADER"),
    "rotation": (36, b"\1\0", "DATA_LOSS", "BAD_HEADER"),
    "head_dim 0": (34, b"\0\0", "DATA_LOSS", "BAD_HEADER"),
    "first head": (44, b"\1\0", "DATA_LOSS", "MANIFEST_MISMATCH"),
    "tier 15": (64, b"\xff", "DATA_LOSS", "BAD_TIER"),
    "tier of another size": (64, b"\2", "DATA_LOSS", "BAD_LENGTH"),
    "padding": (64 + 15, b"\1", "DATA_LOSS", "BAD_PADDING"),
}


@pytest.mark.parametrize("lie", LIES)
def test_chunk_that_lies(lie, expected, peer, target, transfer_id):
    offset, value, code, reason = LIES[lie]
    stream = peer.join()
    peer.send_chunks(stream, [patched(peer.chunks()[0], offset, value)])
    must_fail(target, transfer_id, code, reason)
    untouched(expected)


def test_scale_that_is_no_number(expected, peer, target, transfer_id):
    stream = peer.join()
    chunk = peer.chunks(wire.Tier.P8)[0]
    peer.send_chunks(stream, [patched(chunk, 64 + 16, b"\0\x7c")])  # the first float16 after the tier map
    must_fail(target, transfer_id, "DATA_LOSS", "BAD_SCALE")
    untouched(expected)


def test_stream_that_stops_half_way(expected, peer, target, transfer_id):
    stream = peer.join()
    peer.send_chunks(stream, peer.chunks()[:1])
    stream.done()
    peer.control.cancel()
    must_fail(target, transfer_id, "UNAVAILABLE", "PEER_GONE")


def test_peer_that_falls_silent(expected, peer, target, transfer_id):
    peer.join()
    must_fail(target, transfer_id, "UNAVAILABLE", "PEER_SILENT")
    untouched(expected)


def test_connection_that_is_cut(expected, peer, target, transfer_id):
    stream = peer.join()
    peer.send_chunks(stream, peer.chunks()[:1])
    peer.channel.close()
    must_fail(target, transfer_id, "UNAVAILABLE", "PEER_GONE")


def test_chunk_before_accept(expected, peer, target, transfer_id):
    peer.greet()
    peer.send_chunks(peer.open_data(), peer.chunks()[:1])
    must_fail(target, transfer_id, "INVALID_ARGUMENT", "PROTOCOL_VIOLATION")
    untouched(expected)


def test_chunks_without_credit(transfer_id):
    """One slot, one slow thread, and many small chunks that take long to decode."""
    keys = dict(memory__receive_slots=1, codec__threads=1, codec__backend="scalar", transfer__progress_timeout_ms=60000)
    with running(**keys) as daemon, daemon.client() as client:
        group = hostile_group(layers=range(30), heads=8, head_dim=128, block_tokens=256, num_blocks=1)
        side = make_side(client, daemon, [group], {0: [0]})
        with side.pool, HostilePeer(daemon.peer, transfer_id, group, 256) as peer:
            client.expect(transfer_id, pool=side.pool, token_count=256, blocks=side.blocks)
            stream = peer.join()
            assert peer.credits == 1
            peer.send_chunks(stream, peer.chunks(wire.Tier.Q2))
            must_fail(client, transfer_id, "INVALID_ARGUMENT", "PROTOCOL_VIOLATION")
            assert "credit" in client.get_transfer(transfer_id).message
            assert daemon.alive and daemon.errors() > 0


def test_chunk_above_the_message_limit(expected, peer, target, transfer_id):
    stream = peer.join()
    peer.send_chunks(stream, [bytes(5 << 20)])
    assert stream.ended().code == "RESOURCE_EXHAUSTED"
    with pytest.raises(skv.TransferFailed) as failed:
        target.wait(transfer_id, timeout_s=30)
    assert failed.value.code in ("RESOURCE_EXHAUSTED", "UNAVAILABLE") and failed.value.reason
    untouched(expected)


def test_chunk_larger_than_a_slot(expected, peer, target, transfer_id):
    stream = peer.join()
    peer.send_chunks(stream, [peer.chunks()[0] + bytes(3 << 20)])
    must_fail(target, transfer_id, "RESOURCE_EXHAUSTED", "CHUNK_TOO_LARGE")
    untouched(expected)


GARBAGE = {"varint": b"\xff\xff\xff", "length": b"\x0a\xff\xff\xff\xff\x0f", "empty": b"", "random": os.urandom(5000)}


def answer_to(peer, method, answer_type, garbage):
    stream = Stream(peer.channel, method, answer_type)
    stream.send(garbage)
    error = stream.ended()
    return error.code, error.reason


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_first_on_control(name, peer):
    told = answer_to(peer, CONTROL, peer_service_pb2.ControlResponse, GARBAGE[name])
    assert told == ("INVALID_ARGUMENT", "MALFORMED_FRAME")


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_first_on_data(name, peer):
    told = answer_to(peer, DATA, peer_service_pb2.DataResponse, GARBAGE[name])
    assert told == ("INVALID_ARGUMENT", "MALFORMED_FRAME")


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_in_the_middle_of_control(name, expected, peer, target, transfer_id):
    peer.join()
    peer.control.send(GARBAGE[name])
    must_fail(target, transfer_id, "INVALID_ARGUMENT", "MALFORMED_FRAME")
    untouched(expected)


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_in_the_middle_of_data(name, expected, peer, target, transfer_id):
    stream = peer.join()
    stream.send(GARBAGE[name])
    must_fail(target, transfer_id, "INVALID_ARGUMENT", "MALFORMED_FRAME")
    untouched(expected)


def test_frames_without_end_before_the_transfer_is_known(peer):
    peer.transfer_id = unique("nobody")
    peer.hello()
    for _ in range(200):
        peer.manifest()
    error = peer.control.ended()
    assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "TOO_MANY_FRAMES")


def test_first_frame_is_no_hello(peer):
    peer.manifest()
    error = peer.control.ended()
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", "MALFORMED_FRAME")


HELLOS = {
    "format version 2": (dict(format_version=2), "UNIMPLEMENTED", "UNSUPPORTED_VERSION"),
    "part 1 of 1": (dict(part_index=1), "INVALID_ARGUMENT", "MALFORMED_FRAME"),
    "no parts": (dict(part_count=0), "INVALID_ARGUMENT", "MALFORMED_FRAME"),
    "65 parts": (dict(part_count=65), "INVALID_ARGUMENT", "INVALID_PART"),
    "token": (dict(transfer_token=b"0123456789abcdef"), "PERMISSION_DENIED", "TOKEN_MISMATCH"),
    "epoch": (dict(expected_epoch=99), "FAILED_PRECONDITION", "PEER_RESTARTED"),
    "no attempt": (dict(attempt=0), "INVALID_ARGUMENT", "MALFORMED_FRAME"),
    "no role": (dict(role=0), "INVALID_ARGUMENT", "MALFORMED_FRAME"),
    "long token": (dict(transfer_token=bytes(17)), "INVALID_ARGUMENT", "MALFORMED_FRAME"),
}


@pytest.mark.parametrize("name", HELLOS)
def test_hello_that_is_refused(name, expected, peer, target, transfer_id):
    """The transfer that it is not for goes on waiting."""
    change, code, reason = HELLOS[name]
    peer.hello(**change)
    error = peer.control.ended()
    assert (error.code, error.reason) == (code, reason)
    assert target.get_transfer(transfer_id).state == report_pb2.TRANSFER_STATE_WAITING
    target.cancel(transfer_id)


@pytest.mark.parametrize("part", [0, 1])
def test_another_number_of_parts_is_told_to_both(part, expected, peer, target, transfer_id):
    peer.hello(part_count=2, part_index=part)
    error = peer.control.ended()
    assert (error.code, error.reason) == ("FAILED_PRECONDITION", "SCHEMA_MISMATCH")
    with refused("FAILED_PRECONDITION", "SCHEMA_MISMATCH"):
        target.wait(transfer_id, timeout_s=10)
    assert "part_count: 2 and 1" in target.get_transfer(transfer_id).message


# What WorkerService refuses as a transfer_id, too.
BAD_IDS = {
    "empty": "",
    "129 characters": "x" * 129,
    "a space": "no space",
    "a path": "../../etc/passwd",
    "a line break": "id\n2026-01-01T00:00:00Z error forged",
    "NUL": "id\0",
    "a control character": "id\x1b[2J",
    "DEL": "id\x7f",
    "not ASCII": "idé",
    "a brace": 'id"}',
}


@pytest.mark.parametrize("name", BAD_IDS)
def test_id_that_no_worker_could_have_chosen(name, expected, peer, target, transfer_id):
    """Refused in a Hello and in a DataOpen by the rule and the field's name; the id itself is not echoed."""
    bad = BAD_IDS[name]
    with refused("INVALID_ARGUMENT", "INVALID_TRANSFER_ID"):
        target.get_transfer(bad)
    peer.hello(transfer_id=bad)
    opened = peer.open_data(transfer_id=bad)
    for stream, field in ((peer.control, "hello.transfer_id"), (opened, "open.transfer_id")):
        error = stream.ended()
        assert (error.code, error.reason) == ("INVALID_ARGUMENT", "MALFORMED_FRAME")
        assert error.metadata["field"] == field
        assert "1 to 128 of A-Z a-z 0-9 . _ : -" in error.message
        assert not bad or bad not in error.message
    assert target.get_transfer(transfer_id).state == report_pb2.TRANSFER_STATE_WAITING
    target.cancel(transfer_id)


def _run(first, count):
    return schema_pb2.TokenRun(first=first, count=count)


MANIFESTS = {
    "too many chunks": (dict(chunk_count=3), "INVALID_ARGUMENT", "BAD_MANIFEST"),
    "2^64-1 chunks": (dict(chunk_count=2**64 - 1), "INVALID_ARGUMENT", "BAD_MANIFEST"),
    "tokens beyond": (dict(kept_tokens=[_run(0, TOKENS + 1)]), "INVALID_ARGUMENT", "BAD_MANIFEST"),
    "run of 2^32-1": (dict(kept_tokens=[_run(5, 2**32 - 1)]), "INVALID_ARGUMENT", "BAD_MANIFEST"),
    "runs that overlap": (dict(kept_tokens=[_run(0, 6), _run(5, 5)]), "INVALID_ARGUMENT", "BAD_MANIFEST"),
    "runs that go back": (dict(kept_tokens=[_run(5, 5), _run(0, 5)]), "INVALID_ARGUMENT", "BAD_MANIFEST"),
    "nothing kept": (dict(kept_tokens=[]), "INVALID_ARGUMENT", "BAD_MANIFEST"),
    "dropped though not accepted": (dict(kept_tokens=[_run(0, 5)]), "FAILED_PRECONDITION", "DROP_NOT_ACCEPTED"),
    "another token count": (dict(token_count=9), "FAILED_PRECONDITION", "SCHEMA_MISMATCH"),
    "no shape": (dict(shape=None), "FAILED_PRECONDITION", "SCHEMA_MISMATCH"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifest_that_is_refused(name, expected, peer, target, transfer_id):
    change, code, reason = MANIFESTS[name]
    peer.greet()
    peer.manifest(**change)
    with pytest.raises(skv.TransferFailed) as failed:
        target.wait(transfer_id, timeout_s=30)
    # Frames of an impossible form are refused by the parser, before the transfer sees them.
    assert (failed.value.code, failed.value.reason) in ((code, reason), ("INVALID_ARGUMENT", "MALFORMED_FRAME"))
    untouched(expected)


@pytest.mark.parametrize("frame", ["hello_reply", "accept", "credit", "receipt", "manifest"])
def test_frame_that_a_sender_does_not_send(frame, expected, peer, target, transfer_id):
    peer.join()
    if frame == "manifest":
        peer.manifest()  # a second one
    else:
        made = {
            "hello_reply": peer_service_pb2.HelloReply(epoch=EPOCH, session=1, shape=peer.shape()),
            "accept": peer_service_pb2.Accept(fence=1, credits=1, streams=1),
            "credit": peer_service_pb2.Credit(credits=1),
            "receipt": peer_service_pb2.Receipt(state=report_pb2.TRANSFER_STATE_COMMITTED),
        }
        peer.tell(**{frame: made[frame]})
        if frame == "hello_reply":  # an acceptor has no use for it; silence would end the transfer all the same
            with pytest.raises(skv.TransferFailed):
                target.wait(transfer_id, timeout_s=30)
            return
    must_fail(target, transfer_id, "INVALID_ARGUMENT", "PROTOCOL_VIOLATION")
    untouched(expected)


OPENS = {"session": dict(session=77), "attempt": dict(attempt=2), "transfer": dict(transfer_id="another")}


@pytest.mark.parametrize("name", OPENS)
def test_data_stream_of_nobody(name, expected, peer, target, transfer_id):
    peer.greet()
    error = peer.open_data(**OPENS[name]).ended()
    assert (error.code, error.reason) == ("NOT_FOUND", "UNKNOWN_SESSION")
    assert target.cancel(transfer_id).state == report_pb2.TRANSFER_STATE_CANCELLED


def test_older_attempt_does_not_take_over(expected, peer, decode, target, transfer_id):
    stream = peer.join()
    with HostilePeer(decode.peer, transfer_id, hostile_group(), TOKENS) as second:
        second.hello()
        error = second.control.ended()
        assert (error.code, error.reason) == ("ALREADY_EXISTS", "TRANSFER_EXISTS")
    peer.send_chunks(stream, peer.chunks())
    assert peer.hear("receipt").state == report_pb2.TRANSFER_STATE_COMMITTED


def test_a_hostile_receiver_gets_no_further(source, prefill, decode, transfer_id):
    """Accepts that do not fit, and COMMITTED before anything was sent."""
    side = make_side(source, prefill, [hostile_group()], {0: [5, 0, 7]})
    frames = {
        "no fence": dict(accept=peer_service_pb2.Accept(fence=0, credits=1, streams=1)),
        "too early": dict(receipt=peer_service_pb2.Receipt(state=report_pb2.TRANSFER_STATE_COMMITTED)),
        "a manifest": dict(manifest=peer_service_pb2.Manifest(token_count=TOKENS, streams=1, chunk_count=2)),
    }
    with side.pool:
        for number, frame in enumerate(frames.values()):
            name = f"{transfer_id}.{number}"
            source.publish(name, pool=side.pool, token_count=TOKENS, blocks=side.blocks,
                           policy=skv.policy(allocator="RAW", budget=1.1))  # fmt: skip
            with HostilePeer(prefill.peer, name, hostile_group(), TOKENS, role="RECEIVER") as peer:
                peer.hello()
                peer.hear("hello_reply")
                peer.hear("manifest")
                peer.tell(**frame)
                with pytest.raises(skv.TransferFailed) as failed:
                    source.wait(name, timeout_s=20)
                assert failed.value.code == "INVALID_ARGUMENT"
                assert failed.value.reason in ("PROTOCOL_VIOLATION", "MALFORMED_FRAME")


def test_many_half_open_connections(decode, target, transfer_id):
    """Streams that never say hello hold nothing that others need."""
    peers = [HostilePeer(decode.peer, f"{transfer_id}.{i}", hostile_group(), TOKENS) for i in range(40)]
    for peer in peers:
        peer.hello()
    time.sleep(0.2)
    for peer in peers:
        peer.channel.close()
