"""What Client and aio.Client do alike: the messages of their calls, and what an event means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from spectrumkv.errors import TransferFailed
from spectrumkv.groups import block_runs
from spectrumkv.v1 import policy_pb2, report_pb2, schema_pb2, worker_service_pb2

# Block ids in token order: of group 0, or of each group.
Blocks = Sequence[int] | Mapping[int, Sequence[int]]
# Which part of a transfer, and of how many.
Part = tuple[int, int]
WHOLE: Part = (0, 1)

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
]


def target_of(address: str) -> str:
    """The gRPC target of a socket's path or of "host:port"."""
    return f"unix:{address}" if address.startswith("/") else address


def blocks_of(blocks: Blocks) -> list[schema_pb2.GroupBlocks]:
    by_group = blocks if isinstance(blocks, Mapping) else {0: blocks}
    return [block_runs(ids, group) for group, ids in by_group.items()]


def part_of(part: Part) -> policy_pb2.Part | None:
    return None if part == WHOLE else policy_pb2.Part(index=part[0], count=part[1])


def mode_of(direct: bool) -> worker_service_pb2.RefineMode:
    return worker_service_pb2.REFINE_MODE_DIRECT if direct else worker_service_pb2.REFINE_MODE_UNSPECIFIED


def key_of(transfer_id: str, role: str) -> worker_service_pb2.TransferKey:
    value = report_pb2.TransferRole.Value(f"TRANSFER_ROLE_{role or 'UNSPECIFIED'}")
    return worker_service_pb2.TransferKey(transfer_id=transfer_id, role=value)


def plan(
    token_count: int, blocks: Blocks, policy: policy_pb2.Policy | None, peer: str, link_bytes_per_second: float | None
) -> worker_service_pb2.PlanRequest:
    return worker_service_pb2.PlanRequest(
        token_count=token_count, blocks=blocks_of(blocks), policy=policy, peer=peer,
        link_bytes_per_second=link_bytes_per_second,
    )  # fmt: skip


def send(
    transfer_id: str, peer: str, token_count: int, blocks: Blocks, policy: policy_pb2.Policy | None, token: bytes,
    deadline_ms: int, layerwise: bool, written_event: bytes, part: Part,
) -> worker_service_pb2.SendRequest:  # fmt: skip
    return worker_service_pb2.SendRequest(
        transfer_id=transfer_id, transfer_token=token, peer=peer, token_count=token_count, blocks=blocks_of(blocks),
        policy=policy, deadline_ms=deadline_ms, layerwise=layerwise, written_event=written_event,
        part=part_of(part),
    )  # fmt: skip


def publish(
    transfer_id: str, token_count: int, blocks: Blocks, policy: policy_pb2.Policy | None, token: bytes,
    deadline_ms: int, layerwise: bool, written_event: bytes, part: Part,
) -> worker_service_pb2.PublishRequest:  # fmt: skip
    return worker_service_pb2.PublishRequest(
        transfer_id=transfer_id, transfer_token=token, token_count=token_count, blocks=blocks_of(blocks),
        policy=policy, deadline_ms=deadline_ms, layerwise=layerwise, written_event=written_event,
        part=part_of(part),
    )  # fmt: skip


def advance(
    transfer_id: str, layers: int, tokens: int, scores: Sequence[float] | None,
    queries: policy_pb2.RecentQueries | None, written_event: bytes, part_index: int,
) -> worker_service_pb2.AdvanceRequest:  # fmt: skip
    request = worker_service_pb2.AdvanceRequest(
        transfer_id=transfer_id, layers=layers, tokens=tokens, queries=queries, written_event=written_event,
        part_index=part_index,
    )  # fmt: skip
    if scores is not None:
        request.scores.extend(float(score) for score in scores)
    return request


def expect(
    transfer_id: str, token_count: int, blocks: Blocks, token: bytes, deadline_ms: int, accept_dropped: bool,
    exact_conversion: bool, part: Part, refinable: bool = False, refine_direct: bool = False,
) -> worker_service_pb2.ExpectRequest:  # fmt: skip
    return worker_service_pb2.ExpectRequest(
        transfer_id=transfer_id, transfer_token=token, token_count=token_count, blocks=blocks_of(blocks),
        deadline_ms=deadline_ms, accept_dropped=accept_dropped, exact_conversion=exact_conversion,
        part=part_of(part), refinable=refinable, refine_mode=mode_of(refine_direct),
    )  # fmt: skip


def fetch(
    transfer_id: str, peer: str, token_count: int, blocks: Blocks, token: bytes, deadline_ms: int,
    accept_dropped: bool, exact_conversion: bool, part: Part, refinable: bool = False, refine_direct: bool = False,
) -> worker_service_pb2.FetchRequest:  # fmt: skip
    return worker_service_pb2.FetchRequest(
        transfer_id=transfer_id, transfer_token=token, peer=peer, token_count=token_count, blocks=blocks_of(blocks),
        deadline_ms=deadline_ms, accept_dropped=accept_dropped, exact_conversion=exact_conversion,
        part=part_of(part), refinable=refinable, refine_mode=mode_of(refine_direct),
    )  # fmt: skip


def refine(
    transfer_id: str, refine_id: str, peer: str, tokens: Sequence[tuple[int, int]], layers: Sequence[int],
    scores: Sequence[float] | None, tier: str, budget: float | None, direct: bool, deadline_ms: int,
) -> worker_service_pb2.RefineRequest:  # fmt: skip
    selection = worker_service_pb2.RefineSelection(
        tokens=[schema_pb2.TokenRun(first=first, count=count) for first, count in tokens],
        layers=layers, scores=scores,
    )  # fmt: skip
    return worker_service_pb2.RefineRequest(
        transfer_id=transfer_id, refine_id=refine_id, peer=peer, selection=selection,
        tier=policy_pb2.Tier.Value(f"TIER_{tier}"), budget=budget, deadline_ms=deadline_ms,
        mode=mode_of(direct),
    )  # fmt: skip


def end_of(
    event: worker_service_pb2.WatchTransferResponse, on_layers_ready: Callable[[int], None] | None,
    on_progress: Callable[[worker_service_pb2.Progress], None] | None,
) -> report_pb2.TransferReport | None:  # fmt: skip
    """Passes the event on. The report where it is the last one of a committed transfer; raises TransferFailed for
    another last one."""
    if event.HasField("layers_ready") and on_layers_ready is not None:
        on_layers_ready(event.layers_ready.layers)
    if event.HasField("progress") and on_progress is not None:
        on_progress(event.progress)
    if not event.HasField("terminal"):
        return None
    if event.terminal.state != report_pb2.TRANSFER_STATE_COMMITTED:
        raise TransferFailed(event.terminal)
    return event.terminal
