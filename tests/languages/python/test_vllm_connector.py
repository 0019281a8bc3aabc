"""The class that vLLM loads, over modules that stand in for vLLM's: what it has is closed whatever fails."""

import sys
import types

import pytest


class Anything:
    """A base class, whatever vLLM has in it."""


@pytest.fixture
def connector_class(monkeypatch):
    base = "vllm.distributed.kv_transfer.kv_connector.v1"
    names = {
        f"{base}.base": ["KVConnectorBase_V1", "KVConnectorHandshakeMetadata", "KVConnectorMetadata", "KVConnectorRole",
                         "KVConnectorWorkerMetadata"],
        f"{base}.metrics": ["KVConnectorPromMetrics", "KVConnectorStats"],
        "prometheus_client": [],
    }  # fmt: skip
    parts = base.split(".")
    for module in [*(".".join(parts[:n]) for n in range(1, len(parts) + 1)), *names]:
        made = types.ModuleType(module)
        made.__dict__.update({name: type(name, (Anything,), {}) for name in names.get(module, [])})
        monkeypatch.setitem(sys.modules, module, made)
    for ours in ("spectrumkv.vllm.connector", "spectrumkv.vllm.stats"):
        monkeypatch.delitem(sys.modules, ours, raising=False)
    from spectrumkv.vllm import SpectrumKVConnector

    yield SpectrumKVConnector
    for ours in ("spectrumkv.vllm.connector", "spectrumkv.vllm.stats"):
        sys.modules.pop(ours, None)


class Side:
    def __init__(self, fails):
        self.fails, self.closed = fails, 0

    def close(self):
        self.closed += 1
        if self.fails:
            raise TimeoutError("it does not end")


@pytest.mark.parametrize("failing", ["_scheduler", "_worker", "_memory"])
def test_shutdown_closes_what_there_is(connector_class, failing):
    made = connector_class.__new__(connector_class)
    sides = {name: Side(name == failing) for name in ("_scheduler", "_worker", "_memory")}
    made.__dict__.update(sides)
    with pytest.raises(TimeoutError):
        made.shutdown()
    assert all(side.closed == 1 for side in sides.values())


@pytest.mark.parametrize("there", ["_scheduler", "_memory"])
def test_shutdown_of_one_that_did_not_come_far(connector_class, there):
    """A worker whose cache could not be registered has shared memory all the same."""
    made = connector_class.__new__(connector_class)
    side = Side(False)
    made.__dict__.update(dict.fromkeys(("_scheduler", "_worker", "_memory")), **{there: side})
    made.shutdown()
    assert side.closed == 1


@pytest.mark.parametrize("failing", ["pool", "courier", ""])
def test_the_courier_ends_also_where_the_pool_does_not(failing):
    from spectrumkv.vllm.worker import WorkerSide

    closed = []

    def close(name):
        closed.append(name)
        if name == failing:
            raise RuntimeError("no")

    pool = types.SimpleNamespace(close=lambda _ms: close("pool"))
    worker = WorkerSide(pool, types.SimpleNamespace(close=lambda: close("courier")), {})
    if failing:
        with pytest.raises(RuntimeError):
            worker.close()
    else:
        worker.close()
    assert closed == ["pool", "courier"]
