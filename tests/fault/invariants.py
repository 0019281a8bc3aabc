"""What must be true of every point, whatever broke. Each check gives the faults it finds, in words that begin with its name."""

import contents
import numpy as np
import refinements
from actors import MAX_DEADLINE_S, PROGRESS_S
from plan import HARMLESS

# A machine of few cores that is busy: how late a thread of the test, or of a daemon, may notice something.
SLACK_S = 1.0


def _deadline_of(world, record, half):
    """When this half must be over at the latest, by its own deadline."""
    transfer = half.transfer
    worker = world.workers[half.side]
    started = [record.ordered_at[transfer.name, half.role], half.seen_at]
    told = [e for e in worker.events if e.get("name") == transfer.name and e.get("role") in _calls(half.role)]
    started += [event["at"] for event in told if event["event"] == "started"]
    limit_s = transfer.deadline_ms / 1000
    begin = max(started)
    if half.role == "SENDER" and transfer.layerwise:
        # Its deadline counts from when it is written; until then the longest one holds.
        written = [event["at"] for event in told if event.get("layers") == contents.LAYERS]
        return max(written[0], begin) + limit_s if written else begin + MAX_DEADLINE_S
    return begin + limit_s


def _calls(role):
    return ("send", "publish") if role == "SENDER" else ("expect", "fetch")


def last_deadline(world, record):
    return max(_deadline_of(world, record, half) for half in record.halves.values())


def deadline(world, record):
    """DEADLINE: every half is terminal within its deadline plus 1 s; one that was stopped, 1 s after it goes on."""
    for half in record.halves.values():
        if half.state in ("GONE", "NEVER"):
            continue
        limit = _deadline_of(world, record, half)
        if record.point.kind.startswith(("stop_", "pause_")):
            limit = max(limit, record.healed_at)
        if not half.state:
            yield f"DEADLINE: {half} is not terminal"
        elif half.ended_at > limit + 1.0:
            yield f"DEADLINE: {half} ended {half.ended_at - limit:.2f} s after its deadline"


def agreement(world, record):
    """AGREEMENT: sender COMMITTED implies receiver COMMITTED, and the other way but for OUTCOME_UNKNOWN, which no
    receiver says."""
    for transfer in record.point.transfers:
        sender, receiver = record.halves[transfer.name, "SENDER"], record.halves[transfer.name, "RECEIVER"]
        if sender.state == "COMMITTED" and receiver.state not in ("COMMITTED", "GONE"):
            yield f"AGREEMENT: {sender}, but {receiver}"
        if receiver.state == "COMMITTED" and sender.state not in ("COMMITTED", "GONE") and sender.reason != "OUTCOME_UNKNOWN":
            yield f"AGREEMENT: {receiver}, but {sender}"
        if receiver.reason == "OUTCOME_UNKNOWN":
            yield f"AGREEMENT: {receiver}: a receiver knows"


def _silent_for_good(record):
    """Per side how long it may take to hear that the peer is silent, in progress timeouts; 0: it is not silent."""
    point, kind = record.point, record.point.kind
    source, target = point.first.source, point.first.target
    if kind in ("kill_sender_daemon", "stop_sender_daemon"):
        return {target: 1}
    if kind in ("kill_receiver_daemon", "stop_receiver_daemon"):
        return {source: 1}
    if kind == "cut":
        return {source: 1, target: 1}
    if kind.startswith("mute_"):
        muted = source if kind == "mute_sender" else target
        # Who is heard by nobody hears until the other side has given it up.
        return {1 - muted: 1, muted: 2}
    return {}


def silence(world, record):
    """SILENCE: a peer that is silent is noticed within the progress timeout."""
    for side, timeouts in _silent_for_good(record).items():
        limit = record.fired_at + timeouts * PROGRESS_S + SLACK_S
        for half in record.halves.values():
            if half.side != side or not half.joined_at or half.joined_at > record.fired_at or half.state == "GONE":
                continue
            if not half.state or half.ended_at > limit:
                late = f"ended after {half.ended_at - record.fired_at:.2f} s" if half.state else "has not ended"
                yield f"SILENCE: {half} {late}; the peer was silent, the progress timeout is {PROGRESS_S} s"


def survival(world, record):
    """SURVIVAL: what is shorter than any patience, or none of the transfers' business, fails no transfer."""
    if record.point.kind not in HARMLESS:
        return
    for half in record.halves.values():
        if half.state != "COMMITTED":
            yield f"SURVIVAL: {half} after {record.point.kind}, which must fail nothing"


def refined(world, record):
    """REFINED: a refinement ends, within its own deadline plus 1 s, whatever became of the source."""
    for found in record.refinements.values():
        limit = refinements.latest_end(record, found.transfer)
        if not found.state:
            yield f"REFINED: {found} is not terminal"
        elif found.state not in ("GONE", "NEVER") and found.ended_at > limit:
            yield f"REFINED: {found} ended {found.ended_at - limit:.2f} s too late"


def _allowed(world, record, transfer):
    """What each cell of a committed destination may be: as it was sent, or as its source is; that alone where it is said to be
    exact."""
    found = record.refinements.get(transfer.name)
    if found is None:
        return world.expected(transfer)
    source = contents.words(world.seed, transfer.content)
    return [source] if found.exact else [*world.expected(transfer), source]


def _differing(a, b):
    return int((a != b).sum())


def destinations(world, record):
    """CONTENT: what was committed is exactly right, to the last word and the empty tail. LATE: what was reported failed
    is not written any more."""
    for transfer in record.point.transfers:
        cache = world.workers[transfer.target].cache
        sender, receiver = record.halves[transfer.name, "SENDER"], record.halves[transfer.name, "RECEIVER"]
        if receiver.state == "COMMITTED" or (sender.state == "COMMITTED" and receiver.state == "GONE"):
            words, tail = contents.tokens_of(cache, transfer.target_blocks, transfer.tokens)
            expected = _allowed(world, record, transfer)
            if wrong := contents.wrong_words(words, expected):
                yield f"CONTENT: {transfer.name} {transfer.policy}: {wrong} of {words.size} words of a committed transfer"
            if tail.any():
                yield f"CONTENT: {transfer.name}: the tail of the last block is not zero"
        elif receiver.left is not None and (wrong := _differing(cache[:, :, transfer.target_blocks], receiver.left)):
            yield f"LATE: {transfer.name}: {wrong} words were written after {receiver} was told"


def bystanders(world, record):
    """BYSTANDERS: no other block of either pool has changed."""
    for side in range(2):
        mine = {block for t in record.point.transfers if t.target == side for block in t.target_blocks}
        mine |= {block for t in record.point.transfers if t.source == side and (t.layerwise or t.cached) for block in t.source_blocks}
        rest = np.array([block for block in range(contents.BLOCKS) if block not in mine])
        if wrong := _differing(world.workers[side].cache[:, :, rest], record.before[side][:, :, rest]):
            yield f"BYSTANDERS: {wrong} words of blocks of {'AB'[side]} that are in no transfer have changed"


def notes(world, record):
    """FAULT: what the fault itself had to show."""
    for note in record.notes:
        yield f"FAULT: {note}"


CHECKS = (deadline, agreement, silence, survival, refined, destinations, bystanders, notes)


def check(world, record):
    return [fault for one in CHECKS for fault in one(world, record)]


def unhit(kinds, hits):
    """HITS: a fault that is on the list and never met a transfer proves nothing."""
    return [f"HITS: {kind} never met a transfer that was under way" for kind in kinds if not hits.get(kind)]
