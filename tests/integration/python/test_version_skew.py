"""Daemons of two builds, one of which speaks an older chunk format: no transfer hangs, and the error says what to do.

There is one format so far, so the other build is played: as the one that dials (hostile.py) and as the one that answers.
"""

import concurrent.futures
import time

import grpc
import pytest
from ends import COMMITTED, RAW, TOKENS, until
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from hostile import CONTROL, HostilePeer, hostile_group
from moves import check, make_side, poison, serves_the_next, unique
from real_daemon import refused

import spectrumkv as skv
from spectrumkv.v1 import peer_service_pb2, report_pb2

OURS = 1
WORDS = "chunk format version {}, this daemon speaks {}"


class OtherBuild:
    """Answers Hellos as a daemon does that speaks `version`, or, with `service` False, as a program without a
    PeerService at all. `hellos` is what it heard."""

    def __init__(self, version=OURS - 1, service=True):
        self.version, self.hellos = version, []
        self._server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
        if service:
            control = grpc.stream_stream_rpc_method_handler(
                self._control, request_deserializer=peer_service_pb2.ControlRequest.FromString,
                response_serializer=peer_service_pb2.ControlResponse.SerializeToString,
            )  # fmt: skip
            name, method = CONTROL.strip("/").split("/")
            self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, {method: control})])
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.stop(0).wait()

    def _control(self, requests, context):
        hello = next(requests).frame.hello
        self.hellos.append(hello)
        assert hello.format_version != self.version, "this player only refuses"
        words = WORDS.format(hello.format_version, self.version)
        detail = any_pb2.Any()
        detail.Pack(error_details_pb2.ErrorInfo(reason="UNSUPPORTED_VERSION", domain="spectrumkv"))
        status = status_pb2.Status(code=grpc.StatusCode.UNIMPLEMENTED.value[0], message=words, details=[detail])
        context.set_trailing_metadata([("grpc-status-details-bin", status.SerializeToString())])
        context.abort(grpc.StatusCode.UNIMPLEMENTED, words)
        yield


@pytest.fixture
def here(source, prefill):
    side = make_side(source, prefill, [hostile_group()], {0: [3, 1, 2]})
    with side.pool:
        yield side


@pytest.fixture
def there(target, decode):
    side = make_side(target, decode, [hostile_group()], {0: [5, 0, 7]})
    poison(side)
    with side.pool:
        yield side


def of_a_later_build(hello):
    """The Hello with a field that this build does not know, on the wire."""
    unknown = b"\xc2\x3e\x05later"  # field 1000, five bytes
    data = hello.SerializeToString() + unknown
    for field in (1, 1):  # ControlFrame.hello, ControlRequest.frame
        length, size = len(data), b""
        while length > 0x7F:
            size, length = size + bytes([length & 0x7F | 0x80]), length >> 7
        data = bytes([field << 3 | 2]) + size + bytes([length]) + data
    return data


def arguments(side):
    return dict(pool=side.pool, token_count=TOKENS, blocks=side.blocks, deadline_ms=20000)


@pytest.mark.parametrize("version", [OURS - 1, OURS + 1], ids=["older", "newer"])
def test_another_build_dials(version, there, target, decode, transfer_id):
    """Refused by both numbers; the half it was for goes on waiting, and a daemon of our build may still come."""
    target.expect(transfer_id, **arguments(there))
    before = decode.errors("unimplemented")
    with HostilePeer(decode.peer, transfer_id, hostile_group(), TOKENS) as other:
        other.hello(format_version=version)
        error = other.control.ended()
    assert (error.code, error.reason) == ("UNIMPLEMENTED", "UNSUPPORTED_VERSION")
    assert error.message == WORDS.format(version, OURS)
    until(lambda: decode.errors("unimplemented") == before + 1)
    assert target.get_transfer(transfer_id).state == report_pb2.TRANSFER_STATE_WAITING
    with HostilePeer(decode.peer, transfer_id, hostile_group(), TOKENS) as ours:
        ours.send_chunks(ours.join(), ours.chunks())
        assert ours.hear("receipt").state == COMMITTED
        check(there, [ours.words()])


def test_a_later_build_of_our_format_dials(there, target, decode, transfer_id):
    """Fields that are new are no other format: what this build does not know, it leaves out."""
    target.expect(transfer_id, **arguments(there))
    with HostilePeer(decode.peer, transfer_id, hostile_group(), TOKENS) as later:
        hello = peer_service_pb2.Hello(
            format_version=OURS, epoch=1, role=report_pb2.TRANSFER_ROLE_SENDER, transfer_id=transfer_id, part_count=1,
            attempt=1, deadline_ms=20000, shape=later.shape(), token_count=TOKENS,
        )  # fmt: skip
        later.control.send(of_a_later_build(hello))
        later.session = later.hear("hello_reply").session
        later.manifest()
        later.accepted()
        later.send_chunks(later.open_data(), later.chunks())
        assert later.hear("receipt").state == COMMITTED
        check(there, [later.words()])


@pytest.mark.parametrize("version", [OURS - 1, OURS + 1], ids=["older", "newer"])
@pytest.mark.parametrize("role", ["SENDER", "RECEIVER"])
def test_another_build_is_dialled(version, role, here, there, source, target, prefill, decode, transfer_id):
    """Push and pull end at once, with the words of the other build; it is not asked again until the deadline."""
    client, daemon = (source, prefill) if role == "SENDER" else (target, decode)
    before = daemon.errors("unimplemented")
    with OtherBuild(version) as other:
        start = time.monotonic()
        if role == "SENDER":
            source.send(transfer_id, peer=other.address, policy=skv.policy(**RAW), **arguments(here))
        else:
            target.fetch(transfer_id, peer=other.address, **arguments(there))
        with refused("UNIMPLEMENTED", "UNSUPPORTED_VERSION"):
            client.wait(transfer_id, timeout_s=30)
        seconds = time.monotonic() - start
    report = client.get_transfer(transfer_id)
    assert WORDS.format(OURS, version) in report.message, report
    assert [hello.format_version for hello in other.hellos] == [OURS], "asked once"
    assert seconds < 5, f"the error came after {seconds:.1f} s"
    assert daemon.errors("unimplemented") > before
    if role == "RECEIVER":
        assert (there.pool.segment.memory == 0xA5).all()
    serves_the_next(unique("after"), source, target, prefill, decode)


def test_no_daemon_at_all_is_dialled(here, source, transfer_id):
    """A gRPC server of something else: told at once, too."""
    with OtherBuild(service=False) as other:
        source.send(transfer_id, peer=other.address, policy=skv.policy(**RAW), **arguments(here))
        start = time.monotonic()
        with pytest.raises(skv.TransferFailed) as failed:
            source.wait(transfer_id, timeout_s=30)
    assert (failed.value.code, failed.value.reason) == ("UNIMPLEMENTED", "NOT_A_PEER")
    assert time.monotonic() - start < 5
