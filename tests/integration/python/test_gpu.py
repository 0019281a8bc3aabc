"""Pools in the memory of GPUs, from Python. The daemons' GPUs are not there (tests/cuda/fake): two each, and the context that
a process has on one takes 300 MiB."""

import numpy as np
import pytest
from moves import check, fill, make_side, move, poison, random_words, scattered, small_group

import spectrumkv as skv
from spectrumkv.v1 import admin_service_pb2

CONTEXT_BYTES = 300 << 20


def devices(daemon):
    with daemon.admin() as admin:
        return admin.GetStatus(admin_service_pb2.GetStatusRequest(), timeout=20).devices


def test_what_the_daemon_takes_of_a_gpu_is_told(prefill, source):
    first, second = devices(prefill)
    assert (first.context_bytes, second.context_bytes) == (0, 0)
    assert second.HasField("context_bytes")
    group = small_group()
    with source.daemon_owned_pool([group], model="m", device=second.uuid):
        first, second = devices(prefill)
        assert (first.context_bytes, first.owned_bytes) == (0, 0)
        assert (second.context_bytes, second.owned_bytes) == (CONTEXT_BYTES, group.size_bytes)
    _, second = devices(prefill)
    assert (second.context_bytes, second.owned_bytes) == (CONTEXT_BYTES, 0)  # the context stays


def test_a_gpu_that_is_not_there_is_named(source):
    with pytest.raises(skv.SpectrumKVError) as caught:
        source.daemon_owned_pool([small_group()], model="m", device="GPU-00000000-0000-0000-0000-000000000000")
    assert caught.value.reason == "UNKNOWN_DEVICE"


@pytest.mark.parametrize("from_gpu", [True, False])
def test_what_is_put_on_a_gpu_travels(source, target, prefill, decode, transfer_id, from_gpu):
    group, tokens = small_group(), 30
    rng = np.random.default_rng(5)
    words = random_words(rng, (2, 2, tokens, 2, 16), "float16")
    gpu = {"memory": "owned", "device": devices(prefill)[1].uuid}
    here = make_side(source, prefill, [group], {0: scattered(rng, group, tokens)}, **(gpu if from_gpu else {}))
    there = make_side(target, decode, [group], {0: scattered(rng, group, tokens)}, **({} if from_gpu else gpu))
    with here.pool, there.pool:
        fill(here, [words])
        poison(there)
        sent, received = move(transfer_id, source, target, prefill, decode, here, there, tokens,
                              policy=skv.policy(allocator="RAW", budget=1.1))  # fmt: skip
        check(there, [words])
    assert (sent.path, received.path) == (("device", "host") if from_gpu else ("host", "device"))
    assert (sent.backend == "cuda", received.backend == "cuda") == (from_gpu, not from_gpu)
