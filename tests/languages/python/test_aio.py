"""The asyncio client: against a daemon that misbehaves on demand, and against real ones."""

import asyncio
import pathlib
import sys
import time

import grpc
import numpy as np
import pytest

import spectrumkv as skv
from spectrumkv import aio
from spectrumkv.v1 import report_pb2

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "integration" / "python"))
from real_daemon import PROGRAM, running  # noqa: E402

real = pytest.mark.skipif(not PROGRAM, reason="SKIPPED: SPECTRUMKVD is not set")
GROUP = dict(layers=range(3), heads=2, head_dim=64, num_blocks=20)


def with_client(daemon, body, **options):
    """Runs body(client) in an event loop of its own."""

    async def main():
        async with aio.Client(daemon.path, **{"timeout_s": 5, **options}) as client:
            return await body(client)

    return asyncio.run(main())


def test_errors_are_those_of_the_other_client(daemon):
    daemon.worker.failures.append(
        (grpc.StatusCode.NOT_FOUND, "UNKNOWN_TRANSFER", "no such transfer", {"transfer_id": "t"}, None)
    )

    async def body(client):
        with pytest.raises(skv.reasons.UNKNOWN_TRANSFER) as error:
            await client.cancel("t")
        assert isinstance(error.value, skv.NotFound) and error.value.metadata == {"transfer_id": "t"}
        assert (await client.cancel("t")).transfer_id == "t"

    with_client(daemon, body)


@pytest.mark.parametrize("automatic", [False, True])
def test_calls_are_made_again_after_the_delay_that_the_daemon_asks_for(daemon, automatic):
    full = (grpc.StatusCode.RESOURCE_EXHAUSTED, "TRANSFERS_FULL", "later", {}, 120)

    async def body(client):
        daemon.worker.failures.extend([full, full])
        start = time.monotonic()
        call = lambda: client.cancel("t")  # noqa: E731
        report = await (call() if automatic else aio.retry(call))
        assert report.transfer_id == "t" and time.monotonic() - start >= 0.24
        daemon.worker.failures.extend([full] * 50)
        start = time.monotonic()
        with pytest.raises(skv.reasons.TRANSFERS_FULL):
            await (call() if automatic else aio.retry(call, attempts=100, timeout_s=1.5))
        assert time.monotonic() - start < 4
        daemon.worker.failures.clear()

    with_client(daemon, body, retry_s=1.5 if automatic else 0.0)


def test_a_daemon_that_restarted_is_told_of_the_pool_again(daemon, group):
    async def body(client):
        async with await client.shared_memory_pool([group], model="m") as pool:
            before = pool.sync.ref
            daemon.worker.restart()
            await client.send("t", peer="h:1", pool=pool, token_count=4, blocks=[1])
            assert pool.sync.ref != before and pool.sync.registrations == 2

    with_client(daemon, body)
    assert not daemon.worker.pools


def test_calls_of_a_closed_client(daemon):
    async def body(client):
        await client.close()
        with pytest.raises(skv.Cancelled):
            await client.cancel("t")

    with_client(daemon, body)


@real
def test_two_workers_in_one_loop():
    """Pull with a token, both pools in one loop; layers and progress come as events, and the loop goes on meanwhile."""

    async def main(prefill_daemon, decode_daemon):
        source_group = skv.Group(**GROUP, block_tokens=16)
        target_group = skv.Group(**{**GROUP, "num_blocks": 30}, block_tokens=8, layout="HND")
        kv = np.random.default_rng(5).normal(size=(3, 2, 100, 2, 64)).astype(np.float16)
        token_file = prefill_daemon.keys["worker.tcp_token_file"]
        async with (
            aio.Client(prefill_daemon.worker_tcp, token_file=token_file) as prefill,
            aio.Client(decode_daemon.worker) as decode,
            await prefill.shared_memory_pool([source_group], model="m") as source,
            await decode.daemon_owned_pool([target_group], model="m") as target,
        ):
            source.sync.write_tokens(kv, [5, 1, 9, 0, 2, 17, 3])
            token = b"0123456789abcdef"
            blocks = list(range(29, 16, -1))
            await prefill.publish("a", pool=source, token_count=100, blocks=[5, 1, 9, 0, 2, 17, 3], token=token,
                                  layerwise=True, policy=skv.policy(allocator="RAW", budget=1.1))  # fmt: skip
            await decode.fetch("a", peer=prefill_daemon.peer, pool=target, token_count=100, blocks=blocks, token=token)
            layers, progress = [], []
            waiting = asyncio.create_task(
                decode.wait("a", on_layers_ready=layers.append, on_progress=progress.append, timeout_s=60)
            )
            for layer in range(3):
                await prefill.advance("a", layers=layer + 1, tokens=100)
                while not layers or layers[-1] <= layer:
                    assert not waiting.done()
                    await asyncio.sleep(0.01)
            report = await waiting
            assert layers == [1, 2, 3] and report.state == report_pb2.TRANSFER_STATE_COMMITTED
            assert progress and all(0 <= step.chunks_done <= step.chunks_total for step in progress)
            got = (await target.get(blocks)).reshape(3, 2, -1, 2, 64)[:, :, :100]
            assert (got == kv).all()
            assert (await decode.get_transfer("a")).wire_bytes == report.wire_bytes
            await decode.report_first_token("a", 0.25)
            with pytest.raises(skv.reasons.ALREADY_REPORTED):
                await decode.report_first_token("a", 0.25)
            assert (await prefill.plan(source, 100, [5, 1, 9, 0, 2, 17, 3])).kv_bytes == kv.nbytes

    with running(worker__tcp_address="127.0.0.1:0") as prefill, running() as decode:
        asyncio.run(main(prefill, decode))


@real
def test_a_task_that_is_cancelled_stops_waiting_and_no_more():
    async def main(daemon):
        async with aio.Client(daemon.worker) as client:
            async with await client.daemon_owned_pool([skv.Group(**GROUP, block_tokens=16)], model="m") as pool:
                await client.expect("lonely", pool=pool, token_count=10, blocks=[3])
                waiting = asyncio.create_task(client.wait("lonely", timeout_s=60))
                await asyncio.sleep(0.1)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                assert (await client.get_transfer("lonely")).state == report_pb2.TRANSFER_STATE_WAITING
                await client.cancel("lonely")
                with pytest.raises(skv.TransferFailed) as error:
                    await client.wait("lonely", timeout_s=60)
                assert error.value.report.state == report_pb2.TRANSFER_STATE_CANCELLED

    with running() as daemon:
        asyncio.run(main(daemon))


@real
def test_a_pool_lives_through_a_crash_of_its_daemon():
    async def main(daemon):
        async with aio.Client(daemon.worker, timeout_s=30) as client:
            async with await client.shared_memory_pool([skv.Group(**GROUP, block_tokens=16)], model="m") as pool:
                pool.sync.k(0)[3] = 1.5
                before = pool.sync.ref
                await asyncio.to_thread(daemon.restart)
                plan = await _until_there(client, pool)
                assert pool.sync.ref.epoch != before.epoch and plan.kv_bytes == 3 * 2 * 40 * 2 * 64 * 2
                assert (pool.sync.k(0)[3] == 1.5).all()

    with running() as daemon:
        asyncio.run(main(daemon))


async def _until_there(client, pool):
    """The channel needs a moment to see that the daemon is back."""
    end = time.monotonic() + 30
    while True:
        try:
            return await client.plan(pool, 40, [3, 4, 5])
        except skv.Unavailable:
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
