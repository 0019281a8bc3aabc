"""Retained sources whose workers need their blocks back: the daemon's cache has the exact words."""

import numpy as np
import pytest
from ends import COMMITTED, Ends, until
from moves import landed
from real_daemon import refused, running

import spectrumkv as skv

TOKENS = 90
COARSE = skv.policy(allocator="UNIFORM", uniform_tier="Q4", budget=0.6, retain_seconds=60)
GROUP = skv.Group(layers=[0, 1, 3], heads=2, head_dim=64, block_tokens=8, num_blocks=40)
SOURCE_BYTES = 3 * 2 * TOKENS * 2 * 64 * 2


def words(ends):
    """What the destination has of the request, [layers, planes, tokens, heads, dim]."""
    pages = landed(ends.there, 0)[:, :, list(ends.there.blocks[0])]
    return pages.reshape(*pages.shape[:2], -1, *pages.shape[4:])[:, :, :TOKENS]


@pytest.fixture(scope="module")
def caching():
    with running(refine__cache_bytes=SOURCE_BYTES) as daemon:
        yield daemon


@pytest.fixture
def ends(caching, target, decode, transfer_id):
    with caching.client() as source:
        made = Ends(source, target, caching, decode, transfer_id, GROUP, TOKENS)
        with made.here.pool, made.there.pool:
            yield made


def commit(ends):
    ends.expect(refinable=True)
    ends.send(policy=COARSE)
    ends.both_end(COMMITTED)


def blocks_are_free(ends):
    """They may be the destination of another transfer."""
    name = ends.name + ".probe"
    try:
        ends.source.expect(name, pool=ends.here.pool, token_count=TOKENS, blocks=ends.here.blocks, deadline_ms=60000)
    except skv.SpectrumKVError as error:
        assert error.reason == "BLOCKS_IN_USE"
        return False
    ends.source.cancel(name)
    return True


def grown(daemon, before, name):
    name = "spectrumkv_" + name
    return daemon.metrics()[name] - before.get(name, 0)


def test_the_blocks_are_free_and_the_words_stay(ends, caching):
    before = caching.metrics()
    commit(ends)
    assert not blocks_are_free(ends)
    assert ends.source.release(ends.name, keep_in_cache=True)
    assert blocks_are_free(ends)
    ends.here.pool.segment.memory[:] = 0x5A  # another request's words
    ends.target.refine(ends.name, ends.name + ".r")
    ends.target.wait(ends.name + ".r", timeout_s=30)
    assert ends.target.apply_refinement(ends.name + ".r").exact
    assert (words(ends) == ends.kv).all()
    assert grown(caching, before, 'retentions_total{role="sender",result="cached"}') == 1
    until(lambda: caching.metrics()['spectrumkv_refine_bytes{use="cache"}'] == 0)


def test_a_worker_that_has_gone_leaves_its_words(ends):
    commit(ends)
    assert ends.source.release(ends.name, keep_in_cache=True)
    ends.here.pool.close()
    ends.target.refine(ends.name, ends.name + ".r")
    ends.target.wait(ends.name + ".r", timeout_s=30)
    assert ends.target.apply_refinement(ends.name + ".r").exact
    assert (words(ends) == ends.kv).all()


def test_a_newer_one_takes_the_room(ends, caching):
    before = caching.metrics()
    commit(ends)
    assert ends.source.release(ends.name, keep_in_cache=True)
    first = ends.name
    ends.target.release(first, role="RECEIVER")
    ends.name += ".second"
    commit(ends)
    assert ends.source.release(ends.name, keep_in_cache=True)
    assert grown(caching, before, 'retentions_total{role="sender",result="evicted"}') == 1
    assert ends.source.get_transfer(first).retained_seconds == 0
    assert ends.source.get_transfer(ends.name).retained_seconds > 0
    ends.source.release(ends.name)
    until(lambda: caching.metrics()['spectrumkv_refine_bytes{use="cache"}'] == 0)


def test_without_a_cache_all_is_released(source, target, prefill, decode, transfer_id):
    ends = Ends(source, target, prefill, decode, transfer_id, GROUP, TOKENS)
    with ends.here.pool, ends.there.pool:
        commit(ends)
        coarse = np.array(words(ends))
        before = prefill.metrics()
        assert not ends.source.release(ends.name, keep_in_cache=True)
        assert blocks_are_free(ends)
        assert grown(prefill, before, 'retentions_total{role="sender",result="uncached"}') == 1
        ends.target.refine(ends.name, ends.name + ".r")
        with pytest.raises(skv.TransferFailed) as failed:
            ends.target.wait(ends.name + ".r", timeout_s=30)
        assert failed.value.report.reason == "NOT_RETAINED"
        assert (words(ends) == coarse).all()
        with refused("INVALID_ARGUMENT", "NOT_A_SOURCE"):
            ends.target.release(ends.name, keep_in_cache=True)
