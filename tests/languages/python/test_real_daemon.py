"""The client library against real daemons. SPECTRUMKVD names the program to run."""

import gc
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import spectrumkv as skv
from spectrumkv import wire
from spectrumkv.v1 import report_pb2

ROOT = pathlib.Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "client" / "examples" / "python"
PROGRAM = os.environ.get("SPECTRUMKVD", "")

pytestmark = pytest.mark.skipif(not PROGRAM, reason="SKIPPED: SPECTRUMKVD is not set")
sys.path.insert(0, str(EXAMPLES / "demo"))
from daemons import Pair  # noqa: E402

HEADS, DIM, LAYERS, TOKENS = 2, 64, 3, 100


@pytest.fixture(scope="module")
def pair():
    with Pair(pathlib.Path(PROGRAM), keep=False) as running:
        yield running


@pytest.fixture
def prefill(pair):
    with skv.Client(pair.prefill.addresses.worker_socket, timeout_s=20) as client:
        yield client


@pytest.fixture
def decode(pair):
    with skv.Client(pair.decode.addresses.worker_socket, timeout_s=20) as client:
        yield client


def group(**options):
    base = {"layers": range(LAYERS), "heads": HEADS, "head_dim": DIM, "block_tokens": 16, "num_blocks": 20}
    return skv.Group(**{**base, **options})


def random_kv(dtype=np.float16, seed=0):
    return np.random.default_rng(seed).normal(size=(LAYERS, 2, TOKENS, HEADS, DIM)).astype(dtype)


def blocks_for(pool, seed=0):
    spec = pool.groups[0]
    count = -(-TOKENS // spec.block_tokens)
    return [int(b) for b in np.random.default_rng(seed).permutation(spec.num_blocks)[:count]]


def expected(plan, kv, dtype=wire.DType.FLOAT16):
    tiers = [np.array([wire.Tier[skv.tier_name(t)] for t in ts], np.uint8) for ts in (plan.token_tiers_k, plan.token_tiers_v)]
    return wire.expected_words(kv, *tiers, dtype)


LAYOUTS = [
    {"layout": "NHD", "fused": True},
    {"layout": "HND", "block_tokens": 8, "num_blocks": 40},
    {"axes": "BLPTHD", "block_tokens": 1, "num_blocks": 200},
    {"axes": "LPBHDT", "block_tokens": 256, "num_blocks": 2},
]


@pytest.mark.parametrize("options", LAYOUTS, ids=lambda o: o.get("axes") or o["layout"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_any_layout_and_dtype(prefill, decode, pair, options, dtype):
    target_group = group(dtype=dtype, **options)
    with (
        prefill.shared_memory_pool([group(dtype=dtype)], model="m") as source,
        decode.shared_memory_pool([target_group], model="m") as target,
    ):
        words = wire.DType[dtype.upper()].word_type
        kv = random_kv(np.float32).view(np.uint32)
        kv = kv if dtype == "float32" else (kv >> 16).astype(np.uint16) if dtype == "bfloat16" else random_kv().view(words)
        source.write_tokens(kv.view(source.groups[0].numpy_dtype), blocks_for(source))
        policy = skv.policy(allocator="GREEDY", budget=0.3)
        name = f"layout-{dtype}-{target_group.memory_axes}-{target_group.block_tokens}"
        plan = prefill.plan(source, TOKENS, blocks_for(source), policy)
        decode.expect(name, pool=target, token_count=TOKENS, blocks=blocks_for(target, 1))
        prefill.send(name, peer=pair.decode.addresses.peer, pool=source, token_count=TOKENS,
                     blocks=blocks_for(source), policy=policy)  # fmt: skip
        report = decode.wait(name, timeout_s=30)
        landed = target.read_tokens(TOKENS, blocks_for(target, 1))
        want = expected(plan, kv, wire.DType[dtype.upper()])
        assert (landed.view(words) == want.words).all()
        assert report.wire_bytes == want.wire_bytes == plan.wire_bytes <= 0.3 * kv.nbytes


def test_pull_from_a_file_into_memory_of_the_daemon(prefill, decode, pair):
    shared_dir = str(pair.prefill.folder / "shared")
    with (
        prefill.shared_memory_pool([group()], model="m", shared_dir=shared_dir) as source,
        decode.daemon_owned_pool([group(block_tokens=25, num_blocks=6, axes="LBPHTD")], model="m") as target,
    ):
        assert os.listdir(shared_dir)
        kv = random_kv(seed=1)
        source.write_tokens(kv, blocks_for(source))
        policy = skv.policy(allocator="RAW", budget=1.1)
        prefill.publish("pull", pool=source, token_count=TOKENS, blocks=blocks_for(source), policy=policy, token=b"0123456789abcdef")
        decode.fetch("pull", peer=pair.prefill.addresses.peer, pool=target, token_count=TOKENS, blocks=[5, 0, 4, 1],
                     token=b"0123456789abcdef")  # fmt: skip
        decode.wait("pull", timeout_s=30)
        got = target.get([5, 0, 4, 1]).reshape(LAYERS, 2, TOKENS, HEADS, DIM)
        assert (got == kv).all()
    assert not os.listdir(shared_dir)


def test_put_then_get_through_the_daemon(prefill):
    with prefill.daemon_owned_pool([group(dtype="bfloat16")], model="m") as pool:
        kv = np.random.default_rng(3).integers(0, 1 << 16, (LAYERS, 2, 4, 16, HEADS, DIM)).astype(np.uint16)
        assert pool.put(kv, [7, 3, 4, 19]) == kv.nbytes
        assert (pool.get([3, 4, 7]) == kv[:, :, [1, 2, 0]]).all()
        with pytest.raises(skv.SpectrumKVError) as error:
            pool.get([20])
        assert error.value.code in ("NOT_FOUND", "INVALID_ARGUMENT") and error.value.reason


def test_errors_carry_their_reason_and_values(prefill):
    with prefill.shared_memory_pool([group()], model="m") as pool:
        for budget, reason in ((0.01, "BUDGET_TOO_SMALL"), (float("nan"), "INVALID_BUDGET"), (-1.0, "INVALID_BUDGET")):
            with pytest.raises(skv.SpectrumKVError) as error:
                prefill.plan(pool, TOKENS, blocks_for(pool), skv.policy(budget=budget))
            assert (error.value.code, error.value.reason) == ("INVALID_ARGUMENT", reason)
        with pytest.raises(skv.SpectrumKVError) as error:
            prefill.get_transfer("nobody")
        assert error.value.code == "NOT_FOUND" and error.value.reason == "UNKNOWN_TRANSFER"


def test_no_call_is_left_for_the_end_of_the_program(pair):
    """gRPC's calls take a lock when they are collected; in the interpreter's last collection nobody may give it back."""

    def calls():
        return sum("Rendezvous" in type(thing).__name__ for thing in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = calls()
        with skv.Client(pair.prefill.addresses.worker_socket, timeout_s=20) as client:
            with client.daemon_owned_pool([group()], model="m") as pool:
                assert pool.wait_held(20)
                assert calls() > before, "gRPC's calls have another name now: this test proves nothing"
                try:
                    pool.get([20])
                except skv.SpectrumKVError as error:
                    assert error.reason == "UNKNOWN_BLOCK"
                client.expect("left", pool=pool, token_count=TOKENS, blocks=blocks_for(pool))
                client.cancel("left")
                try:
                    client.wait("left", timeout_s=10)
                except skv.TransferFailed as error:
                    assert error.report.state == report_pb2.TRANSFER_STATE_CANCELLED
            assert calls() == before
    finally:
        gc.enable()


def test_cancel_before_the_other_half_comes(decode):
    with decode.shared_memory_pool([group()], model="m") as pool:
        decode.expect("lonely", pool=pool, token_count=TOKENS, blocks=blocks_for(pool))
        report = decode.cancel("lonely")
        assert report.state == report_pb2.TRANSFER_STATE_CANCELLED
        with pytest.raises(skv.TransferFailed, match="CANCELLED"):
            decode.wait("lonely", timeout_s=10)
        decode.release("lonely")


def test_layerwise_example(pair):
    prefill, decode = pair.prefill.addresses, pair.decode.addresses
    arguments = [prefill.worker_socket, decode.worker_socket, decode.peer]
    done = subprocess.run(
        [sys.executable, EXAMPLES / "layerwise.py", *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 layers are ready" in done.stdout and "relative error" in done.stdout


def test_pool_survives_a_restart_of_its_daemon(tmp_path):
    with Pair(pathlib.Path(PROGRAM), keep=False) as pair:
        daemon = pair.decode
        with skv.Client(daemon.addresses.worker_socket, timeout_s=20) as client:
            with client.shared_memory_pool([group()], model="m") as pool:
                pool.k(0)[3] = 1.5
                before = pool.ref
                os.kill(daemon.pid, signal.SIGKILL)
                daemon.restart()
                end = time.monotonic() + 30
                while pool.ref.epoch == before.epoch:
                    assert time.monotonic() < end, "it was never registered again"
                    time.sleep(0.05)
                assert client.plan(pool, TOKENS, blocks_for(pool)).kv_bytes == LAYERS * 2 * TOKENS * HEADS * DIM * 2
                assert (pool.k(0)[3] == 1.5).all()
