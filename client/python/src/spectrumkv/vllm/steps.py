"""What the connector in the scheduler tells those in the workers, once a step; plain values, for they may be pickled."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SendStart:
    """A prompt whose last tokens are computed in this step: from now on its blocks are all known.

    peer: the daemon to push to; "": hold them until they are fetched.
    computed: tokens at the front that earlier steps have written. Not what a prefix cache has brought in this step: its blocks may
        be another request's that computes them in this very step.
    policy: a serialized v1.Policy; None: the daemon's default.
    """

    request_id: str
    transfer_id: str
    token: bytes
    peer: str
    blocks: list[int]
    token_count: int
    computed: int
    policy: bytes | None = None


@dataclass
class LoadStart:
    """Blocks that were allocated for KV of another worker.

    peer: the daemon to pull from; "": it is pushed.
    opened: for each rank that it has called for, whether the scheduler's side has reserved them at the daemon already.
    unanswered: the ranks whose call has no answer, and may have been heard all the same.
    failed: why the daemon refuses to reserve them; "": it has, or the worker is to ask.
    """

    request_id: str
    transfer_id: str
    token: bytes
    peer: str
    blocks: list[int]
    token_count: int
    opened: list[bool] = field(default_factory=list)
    unanswered: list[int] = field(default_factory=list)
    failed: str = ""


@dataclass
class Step:
    """cancels: requests whose transfer is not wanted any more. preempted: senders whose blocks are taken away in this step,
    before anything is computed. released: finished requests whose blocks vLLM keeps until we say that they were sent, or are
    refined no more. ended: requests that may be refined and lose their blocks: those that are released, and those that were
    preempted, whose blocks may be others' in this very step. idle: nothing is computed in this step.
    """

    sends: list[SendStart] = field(default_factory=list)
    loads: list[LoadStart] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    idle: bool = False


def part_name(transfer_id: str, rank: int, size: int) -> str:
    """The transfer of one tensor-parallel rank: each has its own heads, in a pool of its own."""
    return transfer_id if size == 1 else f"{transfer_id}.tp{rank}"
