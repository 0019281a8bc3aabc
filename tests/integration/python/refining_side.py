"""Engines, as in engine_side.py, that have refinement switched on, and requests whose KV has arrived coarse."""

import contextlib

from ends import until
from engine_side import BLOCK, BLOCKS, LAYERS, EngineSide
from test_vllm import push, receiving

import spectrumkv as skv
from spectrumkv.v1 import report_pb2
from spectrumkv.vllm.scheduler import SchedulerSide
from spectrumkv.vllm.worker import WorkerSide

TOKENS = 64
HERE, THERE = list(range(16)), list(range(20, 36))
COARSE = {"allocator": "UNIFORM", "uniform_tier": "Q4", "budget": 0.6}
COMMITTED = report_pb2.TRANSFER_STATE_COMMITTED


class RefiningSide(EngineSide):
    """An engine that has refinement switched on. counts: what its connector has counted."""

    def __init__(self, daemon, **extra):
        super().__init__(daemon, **{"policy": COARSE, "refine": "RAW", "retain_seconds": 60.0, **extra})
        self.worker = WorkerSide(
            self.pool, self.courier, {f"model.layers.{i}.attn": i for i in range(LAYERS)},
            refine_step_bytes=self.settings.refine_step_bytes,
        )  # fmt: skip
        self.scheduler.close()
        self.scheduler = SchedulerSide(self.settings, skv.Client(daemon.worker, timeout_s=5), BLOCK, num_blocks=BLOCKS)
        self.scheduler.set_pools([self.pool.ref])
        self.daemon, self.counts = daemon, dict.fromkeys(("refined_bytes", "refinements_complete", "refinements_failed"), 0)

    def finish_step(self):
        super().finish_step()
        self.scheduler.finished_sending(self.sent)
        for counted in (self.worker.take_counts(), self.scheduler.take_counts()):
            for event, number in counted.items():
                self.counts[event] = self.counts.get(event, 0) + number

    def report(self, name):
        with self.daemon.client() as client:
            try:
                return client.get_transfer(name)
            except skv.NotFound:
                return None

    def has_staged(self, name, committed=True):
        """Cells of the first round wait for a step; committed: all of them."""
        report = self.report(f"{name}.refine-1")
        return report is not None and report.staged_bytes > 0 and (report.state == COMMITTED or not committed)


@contextlib.contextmanager
def refining(daemon, **extra):
    made = RefiningSide(daemon, **extra)
    try:
        yield made
    finally:
        made.close()


class Pair:
    """A request whose KV has arrived coarse, with the source that it came from."""

    def __init__(self, p, d, name, kv, here=HERE, there=THERE, **policy):
        self.p, self.d, self.name, self.kv, self.there = p, d, name, kv, there
        asked = push(name, d.daemon) | ({"policy": policy} if policy else {})
        self.request = receiving(d, name, push(name, d.daemon), there, TOKENS)
        self.sender = p.add(name, TOKENS, do_remote_decode=True, **asked)
        p.step(new=[(self.sender, here, 0, TOKENS)], write=p.writer(kv, here))
        d.until(lambda: name in d.received)
        assert not d.failed

    def words(self):
        return self.d.read(self.there, TOKENS)

    def exact(self):
        return (self.words() == self.kv).all()

    def end(self):
        """Both requests end, and all blocks are given back."""
        for side, request in ((self.d, self.request), (self.p, self.sender)):
            if side.scheduler.request_finished(request, aborted=False)[0]:
                side.until(lambda side=side: self.name in side.sent)


def wait_staged(d, name, committed=True):
    until(lambda: d.has_staged(name, committed) and d.courier.refinements.ready)
