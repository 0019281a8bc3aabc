"""What happens in a point, from the seed and its number alone: which fault, when, and to which transfers."""

import random
from dataclasses import dataclass, field

import contents

# Faults of one process: sender and receiver are those of the point's first transfer.
ACTORS = ("sender_daemon", "receiver_daemon", "sender_worker", "receiver_worker")
# pause: shorter than the progress timeout; stop: longer.
PROCESS_KINDS = tuple(f"{what}_{actor}" for what in ("kill", "pause", "stop") for actor in ACTORS)
LINK_KINDS = ("cut_briefly", "cut", "mute_sender", "mute_receiver", "slow_link")
DISK_KINDS = ("disk_full_registering", "disk_full_writing")
KINDS = PROCESS_KINDS + LINK_KINDS + DISK_KINDS
# Before the halves have met; between layers; when the last layer is announced; while what has committed is refined.
MOMENTS = ("hello", "stream", "commit", "refine")
# Faults that everything must survive: they are shorter than any patience, or concern nobody who transfers.
HARMLESS = {f"pause_{actor}" for actor in ACTORS} | {"stop_sender_worker", "stop_receiver_worker", "slow_link",
                                                     "disk_full_registering"}  # fmt: skip


@dataclass
class Transfer:
    """One transfer from the worker of `source` (0 or 1) to that of the other side."""

    name: str
    source: int
    pull: bool
    layerwise: bool
    policy: str
    content: str
    deadline_ms: int
    # Before each layer of a layer-wise source; and before the calls of sender and receiver, from the point's begin.
    pauses_s: list
    delays_s: tuple
    source_blocks: list = field(default_factory=list)
    target_blocks: list = field(default_factory=list)
    # Whether the source is retained, and what has arrived made exact in the background.
    refined: bool = False
    # Of a refined one: its worker takes the blocks back after the commit, and the daemon's cache has the words.
    cached: bool = False

    @property
    def tokens(self):
        return contents.TOKENS[self.content]

    @property
    def target(self):
        return 1 - self.source


@dataclass
class Point:
    seed: int
    number: int
    kind: str
    moment: str
    # Layers of the first transfer that are ready when a fault of "stream" comes; and how long after the moment it comes.
    layers: int
    delay_s: float
    # How long a pause, a stop or a cut lasts, in progress timeouts.
    length: float
    transfers: list

    @property
    def first(self):
        return self.transfers[0]

    def __str__(self):
        kinds = ", ".join(
            f"{'AB'[t.source]}>{'AB'[t.target]} {'pull' if t.pull else 'push'}"
            f" {'layers' if t.layerwise else 'whole'} {t.policy} {t.tokens}{' refined' if t.refined else ''}{' cached' if t.cached else ''}"
            for t in self.transfers
        )
        return f"point {self.number}: {self.kind} at {self.moment} [{kinds}]"


def kind_of(seed, number, kinds):
    """Each kind once in every len(kinds) points, in an order of the seed's."""
    deck = list(kinds)
    random.Random(f"{seed} deck {number // len(deck)}").shuffle(deck)
    return deck[number % len(deck)]


def secured(number):
    """Whether the daemons of this point have mutual TLS: every other ten points."""
    return number // 10 % 2 == 1


def _length(kind, rng):
    if kind.startswith("pause_") or kind == "cut_briefly":
        return rng.uniform(0.1, 0.5)
    return rng.uniform(1.5, 1.8)


def make_point(seed, number, kinds=KINDS, attempt=0):
    """attempt: another try of a point whose fault came too late to meet anything."""
    rng = random.Random(f"{seed} point {number} {attempt}")
    kind = kind_of(seed, number, kinds)
    moment = MOMENTS[(number + number // len(MOMENTS)) % len(MOMENTS)]
    if kind == "disk_full_writing":
        moment = "stream"  # what is to be written must lie ahead
    transfers = [_transfer(f"p{seed}.{number}.{attempt}.{i}", rng, i == 0, moment, kind) for i in range(rng.choice((4, 5, 6)))]
    transfers[1].source = transfers[0].target  # both ways
    for side in range(2):
        blocks = list(range(contents.BLOCKS))
        rng.shuffle(blocks)
        for transfer in transfers:
            count = contents.blocks_for(transfer.tokens)
            taken, blocks = blocks[:count], blocks[count:]
            if transfer.source == side:
                transfer.source_blocks = taken
            else:
                transfer.target_blocks = taken
    return Point(seed, number, kind, moment, rng.randint(1, contents.LAYERS - 2),
                 rng.uniform(0, {"hello": 0.02, "stream": 0.04, "commit": 0.006, "refine": 0.08}[moment]), _length(kind, rng), transfers)  # fmt: skip


def _transfer(name, rng, first, moment, kind):
    layerwise = rng.random() < 0.5 if not first else moment != "hello" or rng.random() < 0.5
    pace = rng.uniform(0.03, 0.12) if first else rng.uniform(0, 0.15)
    content = rng.choice(("middle", "long") if first else tuple(contents.TOKENS))
    policies = contents.LAYERWISE_POLICIES if layerwise else contents.WHOLE_POLICIES
    met_refining = first and moment == "refine"
    policy = rng.choice(policies[1:] if met_refining else policies)
    refined = met_refining or policy != "RAW" and rng.random() < 0.4
    cached = refined and rng.random() < 0.4
    return Transfer(
        name=name, source=rng.randint(0, 1), pull=rng.random() < 0.5, layerwise=layerwise,
        policy=policy, refined=refined, cached=cached, content=content,
        deadline_ms=rng.randint(6000, 8000) if kind in HARMLESS else rng.randint(3000, 6000),
        pauses_s=[rng.uniform(0.5, 1.5) * pace for _ in range(contents.LAYERS)],
        delays_s=(rng.uniform(0, 0.05), rng.uniform(0, 0.05)),
    )  # fmt: skip
