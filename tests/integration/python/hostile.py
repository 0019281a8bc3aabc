"""The other daemon, played frame by frame over the real protocol, so that it can do what a daemon never would."""

import functools
import queue
import struct
import threading

import grpc
import numpy as np
from moves import random_words

import spectrumkv as skv
from spectrumkv import wire
from spectrumkv.errors import error_from_rpc
from spectrumkv.v1 import peer_service_pb2, report_pb2, schema_pb2
from spectrumkv.wire.crc32c import crc32c

CONTROL = "/spectrumkv.v1.PeerService/Control"
DATA = "/spectrumkv.v1.PeerService/Data"
EPOCH = 4711
_WAIT_S = 20


class Stream:
    """One bidirectional call. send() takes bytes as they are, or a message. Answers are in `answers`, in order; after
    the last one None. `error` is then the SpectrumKVError it ended with, or None."""

    def __init__(self, channel, method, answer_type):
        self._requests = queue.Queue()
        self.answers = queue.Queue()
        self.error = None
        self._call = channel.stream_stream(
            method, request_serializer=lambda data: data, response_deserializer=answer_type.FromString
        )(iter(self._requests.get, None))
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self):
        try:
            for answer in self._call:
                self.answers.put(answer)
        except grpc.RpcError as error:
            self.error = error_from_rpc(error)
        self.answers.put(None)

    def send(self, message):
        self._requests.put(message if isinstance(message, bytes) else message.SerializeToString())

    def done(self):
        self._requests.put(None)

    def cancel(self):
        self._call.cancel()
        self._thread.join(_WAIT_S)

    def ended(self):
        """Waits for the end; its error."""
        while self.answers.get(timeout=_WAIT_S) is not None:
            pass
        return self.error


class HostilePeer:
    """Dials the daemon at `address`. shape: that of `group` alone, model "m"."""

    def __init__(self, address, transfer_id, group, tokens, *, role="SENDER", token=b""):
        self.transfer_id, self.group, self.tokens, self.role, self.token = transfer_id, group, tokens, role, token
        self.channel = grpc.insecure_channel(
            address, options=[("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1),
                              ("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)])  # fmt: skip
        self.data = []
        self.session = self.fence = self.credits = 0

    @functools.cached_property
    def control(self):
        return Stream(self.channel, CONTROL, peer_service_pb2.ControlResponse)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if "control" in self.__dict__:
            self.control.done()
        for stream in self.data:
            stream.done()
        self.channel.close()

    def shape(self):
        proto = self.group.to_proto(0, 0)
        shape = peer_service_pb2.PoolShape(model="m")
        shape.groups.add(
            kind=schema_pb2.GROUP_KIND_ATTENTION, data_type=proto.data_type, heads_total=proto.heads_total,
            head_first=proto.head_first, head_count=proto.head_count, head_dim=proto.head_dim,
            layers=self.group.layers, has_v=True,
        )  # fmt: skip
        return shape

    def tell(self, **frame):
        """One control frame, by its name in ControlFrame."""
        self.control.send(peer_service_pb2.ControlRequest(frame=peer_service_pb2.ControlFrame(**frame)))

    def hear(self, kind):
        """The next frame of this kind; others but heartbeats are wrong."""
        while True:
            answer = self.control.answers.get(timeout=_WAIT_S)
            if answer is None:
                raise AssertionError(f"the stream ended before {kind}: {self.control.error}")
            got = answer.frame.WhichOneof("frame")
            if got == kind:
                return getattr(answer.frame, kind)
            assert got in ("heartbeat", "credit"), answer

    def hello(self, **changes):
        fields = dict(
            format_version=1, epoch=EPOCH, role=report_pb2.TransferRole.Value(f"TRANSFER_ROLE_{self.role}"),
            transfer_id=self.transfer_id, transfer_token=self.token, part_count=1, attempt=1, deadline_ms=20000,
            shape=self.shape(), token_count=self.tokens,
        )  # fmt: skip
        self.tell(hello=peer_service_pb2.Hello(**{**fields, **changes}))

    def greet(self):
        self.hello()
        self.session = self.hear("hello_reply").session

    def cuts(self):
        group = self.group
        cuts = wire.cut_tokens(self.tokens, group.heads, group.head_dim, wire.DType.FLOAT16)
        return [(layer, first, count) for layer in group.layers for first, count in cuts]

    def manifest(self, **changes):
        fields = dict(
            token_count=self.tokens, kept_tokens=[schema_pb2.TokenRun(first=0, count=self.tokens)],
            shape=self.shape(), chunk_count=len(self.cuts()), streams=1,
        )  # fmt: skip
        self.tell(manifest=peer_service_pb2.Manifest(**{**fields, **changes}))

    def accepted(self):
        accept = self.hear("accept")
        self.fence, self.credits = accept.fence, accept.credits
        return accept

    def join(self):
        """Up to where chunks may be sent."""
        self.greet()
        self.manifest()
        self.accepted()
        return self.open_data()

    def open_data(self, **changes):
        stream = Stream(self.channel, DATA, peer_service_pb2.DataResponse)
        fields = dict(transfer_id=self.transfer_id, attempt=1, session=self.session, stream=len(self.data))
        stream.send(peer_service_pb2.DataRequest(open=peer_service_pb2.DataOpen(**{**fields, **changes})))
        self.data.append(stream)
        return stream

    def words(self):
        """What an honest sender has: [layers, planes, tokens, heads, head_dim]."""
        rng = np.random.default_rng(5)
        group = self.group
        return random_words(rng, (len(group.layers), 2, self.tokens, group.heads, group.head_dim), "float16")

    def chunks(self, tier=wire.Tier.RAW, **header):
        """All chunks, honest but for these header fields."""
        kv, out = self.words(), []
        for index, (layer, first, count) in enumerate(self.cuts()):
            fields = dict(fence=self.fence, chunk_index=index, layer=layer, token_first=first)
            head = wire.ChunkHeader(count, self.group.heads, self.group.head_dim, wire.DType.FLOAT16,
                                    **{**fields, **header})  # fmt: skip
            tiers = np.full(count, tier, np.uint8)
            place = list(self.group.layers).index(layer)
            k, v = kv[place, :, first : first + count]
            out.append(wire.encode_chunk(k, v, tiers, tiers, wire.DType.FLOAT16, header=head))
        return out

    def send_chunks(self, stream, chunks):
        for chunk in chunks:
            stream.send(peer_service_pb2.DataRequest(chunk=chunk))


def sealed(chunk):
    """The chunk with the checksum its bytes ask for."""
    return chunk[:60] + struct.pack("<I", crc32c(chunk[:60], chunk[64:])) + chunk[64:]


def flipped(chunk, bit):
    """The chunk with one bit the other way; negative bits count from the end."""
    data = bytearray(chunk)
    data[bit // 8] ^= 1 << (bit % 8)
    return bytes(data)


def patched(chunk, offset, value):
    """The chunk with other bytes at `offset`, its checksum made right again."""
    return sealed(chunk[:offset] + value + chunk[offset + len(value) :])


def hostile_group(**changes):
    return skv.Group(**{**dict(layers=[0, 1], heads=2, head_dim=16, block_tokens=4, num_blocks=12), **changes})
