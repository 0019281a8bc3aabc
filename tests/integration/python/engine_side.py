"""One worker of an inference engine as the vLLM connector sees it: the scheduler's and the worker's side over a real daemon, and a
hand that plays vLLM's scheduler step by step. What vLLM itself does is in tests/engine."""

import pickle
import time
from types import SimpleNamespace

import numpy as np

import spectrumkv as skv
from spectrumkv.vllm.courier import Courier
from spectrumkv.vllm.scheduler import CALL_S, SchedulerSide
from spectrumkv.vllm.settings import Settings
from spectrumkv.vllm.worker import WorkerSide

LAYERS, HEADS, DIM, BLOCK, BLOCKS = 5, 2, 16, 4, 64
RAW = {"allocator": "RAW"}
_END_S = 30.0


class Request:
    """What the connector reads of vLLM's Request."""

    def __init__(self, name, tokens, params):
        self.request_id, self.num_prompt_tokens, self.kv_transfer_params = name, tokens, params
        self.arrival_time, self.num_output_tokens = time.time(), 0
        self.skip_reading_prefix_cache = False


class EngineSide:
    def __init__(self, daemon, block=BLOCK, dtype="float32", heads=HEADS, dim=DIM, **extra):
        self.block = block
        self.settings = Settings.of({"daemon": daemon.worker, "peer_address": daemon.peer, "policy": RAW, **extra})
        self.courier = Courier(self.settings)
        group = skv.Group(range(LAYERS), heads=heads, head_dim=dim, block_tokens=block, num_blocks=BLOCKS, dtype=dtype)
        self.pool = self.courier.client.sync.shared_memory_pool([group], model="m")
        assert self.pool.wait_held()
        places = {f"model.layers.{i}.attn": i for i in range(LAYERS)}
        self.worker = WorkerSide(self.pool, self.courier, places)
        self.scheduler = SchedulerSide(self.settings, skv.Client(daemon.worker, timeout_s=CALL_S), block)
        self.scheduler.set_pools([self.pool.ref])
        self.kv = self.pool.kv()
        self.kv[:] = np.nan
        self.sent, self.received, self.failed = set(), set(), set()

    def add(self, name, tokens, **params):
        request = Request(name, tokens, params or None)
        self.scheduler.on_new_request(request)
        return request

    def step(self, new=(), more=(), resumed=(), preempted=(), write=None, layers=LAYERS):
        """One step. new: (request, blocks, tokens computed before, tokens of this step); more: the same of requests that were
        scheduled before, with the blocks that came. write(layer): writes the step's KV. layers: how many are computed, where
        the step is to stop in the middle (finish_step goes on)."""
        chunks = {request.request_id: scheduled for request, _, _, scheduled in [*new, *more]}
        output = SimpleNamespace(
            total_num_scheduled_tokens=sum(chunks.values()), num_scheduled_tokens=chunks, preempted_req_ids=set(preempted),
            scheduled_new_reqs=[
                SimpleNamespace(req_id=request.request_id, block_ids=(list(blocks),), num_computed_tokens=computed)
                for request, blocks, computed, _ in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[request.request_id for request, *_ in more], resumed_req_ids=set(resumed),
                new_block_ids=[(list(blocks),) if blocks else None for _, blocks, *_ in more],
                num_computed_tokens=[computed for _, _, computed, _ in more],
            ),
        )  # fmt: skip
        step = pickle.loads(pickle.dumps(self.scheduler.build_step(output)))  # as between two processes
        self.worker.preempt(step)
        self.worker.begin(step)
        for layer in range(layers):
            if write is not None:
                write(layer)
            self.worker.layer_written(f"model.layers.{layer}.attn")
        if layers == LAYERS:
            self.finish_step()
        return step

    def finish_step(self):
        self.worker.step_written()
        sent, received = self.worker.take_ended()
        self.sent |= sent
        self.received |= received
        self.failed |= self.worker.take_failed_blocks()
        self.scheduler.finished_receiving(received)
        self.scheduler.report_first_tokens()

    def allocate(self, request, blocks, computed=0):
        """As the scheduler admits a request: what the connector answers, and the blocks where it wants some."""
        count, later = self.scheduler.num_new_matched_tokens(request, computed)
        if count and not request.skip_reading_prefix_cache:
            self.scheduler.update_after_alloc(request, blocks, count)
        return count, later

    def until(self, what, **options):
        """Steps until `what` is true: a request in sent or received."""
        end = time.monotonic() + _END_S
        while not what():
            assert time.monotonic() < end, (self.sent, self.received)
            self.step(**options)

    def writer(self, values, blocks, first=0, last=None):
        """Writes tokens first..last - 1 of values [layers, planes, tokens, heads, dim], layer by layer."""
        last = values.shape[2] if last is None else last

        def write(layer):
            for token in range(first, last):
                self.kv[layer, :, blocks[token // self.block], token % self.block] = values[layer, :, token]

        return write

    def read(self, blocks, tokens):
        return self.pool.read_tokens(tokens, blocks)

    def close(self):
        self.worker.close()
        self.pool.close()
        self.scheduler.close()


def values(rng, tokens, heads=HEADS, dim=DIM):
    return rng.normal(size=(LAYERS, 2, tokens, heads, dim)).astype(np.float32)
