"""Importance from recent queries on a real model's KV, through real daemons. SPECTRUMKVD names the program to run."""

import json
import os
import pathlib
import sys

import numpy as np
import pytest

import spectrumkv as skv
from spectrumkv.v1 import policy_pb2

ROOT = pathlib.Path(__file__).resolve().parents[3]
DATA = ROOT / "tests" / "data" / "smollm2_135m_wikitext2_256"
PROGRAM = os.environ.get("SPECTRUMKVD", "")

pytestmark = pytest.mark.skipif(not PROGRAM, reason="SKIPPED: SPECTRUMKVD is not set")
sys.path.insert(0, str(ROOT / "client" / "examples" / "python" / "demo"))
from daemons import Pair  # noqa: E402

META = json.loads((DATA / "meta.json").read_text())
LAYERS, HEADS, QUERY_HEADS, DIM, TOKENS = (META[key] for key in ("layers", "kv_heads", "query_heads", "head_dim", "tokens"))
POSITIONS = list(range(TOKENS - 64, TOKENS))
BLOCKS = list(range(TOKENS // 16))


def attention(queries, kv, positions, window=0, cap=0.0):
    """[layers, tokens]: received, divided by the queries that could see the token; of layers in `queries` alone."""
    t, p = np.arange(kv.shape[2])[None], np.array(positions)[:, None]
    seen = (t <= p) & ((t > p - window) if window else True)
    scores = {}
    for layer, mine in queries.items():
        received = np.zeros(kv.shape[2])
        for head in range(mine.shape[1]):
            keys = kv[layer, 0, :, head * HEADS // mine.shape[1]].astype(np.float64)
            logits = mine[:, head].astype(np.float64) @ keys.T / np.sqrt(DIM)
            if cap:
                logits = cap * np.tanh(logits / cap)
            logits = np.where(seen, logits, -np.inf)
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            received += (weights / weights.sum(axis=1, keepdims=True)).sum(axis=0)
        scores[layer] = received / np.maximum(seen.sum(axis=0), 1) / mine.shape[1]
    mean = np.mean(list(scores.values()), axis=0)
    return np.stack([scores.get(layer, mean) for layer in range(kv.shape[0])]).astype(np.float32)


class Mover:
    def __init__(self, pair, kv):
        self.peer = pair.decode.addresses.peer
        self.clients = [skv.Client(side.addresses.worker_socket, timeout_s=60) for side in (pair.prefill, pair.decode)]
        group = skv.Group(layers=range(LAYERS), heads=HEADS, head_dim=DIM, block_tokens=16, num_blocks=len(BLOCKS))
        self.pools = [client.shared_memory_pool([group], model="SmolLM2-135M") for client in self.clients]
        self.pools[0].write_tokens(kv, BLOCKS)

    def move(self, name, advances=(), **policy):
        """What landed, and the sender's report."""
        self.pools[1].segment.memory[:] = 0xA5
        self.clients[1].expect(name, pool=self.pools[1], token_count=TOKENS, blocks=BLOCKS)
        self.clients[0].send(name, peer=self.peer, pool=self.pools[0], token_count=TOKENS, blocks=BLOCKS,
                             policy=skv.policy(**policy), layerwise=bool(advances))  # fmt: skip
        for advance in advances:
            self.clients[0].advance(name, **advance)
        self.clients[1].wait(name, timeout_s=60)
        return self.pools[1].read_tokens(TOKENS, BLOCKS), self.clients[0].wait(name, role="SENDER", timeout_s=60)

    def close(self):
        for pool in self.pools:
            pool.close()
        for client in self.clients:
            client.close()


@pytest.fixture(scope="module")
def kv():
    return np.fromfile(DATA / "kv.f16", np.float16).reshape(LAYERS, 2, TOKENS, HEADS, DIM)


@pytest.fixture(scope="module")
def queries():
    return np.fromfile(DATA / "queries_recent64.f16", np.float16).reshape(LAYERS, 64, QUERY_HEADS, DIM)


@pytest.fixture(scope="module")
def mover(kv):
    with Pair(pathlib.Path(PROGRAM), keep=False) as pair:
        moving = Mover(pair, kv)
        yield moving
        moving.close()


def same_cells(a, b):
    """Share of (layer, plane, token) that arrived with the same bytes."""
    return float((a.view(np.uint16) == b.view(np.uint16)).all(axis=(3, 4)).mean())


def test_the_reference_is_what_the_model_did(kv, queries):
    """The captured attention, computed in the model's forward pass, is what the captured queries pay."""
    captured = np.fromfile(DATA / "attention_recent64.f32", np.float32).reshape(LAYERS, TOKENS)
    share = np.minimum(TOKENS - np.arange(TOKENS), 64) / 64
    computed = attention(dict(enumerate(queries)), kv, POSITIONS) * share
    np.testing.assert_allclose(computed, captured, rtol=0.02, atol=2e-6)


CASES = {
    "all": {},
    "float32": {"dtype": np.float32},
    "some layers": {"layers": (0, 7, 29)},
    "few queries": {"last": 8},
    "window": {"window": 48},
    "soft cap": {"cap": 20.0},
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_travel_as_by_the_scores_of_numpy(mover, kv, queries, name):
    case = CASES[name]
    last = case.get("last", 64)
    mine = {layer: queries[layer, -last:] for layer in case.get("layers", range(LAYERS))}
    window, cap = case.get("window", 0), case.get("cap", 0.0)
    asked = skv.recent_queries({layer: q.astype(case.get("dtype", np.float16)) for layer, q in mine.items()},
                               POSITIONS[-last:], window_tokens=window, logit_soft_cap=cap)  # fmt: skip
    options = {"budget": 0.25, "allocator": "OPTIMAL"}
    landed, report = mover.move(f"q {name}".replace(" ", "-"), queries=asked, **options)
    assert report.importance == policy_pb2.IMPORTANCE_SOURCE_RECENT_QUERIES
    by_scores, _ = mover.move(f"s {name}".replace(" ", "-"), scores=attention(mine, kv, POSITIONS[-last:], window, cap),
                              **options)  # fmt: skip
    nothing, _ = mover.move(f"n {name}".replace(" ", "-"), importance="NONE", **options)
    agree, other = same_cells(landed, by_scores), same_cells(landed, nothing)
    print(f"{name}: {agree:.4f} of the cells as by numpy's scores, {other:.4f} as without importance")
    # Weights are rounded to a 256th of a doubling: a few cells lie on a border.
    assert agree > 0.995 and other < 0.9


def test_layer_by_layer(mover, queries):
    advances = [{"layers": layer + 1, "tokens": TOKENS, "queries": skv.recent_queries({layer: queries[layer]}, POSITIONS)}
                for layer in range(LAYERS)]  # fmt: skip
    landed, report = mover.move("layers", advances, importance="RECENT_QUERIES", allocator="OPTIMAL", budget=0.25)
    assert report.importance == policy_pb2.IMPORTANCE_SOURCE_RECENT_QUERIES
    assert report.wire_bytes <= 0.25 * report.kv_bytes
    assert np.isfinite(landed.astype(np.float32)).all()


def test_plan_knows_them(mover, queries):
    asked = skv.recent_queries(queries, POSITIONS)
    plan = mover.clients[0].plan(mover.pools[0], TOKENS, BLOCKS, skv.policy(queries=asked, allocator="OPTIMAL", budget=0.25))
    _, report = mover.move("planned", queries=asked, allocator="OPTIMAL", budget=0.25)
    assert plan.wire_bytes == report.wire_bytes
    assert {(c.tier, c.k_tokens, c.v_tokens) for c in plan.tiers} == {(c.tier, c.k_tokens, c.v_tokens) for c in report.tiers}


def test_what_is_refused(mover, queries):
    for spoiled, says in (
        ({"queries": skv.recent_queries(queries[:1, :2], [9, 9])}, "positions"),
        ({"queries": skv.recent_queries({99: queries[0]}, POSITIONS)}, "not a layer"),
        ({"queries": skv.recent_queries({0: queries[0][:, :5]}, POSITIONS)}, "query_heads"),
        ({"queries": skv.recent_queries({0: queries[0][:, :, :32]}, POSITIONS)}, "bytes"),
        ({"queries": skv.recent_queries({0: queries[0]}, POSITIONS), "importance": "POSITION"}, "POSITION"),
        ({"importance": "RECENT_QUERIES"}, "layers is empty"),
    ):
        with pytest.raises(skv.SpectrumKVError) as refused:
            mover.clients[0].plan(mover.pools[0], TOKENS, BLOCKS, skv.policy(**spoiled))
        assert refused.value.reason == "INVALID_QUERIES" and says in str(refused.value)
    with pytest.raises(ValueError, match="float64"):
        skv.recent_queries({0: np.zeros((1, 3, 8))}, [1])
    with pytest.raises(ValueError, match="shape"):
        skv.recent_queries({0: np.zeros((2, 3, 8), np.float32)}, [1])
