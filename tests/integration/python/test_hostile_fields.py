"""Every field of the peer protocol wrong in turn, from each of the four places that a peer can have.

A peer plays its half to the end, but one field of one message has another value. Whatever it is: the daemon lives, its
transfer ends, what it says of the end is true and says nothing of the peer's making into its log, the next transfer goes
through, and memory does not grow.
"""

import pathlib
import re
import time

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hostile import HostilePeer, hostile_group
from moves import POISON, check, fill, make_side, move, poison, random_words, small_group, unique
from players import ANY_SESSION, OTHERWISE, Acceptor, Dialler, Ended, HostileServer
from real_daemon import SANITIZER_KIB, running
from wrong_fields import all_paths, wrongs

import spectrumkv as skv
from spectrumkv.v1 import peer_service_pb2 as pb
from spectrumkv.v1 import report_pb2

TOKENS, DEADLINE_MS = 10, 3000
RAW = dict(allocator="RAW", budget=1.1)
# What the largest message of each kind takes once, in the arenas of its threads; the same again takes nothing more.
GROWTH_KIB = (64 << 10) + SANITIZER_KIB
PLACES = {"dialling sender": ("SENDER", True), "dialling receiver": ("RECEIVER", True),
          "dialled sender": ("SENDER", False), "dialled receiver": ("RECEIVER", False)}  # fmt: skip
# Which messages come from where. Every path of the protocol must be in one of them: see test_no_field_is_forgotten.
SAYS = {
    "dialling sender": ("hello", "manifest", "heartbeat", "cancel", "open", "chunk"),
    "dialling receiver": ("hello", "accept", "credit", "heartbeat", "cancel", "receipt", "open"),
    "dialled sender": ("hello_reply", "manifest", "heartbeat", "cancel", "open", "chunk"),
    "dialled receiver": ("hello_reply", "accept", "credit", "heartbeat", "cancel", "receipt"),
}
# Fields, and all below them, whose value is the peer's own affair: a transfer may commit whatever it is. A value of any
# other field is refused: one that is new is, until it stands here.
FREE = {
    "hello.epoch": "names the peer's life; compared with itself alone",
    "hello.deadline_ms": "the peer's own; ours is our worker's",
    "hello.shape.groups.data_type": "float16 and others convert; the manifest and each chunk say what travels",
    "hello.accept_dropped": "allows more, asks for nothing",
    "hello.outcome_only": "a half that is not over goes on",
    "hello_reply.epoch": "as hello.epoch",
    "hello_reply.session": "the peer's own name for its attempt; 0 is none",
    "hello_reply.shape": "the manifest's counts",
    "manifest.streams": "a hint",
    "manifest.retention": "an offer, which our half did not ask for; bounded",
    "manifest.checksums": "of a refinement; ours is none",
    "heartbeat.reason": "for people",
    "accept.fence": "the peer's own number; 0 is none",
    "accept.chunks_received": "of chunks that were handed to the network before; the first attempt has none",
    "accept.credits": "room at the peer; no more is sent than there is, nor than there are chunks",
    "accept.streams": "a bound",
    "accept.refinable": "a wish; a source that is not to be retained is not",
    "credit.credits": "as accept.credits",
    "receipt.reason": "of a failure",
    "receipt.message": "of a failure",
    "receipt.chunks_received": "for the report",
    "receipt.chunks_duplicate": "for the report",
    "receipt.first_layer_ready_seconds": "for the report",
    "receipt.span_seconds": "for estimates about this peer",
    "receipt.busy_seconds": "for estimates about this peer",
    "receipt.decoded_on_gpu": "for estimates about this peer",
    "open.stream": "a name; bounded",
}
CASES = [(place, path) for place, kinds in SAYS.items() for path in all_paths() if path[0] in kinds]
TERMINAL = report_pb2.TRANSFER_STATE_COMMITTED


def rss_kib(daemon):
    told = pathlib.Path(f"/proc/{daemon.process.pid}/status").read_text().splitlines()
    return int(next(line for line in told if line.startswith("RssAnon")).split()[1])


class World:
    """A daemon with pools for the hostile half's other half, another daemon, and a small transfer between the two."""

    def __init__(self, daemon, other, client, other_client, server):
        self.daemon, self.other, self.client, self.other_client, self.server = daemon, other, client, other_client, server
        group, small = hostile_group(), small_group()
        blocks = {0: [5, 0, 7]}
        self.source = make_side(client, daemon, [group], blocks)
        self.target = make_side(client, daemon, [group], blocks)
        self.next = make_side(client, daemon, [small], {0: [3, 1, 2]}, model="next"), make_side(
            other_client, other, [small], blocks, model="next")  # fmt: skip
        self.words = random_words(np.random.default_rng(3), (2, 2, TOKENS, 2, 16), "float16")
        fill(self.next[0], [self.words])
        self.rss, self.cases = None, 0

    def half(self, place, name):
        """The daemon's half of a transfer, begun."""
        role, dials = PLACES[place]
        common = dict(token_count=TOKENS, deadline_ms=DEADLINE_MS)
        if role == "SENDER":  # the daemon receives
            poison(self.target)
            where = dict(pool=self.target.pool, blocks=self.target.blocks, **common)
            return self.client.expect(name, **where) if dials else self.client.fetch(name, peer=self.server.address, **where)
        where = dict(pool=self.source.pool, blocks=self.source.blocks, policy=skv.policy(**RAW), **common)
        return self.client.publish(name, **where) if dials else self.client.send(name, peer=self.server.address, **where)

    def play(self, place, name, kind="", data=b""):
        """Plays it; the report of the daemon's half."""
        role, dials = PLACES[place]
        peer = HostilePeer(self.daemon.peer, name, hostile_group(), TOKENS, role=role)
        with peer:
            if dials:
                self.half(place, name)
                try:
                    Dialler(peer, role, dials, kind, data).play()
                    how = "played to the end"
                except Ended as end:
                    how = str(end)
            else:
                self.server.ends.clear()
                self.server.player_of = lambda requests, answers: Acceptor(peer, role, dials, kind, data,
                                                                           requests=requests, answers=answers)  # fmt: skip
                self.half(place, name)
                how = "dialled"
            return self.ended(name, how), peer

    def ended(self, name, how):
        end = time.monotonic() + DEADLINE_MS / 1000 + 2
        while True:
            report = self.client.get_transfer(name)
            if report.state >= TERMINAL:
                return report
            # What the peer was refused for need not be of this transfer, which goes on waiting.
            if report.state == report_pb2.TRANSFER_STATE_WAITING and how not in ("played to the end", "dialled"):
                return self.client.cancel(name)
            assert time.monotonic() < end, f"{name} does not end: {report} ({how})"
            time.sleep(0.005)

    def look(self, report, peer, role, what):
        """What must be true of the daemon after each case."""
        assert self.daemon.alive, self.daemon.log()
        if report.state == report_pb2.TRANSFER_STATE_COMMITTED:
            assert report.code == 0 and report.reason == ""
            if role == "SENDER":
                check(self.target, [peer.words()])
        else:
            assert report.reason and report.code not in ((0, 13) if report.reason == "OUTCOME_UNKNOWN" else (0, 2, 13)), (
                f"{what}: {report}")  # fmt: skip
            assert re.fullmatch(r"[A-Z0-9_]{1,128}", report.reason), f"{what}: {report.reason!r}"
        assert not re.search(r"[\x00-\x1f\x7f]", report.message + report.reason), f"{what}: {report.message!r}"
        here, there = self.next
        poison(there)
        move(unique("next"), self.client, self.other_client, self.daemon, self.other, here, there, TOKENS,
             policy=skv.policy(**RAW))  # fmt: skip
        check(there, [self.words])
        if role == "SENDER":
            rest = [b for b in range(12) if b not in self.target.blocks[0]]
            assert (self.target.pool.kv().view(np.uint8)[:, :, rest] == POISON).all(), f"{what}: a block outside was written"
        self.cases += 1
        self.rss = self.rss or rss_kib(self.daemon)
        grown = rss_kib(self.daemon) - self.rss
        assert grown < GROWTH_KIB, f"{what}: memory grew by {grown} KiB"


@pytest.fixture(scope="module")
def world():
    server = HostileServer()
    # Ends are remembered for a while, of right: not for as long as this takes.
    keys = dict(transfer__progress_timeout_ms=1500, transfer__terminal_memory_seconds=5)
    with running(**keys) as daemon, running() as other:
        with daemon.client() as client, other.client() as other_client:
            world = World(daemon, other, client, other_client, server)
            sides = (world.source, world.target, *world.next)
            yield world
            print(f"\n{world.cases} wrong values; memory grew by {rss_kib(daemon) - world.rss} KiB, bound {GROWTH_KIB}")
            metrics = daemon.metrics()
            assert metrics["spectrumkv_inflight_transfers"] == 0
            log = (daemon.folder / "log").read_text(errors="replace")
            assert not [line for line in log.split("\n") if line and not re.match(r"\d{4}-\d\d-\d\dT[\d:.]+Z \w+ ", line)], (
                "a line of the log is of somebody else's making")  # fmt: skip
            assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", log)
            for side in sides:
                side.pool.close()
        server.stop()


def is_free(path):
    """Itself, what it is in, or all that is in it."""
    below = [other for other in all_paths() if other[: len(path)] == path and len(other) == len(path) + 1]
    return any(".".join(path[:n]) in FREE for n in range(1, len(path) + 1)) or (bool(below) and all(map(is_free, below)))


def says_the_same(message, data):
    """Bytes that mean what an honest peer says, written otherwise."""
    try:
        other = type(message).FromString(data)
    except DecodeError:
        return False
    other.DiscardUnknownFields()
    return other == message


def test_no_field_is_forgotten():
    assert {path for _, path in CASES} == set(all_paths()), "a message that nobody says"
    assert {".".join(path) for path in all_paths()} >= set(FREE), "a field that is no more"


def honest_message(place, kind, name):
    """The frame, or Data message, that an honest peer in this place sends."""
    role, dials = PLACES[place]
    peer = HostilePeer("127.0.0.1:1", name, hostile_group(), TOKENS, role=role)
    try:
        player = Dialler(peer, role, dials)
        if kind == "open":
            return pb.DataRequest(open=pb.DataOpen(transfer_id=name, attempt=1, session=ANY_SESSION))
        if kind == "chunk":
            return pb.DataRequest(chunk=peer.chunks()[0])
        made = {"hello": player.hello_fields, "manifest": player.manifest_fields, "accept": player.accept_fields,
                "receipt": player.receipt_fields, "hello_reply": lambda: dict(epoch=4711, session=1, shape=player.shape())}  # fmt: skip
        fields = made[kind]() if kind in made else OTHERWISE[kind]
        return pb.ControlFrame(**{kind: getattr(pb, "".join(p.capitalize() for p in kind.split("_")))(**fields)})
    finally:
        peer.channel.close()


@pytest.mark.parametrize("place", PLACES)
def test_an_honest_peer_commits(place, world):
    report, peer = world.play(place, unique("honest"))
    assert report.state == report_pb2.TRANSFER_STATE_COMMITTED, report
    world.look(report, peer, PLACES[place][0], "honest")


@pytest.mark.parametrize("place, path", CASES, ids=lambda part: ".".join(part) if isinstance(part, tuple) else part)
def test_one_field(place, path, world):
    role, _ = PLACES[place]
    some, ends, refused = unique("w"), {}, 0
    honest = honest_message(place, path[0], some)
    for what, data in wrongs(honest, path):
        name, started = unique("w"), time.monotonic()
        assert len(name) == len(some)
        report, peer = world.play(place, name, path[0], data.replace(some.encode(), name.encode()))
        world.look(report, peer, role, f"{place} {'.'.join(path)} = {what}")
        if report.state != report_pb2.TRANSFER_STATE_COMMITTED:
            refused += 1
        else:
            assert path[0] != "cancel", f"{what} of a cancel did not end the transfer"
            assert is_free(path) or says_the_same(honest, data), f"{what} has committed"
        ends[what] = f"{report_pb2.TransferState.Name(report.state)[15:]} {report.reason} {time.monotonic() - started:.2f} s"
    print(f"\n{place} {'.'.join(path)}")
    for what, end in ends.items():
        print(f"  {what}: {end}")
    assert refused or is_free(path), "nothing of this field was refused"
