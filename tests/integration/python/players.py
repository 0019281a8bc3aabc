"""A peer that plays one half of a transfer honestly to its end, but for one message. Four of them: who sends, who dials."""

import queue
import struct
import threading
import time
from concurrent import futures

import grpc
from hostile import CONTROL, DATA, EPOCH, HostilePeer, Stream

from spectrumkv.v1 import peer_service_pb2 as pb
from spectrumkv.v1 import report_pb2, schema_pb2
from wrong_fields import part

PATIENCE_S = 2
# Stands in a wrong DataOpen for the session that the daemon gives.
ANY_SESSION = 0x1122334455667788
COMMITTED = report_pb2.TRANSFER_STATE_COMMITTED


class Ended(Exception):
    """The daemon ended the stream, or the time was over."""


class Player:
    """role, dials: which half this is. wrong: (frame's name, bytes of the whole ControlFrame or Data message) instead of the
    honest one. The message is sent even where the honest play has no such frame: just before the first chunk, or the receipt."""

    def __init__(self, honest: HostilePeer, role, dials, name="", data=b""):
        self.honest, self.role, self.dials, self.name, self.data = honest, role, dials, name, data
        self.said = set()

    # What a subclass gives: bytes of a frame out, a frame in.
    def put(self, frame):
        raise NotImplementedError

    def get(self, end):
        raise NotImplementedError

    def say(self, kind, **fields):
        message = getattr(pb, "".join(part.capitalize() for part in kind.split("_")))(**fields)
        self.said.add(kind)
        self.put(self.data if kind == self.name else pb.ControlFrame(**{kind: message}).SerializeToString())

    def hear(self, kind):
        end = time.monotonic() + PATIENCE_S
        while True:
            frame = self.get(end)
            got = frame.WhichOneof("frame")
            if got == kind:
                return getattr(frame, kind)
            if got in ("cancel", "receipt"):
                raise Ended(got)

    def extra(self):
        """The wrong frame where nothing else sends it."""
        if self.name and self.name not in self.said and self.name not in ("open", "chunk"):
            self.put(self.data)
        if self.name == "cancel":  # or the last chunk could come first, on its own stream
            self.hear("hello")  # which never comes: until the end

    def chunk_message(self, chunk, kind=pb.DataRequest):
        """One Data message with a chunk, or the wrong one once."""
        if self.name == "chunk" and "chunk" not in self.said:
            self.said.add("chunk")
            return self.data
        return kind(chunk=chunk).SerializeToString()

    def shape(self):
        return self.honest.shape()

    def hello_fields(self):
        return dict(format_version=1, epoch=EPOCH, role=report_pb2.TransferRole.Value(f"TRANSFER_ROLE_{self.role}"),
                    transfer_id=self.honest.transfer_id, transfer_token=self.honest.token, part_count=1, attempt=1,
                    deadline_ms=5000, shape=self.shape(), token_count=self.honest.tokens)  # fmt: skip

    def manifest_fields(self):
        peer = self.honest
        return dict(token_count=peer.tokens, kept_tokens=[schema_pb2.TokenRun(first=0, count=peer.tokens)],
                    shape=self.shape(), chunk_count=len(peer.cuts()), streams=1)  # fmt: skip

    def accept_fields(self):
        return dict(fence=77, credits=16, streams=1)

    def receipt_fields(self):
        return dict(state=COMMITTED, chunks_received=len(self.honest.cuts()), first_layer_ready_seconds=0.1,
                    span_seconds=0.1, busy_seconds=0.05)  # fmt: skip

    def open_message(self, session):
        if self.name == "open":
            return self.data.replace(struct.pack("<Q", ANY_SESSION), struct.pack("<Q", session))
        opened = pb.DataOpen(transfer_id=self.honest.transfer_id, attempt=1, session=session)
        return pb.DataRequest(open=opened).SerializeToString()


# What a frame that is not part of the play says otherwise.
OTHERWISE = {"heartbeat": dict(reason="sending"), "cancel": dict(cause=report_pb2.TRANSFER_STATE_FAILED, code=14,
             reason="PEER_BUSY", message="no more"), "credit": dict(credits=1)}  # fmt: skip


class Dialler(Player):
    """Dials a daemon that waits (Expect or Publish)."""

    def put(self, frame):
        self.honest.control.send(part(1, frame))

    def get(self, end):
        control = self.honest.control
        while time.monotonic() < end:
            try:
                answer = control.answers.get(timeout=0.02)
            except queue.Empty:
                if any(stream.error for stream in self.honest.data):
                    self.give_up()
                continue
            if answer is None:
                raise Ended(str(control.error))
            return answer.frame
        raise Ended("silence")

    def give_up(self):
        """Says so, as an honest peer does whose data streams end."""
        self.put(pb.ControlFrame(cancel=pb.Cancel(**OTHERWISE["cancel"])).SerializeToString())
        raise Ended("the data stream ended")

    def play(self):
        peer = self.honest
        self.say("hello", **self.hello_fields())
        peer.session = self.hear("hello_reply").session
        if self.role == "SENDER":
            self.say("manifest", **self.manifest_fields())
            peer.fence = self.hear("accept").fence
        else:
            self.hear("manifest")
            self.say("accept", **self.accept_fields())
        stream = Stream(peer.channel, DATA, pb.DataResponse)
        stream.send(self.open_message(peer.session))
        peer.data.append(stream)
        if self.role == "SENDER":
            self.extra()
            for chunk in peer.chunks():
                stream.send(self.chunk_message(chunk))
            return self.hear("receipt")
        for _ in peer.cuts():
            try:
                if stream.answers.get(timeout=PATIENCE_S) is None:
                    self.give_up()
            except queue.Empty:
                self.give_up()
        self.extra()
        self.say("receipt", **self.receipt_fields())
        return None


class Acceptor(Player):
    """Is dialled by a daemon (Send or Fetch): one control stream, whose data streams find it by the server."""

    def __init__(self, *args, requests, answers, **options):
        super().__init__(*args, **options)
        self.requests, self.answers = requests, answers
        self.opened = queue.Queue()  # (DataOpen, iterator of requests, queue of answers)

    def put(self, frame):
        self.answers.put(part(1, frame))

    def get(self, end):
        try:
            message = next(self.requests)
        except (StopIteration, grpc.RpcError) as error:
            raise Ended("the daemon hung up") from error
        return pb.ControlRequest.FromString(message).frame

    def play(self):
        peer = self.honest
        self.hear("hello")
        self.say("hello_reply", epoch=EPOCH, session=1, shape=self.shape())
        if self.role == "SENDER":
            self.say("manifest", **self.manifest_fields())
            peer.fence = self.hear("accept").fence
        else:
            self.hear("manifest")
            self.say("accept", **self.accept_fields())
        try:
            requests, answers = self.opened.get(timeout=PATIENCE_S)
        except queue.Empty:
            raise Ended("no data stream") from None
        if self.role == "SENDER":
            self.extra()
            if self.name == "open":
                answers.put(self.data)
            for chunk in peer.chunks():
                answers.put(self.chunk_message(chunk, pb.DataResponse))
            answers.put(None)
            return self.hear("receipt")
        try:
            for _ in peer.cuts():
                next(requests)
        except (StopIteration, grpc.RpcError) as error:
            raise Ended("no chunk") from error
        self.extra()
        self.say("receipt", **self.receipt_fields())
        self.hear("hello")  # until the daemon hangs up


class HostileServer:
    """Listens as a daemon does. player_of(requests, answers) gives an Acceptor for each control stream of a transfer."""

    def __init__(self):
        self._server = grpc.server(futures.ThreadPoolExecutor(32), options=[("grpc.max_receive_message_length", -1),
                                                                           ("grpc.max_send_message_length", -1)])  # fmt: skip
        handlers = {name.rsplit("/", 1)[1]: grpc.stream_stream_rpc_method_handler(method)
                    for name, method in ((CONTROL, self._control), (DATA, self._data))}  # fmt: skip
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(CONTROL.split("/")[1], handlers),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self.player_of, self.player, self.ends = None, None, []
        self._server.start()

    def _control(self, requests, context):
        answers = queue.Queue()
        context.add_callback(lambda: answers.put(None))
        self.player = player = self.player_of(requests, answers)

        def play():
            try:
                player.play()
                self.ends.append("played to the end")
            except Ended as end:
                self.ends.append(str(end))
            answers.put(None)

        threading.Thread(target=play, daemon=True).start()
        yield from iter(answers.get, None)

    def _data(self, requests, context):
        answers = queue.Queue()
        context.add_callback(lambda: answers.put(None))
        next(requests)  # DataOpen
        self.player.opened.put((requests, answers))
        yield from iter(answers.get, None)

    def stop(self):
        self._server.stop(0)
