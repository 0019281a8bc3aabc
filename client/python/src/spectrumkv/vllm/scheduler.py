"""The connector beside vLLM's scheduler: which requests have KV to send or to receive, and into which blocks.

Imports nothing of vLLM: requests, scheduler outputs and blocks are taken as they come. Not thread-safe; vLLM's scheduler is one
thread.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from spectrumkv import requests
from spectrumkv.client import Client
from spectrumkv.errors import SpectrumKVError
from spectrumkv.pools import Pool
from spectrumkv.v1 import policy_pb2, schema_pb2
from spectrumkv.vllm.settings import Handover, Settings, policy_of, retaining
from spectrumkv.vllm.settle import refused
from spectrumkv.vllm.steps import LoadStart, SendStart, Step, part_name

_log = logging.getLogger("spectrumkv.vllm")
# The scheduler, and with it every request, waits for these calls.
CALL_S = 2.0
# For how long a daemon that has not answered one of them is not called from here: each waiting request would cost as much again.
_SILENT_S = 10.0


@dataclass
class _Prompt:
    """A request whose KV is to be sent. blocks: as far as they are allocated."""

    handover: Handover
    policy: policy_pb2.Policy | None
    token_count: int
    blocks: list[int] = field(default_factory=list)
    started: bool = False
    lost: bool = False  # preempted after the start: the transfer is over, the receiver computes for itself


@dataclass
class _Wanted:
    """A request whose KV comes from elsewhere. tried: it is not asked for a second time. refinable: it has come, and may get
    better until the request loses its blocks. failed: one of several workers has not got its part.
    """

    handover: Handover
    request: Any
    blocks: Sequence[int] = ()
    tried: bool = False
    loading: bool = False
    refinable: bool = False
    failed: bool = False


class SchedulerSide:
    """client: of the daemon, with a short timeout, for it is called between two steps. block_tokens, num_blocks: of vLLM's
    cache."""

    def __init__(
        self, settings: Settings, client: Client, block_tokens: int, now: Callable[[], float] = time.time, *, num_blocks: int = 0
    ) -> None:
        self._settings, self._client, self._block_tokens, self._now = settings, client, block_tokens, now
        self._retained_most = int(settings.retain_share * num_blocks)
        self._retained: dict[str, int] = {}  # blocks that are kept for refinement, or will be
        self._pools: list[schema_pb2.PoolRef] = []
        self._prompts: dict[str, _Prompt] = {}
        self._wanted: dict[str, _Wanted] = {}
        self._asked: list[Any] = []  # requests that were told of remote KV and got no blocks yet
        self._first_tokens: dict[str, _Wanted] = {}
        self._next = Step()
        self._silent_until = 0.0  # of time.monotonic
        # Reports of first tokens, which nothing waits for.
        self._reports = ThreadPoolExecutor(1, "spectrumkv-report")
        self.counts: Counter[str] = Counter()

    def set_pools(self, pools: Sequence[schema_pb2.PoolRef]) -> None:
        """The pools of the workers, by rank."""
        self._pools = list(pools)

    # ---- a request comes -------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        try:
            handover = Handover.of(request.kv_transfer_params)
            if handover is None:
                return
            policy = policy_of(self._settings.policy, handover.policy) if handover.sends else None
        except (ValueError, TypeError, OverflowError) as error:
            self._count("requests_refused", request.request_id, f"its KV is not transferred: {error}")
            return
        if handover.sends:
            self._prompts[request.request_id] = _Prompt(handover, policy, request.num_prompt_tokens)
        else:
            self._wanted[request.request_id] = _Wanted(handover, request)
            _skip_prefix_cache(request, True)

    def num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        wanted = self._wanted.get(request.request_id)
        if wanted is None or wanted.tried:
            return 0, False
        # vLLM drops remote KV of a request that skips its prefix cache; it has looked there by now.
        _skip_prefix_cache(request, False)
        if computed > 0:
            # The sender sends all of the prompt, and blocks that other requests share must not be written.
            wanted.tried = True
            self._count("loads_refused", request.request_id, f"{computed} tokens are in the prefix cache: the rest is computed")
            return 0, False
        self._asked.append(request)
        return request.num_prompt_tokens, True

    def update_after_alloc(self, request: Any, blocks: Sequence[int], external_tokens: int) -> None:
        wanted = self._wanted.get(request.request_id)
        if external_tokens == 0 or wanted is None or wanted.tried:
            return
        wanted.tried = wanted.loading = True
        count = math.ceil(external_tokens / self._block_tokens)
        handover = wanted.handover
        load = LoadStart(
            request.request_id, handover.transfer_id, handover.token, "" if handover.pushed else handover.prefill_peer,
            list(blocks[:count]), external_tokens,
        )  # fmt: skip
        wanted.blocks = load.blocks
        self._open(load)
        if not load.failed:  # otherwise a transfer of that id is not this request's, and nothing is to be reported of it
            self._first_tokens[request.request_id] = wanted
        self._next.loads.append(load)

    def _open(self, load: LoadStart) -> None:
        """Reserves the blocks now, before the step's computation: the sender may be waiting. What a worker can make good (a
        pool that the daemon has forgotten, a daemon that restarts, stands still or has no room yet) is left to it."""
        if time.monotonic() < self._silent_until:
            return
        worker = self._client.worker
        for rank, pool in enumerate(self._pools):
            name = part_name(load.transfer_id, rank, len(self._pools))
            tail = (load.token_count, load.blocks, load.token, self._settings.deadline_ms, False, False, requests.WHOLE,
                    bool(self._settings.refine))  # fmt: skip
            method: Any
            request: Any
            if load.peer:
                method, request = worker.Fetch, requests.fetch(name, load.peer, *tail)
            else:
                method, request = worker.Expect, requests.expect(name, *tail)
            request.pool.CopyFrom(pool)
            try:
                self._client.call(method, request)
                load.opened.append(True)
            except SpectrumKVError as error:
                load.opened.append(False)
                if not refused(error):
                    load.unanswered.append(rank)
                    if error.code == "DEADLINE_EXCEEDED":
                        self._silent_until = time.monotonic() + _SILENT_S
                        return
                elif not Pool.forgotten(error) and error.retry_after_ms is None and not self._just_refined(error):
                    load.failed = str(error)
                    self._count("loads_refused", load.request_id, f"the daemon does not take it: {error}")
                    return

    def _just_refined(self, error: SpectrumKVError) -> bool:
        """The worker may still apply a refinement to blocks that were taken away in this step: it asks when that has ended."""
        return bool(self._settings.refine) and error.reason == "BLOCKS_IN_USE"

    # ---- a step ----------------------------------------------------------------------------------------------------

    def build_step(self, output: Any) -> Step:
        """What the workers are to do in this step."""
        step, self._next = self._next, Step()
        step.idle = output.total_num_scheduled_tokens == 0
        for request in self._asked:
            wanted = self._wanted.get(request.request_id)
            if wanted is not None and not wanted.tried:
                _skip_prefix_cache(request, True)  # it got no blocks, and is asked again
        self._asked.clear()
        for request_id in output.preempted_req_ids or ():
            self._preempted(request_id, step)
        for new in output.scheduled_new_reqs:
            self._scheduled(new.req_id, new.block_ids[0], True, new.num_computed_tokens, output, step)
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[i]
            afresh = request_id in cached.resumed_req_ids
            self._scheduled(request_id, blocks[0] if blocks else [], afresh, cached.num_computed_tokens[i], output, step)
        return step

    def _scheduled(self, request_id: str, blocks: Sequence[int], afresh: bool, computed: int, output: Any, step: Step) -> None:
        prompt = self._prompts.get(request_id)
        if prompt is None or prompt.started:
            return
        prompt.blocks = [*([] if afresh else prompt.blocks), *blocks]
        if computed + output.num_scheduled_tokens[request_id] < prompt.token_count:
            return  # more of the prompt is to come, and more blocks
        prompt.started = True
        handover = prompt.handover
        # A prefix hit may be of blocks that another request of this step computes: vLLM caches them when it allocates them.
        written = 0 if afresh else computed
        used = prompt.blocks[: math.ceil(prompt.token_count / self._block_tokens)]
        policy = self._retaining(request_id, prompt, len(used))
        step.sends.append(
            SendStart(
                request_id, handover.transfer_id, handover.token, handover.decode_peer if handover.pushed else "", used,
                prompt.token_count, written, None if policy is None else policy.SerializeToString(),
            )
        )  # fmt: skip

    def _retaining(self, request_id: str, prompt: _Prompt, blocks: int) -> policy_pb2.Policy | None:
        """The policy of a send, with its source kept where that is wanted, makes a difference and has room."""
        policy, tier = prompt.policy, prompt.handover.refine
        tier = self._settings.refine if tier is None else tier
        if not self._settings.refine or not tier or (policy is not None and policy.allocator == policy_pb2.ALLOCATOR_RAW):
            return policy
        if self._settings.retain_in == "blocks":
            if sum(self._retained.values()) + blocks > self._retained_most:
                self.counts["retentions_refused"] += 1
                return policy
            self._retained[request_id] = blocks
        return retaining(policy, self._settings, tier)

    def _preempted(self, request_id: str, step: Step) -> None:
        prompt = self._prompts.get(request_id)
        if prompt is not None and prompt.started and not prompt.lost:
            prompt.lost = True
            self._retained.pop(request_id, None)
            step.preempted.append(request_id)
            self._count("sends_preempted", request_id, "its blocks are taken away while they are sent")
        wanted = self._wanted.get(request_id)
        if wanted is not None and wanted.refinable:
            wanted.refinable = False
            step.ended.append(request_id)

    # ---- what came of it -------------------------------------------------------------------------------------------

    def finished_receiving(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            wanted = self._wanted.get(request_id)
            if wanted is not None:
                wanted.loading = False
                wanted.refinable = bool(self._settings.refine) and not wanted.failed
                if wanted.failed and self._settings.refine:
                    # vLLM may give its blocks to others with the next step, and another worker's part may have come.
                    self._next.ended.append(request_id)

    def failed_blocks(self, blocks: Set[int]) -> None:
        """Before finished_receiving of a request that these are of."""
        for wanted in self._wanted.values():
            if wanted.loading and not blocks.isdisjoint(wanted.blocks):
                wanted.failed = True

    def finished_sending(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._retained.pop(request_id, None)

    def report_first_tokens(self) -> None:
        """Tells the daemon the time to first token of those that have theirs now."""
        for request_id in [name for name, wanted in self._first_tokens.items() if wanted.request.num_output_tokens > 0]:
            self._report_first_token(self._first_tokens.pop(request_id))

    def _report_first_token(self, wanted: _Wanted) -> None:
        seconds = self._now() - (wanted.handover.arrived_s or wanted.request.arrival_time)
        name = part_name(wanted.handover.transfer_id, 0, len(self._pools))
        self._reports.submit(self._report, wanted.request.request_id, name, max(seconds, 0.0))

    def _report(self, request_id: str, name: str, seconds: float) -> None:
        try:
            self._client.report_first_token(name, seconds, role="RECEIVER")
        except SpectrumKVError as error:
            self._count("reports_failed", request_id, f"its time to first token is not reported: {error}")

    def request_finished(self, request: Any, aborted: bool) -> tuple[bool, dict[str, Any] | None]:
        """Whether its blocks must be kept until the workers say that they were sent, or are refined no more, and what the answer
        tells."""
        request_id = request.request_id
        first = self._first_tokens.pop(request_id, None)
        if first is not None and request.num_output_tokens > 0:  # its first token was its last
            self._report_first_token(first)
        wanted = self._wanted.pop(request_id, None)
        if wanted is not None and wanted.loading:
            self._next.cancels.append(request_id)  # vLLM keeps the blocks until the workers report the end
        if wanted is not None and wanted.refinable:
            self._next.ended.append(request_id)
            self._next.released.append(request_id)
            return True, None
        prompt = self._prompts.pop(request_id, None)
        if prompt is None or not prompt.started or prompt.lost:
            return False, None
        if aborted:
            self._next.cancels.append(request_id)
        self._next.released.append(request_id)
        return True, prompt.handover.answer(self._settings.peer_address)

    def take_counts(self) -> Mapping[str, int]:
        """What was counted since the last call."""
        counts, self.counts = self.counts, Counter()
        return counts

    def close(self) -> None:
        self._reports.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    def _count(self, what: str, request_id: str, why: str) -> None:
        self.counts[what] += 1
        _log.warning("request %s: %s", request_id, why)


def _skip_prefix_cache(request: Any, skip: bool) -> None:
    if hasattr(request, "skip_reading_prefix_cache"):
        request.skip_reading_prefix_cache = skip
