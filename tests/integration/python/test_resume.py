"""A link that breaks in the middle: what comes back goes on where it was, and what does not ends in time."""

import contextlib
import time

import pytest
from ends import COMMITTED, EXPIRED, Ends, ended, until
from moves import check, small_group
from real_daemon import SANITIZER_KIB, running
from tcp_proxy import Proxy

from spectrumkv.v1.report_pb2 import TRANSFER_STATE_FAILED as FAILED

LAYERS, TOKENS = 8, 200
PROGRESS_S = 3.0
RESENT = "spectrumkv_chunks_resent_total"


@pytest.fixture(scope="module")
def pair():
    keys = dict(transfer__progress_timeout_ms=int(PROGRESS_S * 1000))
    with running(**keys) as here, running(**keys) as there, here.client() as source, there.client() as target:
        yield here, there, source, target


@contextlib.contextmanager
def half_done(pair, name, pull, **options):
    """A layer-wise transfer over a relay, half of whose layers have arrived: its ends, the relay."""
    here, there, source, target = pair
    group = small_group(layers=range(LAYERS), num_blocks=64)
    ends = Ends(source, target, here, there, name, group=group, tokens=TOKENS)
    with ends.here.pool, ends.there.pool, Proxy((here if pull else there).peer) as relay:
        if pull:
            ends.publish(layerwise=True, **options)
            ends.fetch(peer=relay.address, **options)
        else:
            ends.expect(**options)
            ends.send(peer=relay.address, layerwise=True, **options)
        ends.source.advance(name, layers=LAYERS // 2, tokens=TOKENS)
        until(lambda: ends.target.get_transfer(name).layers_ready == LAYERS // 2)
        yield ends, relay


@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
def test_a_link_that_comes_back_goes_on(pull, pair, transfer_id):
    """Dials at growing intervals until somebody answers; then only what is missing is sent."""
    before = pair[0].metrics()
    with half_done(pair, transfer_id, pull) as (ends, relay):
        relay.break_down()
        ends.source.advance(transfer_id, layers=LAYERS, tokens=TOKENS)
        until(lambda: len(relay.hung_up) >= 5, PROGRESS_S)
        relay.is_down = False
        report = ends.both_end(COMMITTED)
        check(ends.there, [ends.kv])
        received = ends.target.get_transfer(transfer_id)
        # gRPC may dial twice for one attempt of ours, where a dial takes as long as under sanitizers.
        least = 3 if SANITIZER_KIB else 5
        assert least < report.attempts <= len(relay.hung_up) + 1 and received.attempts == report.attempts
        # What had arrived is not sent again; of the rest some may have been handed to a link whose end was not known yet.
        assert report.chunks_resent <= received.chunks / 2 and received.chunks_duplicate == 0
        assert report.chunks == received.chunks + report.chunks_resent
        assert pair[0].metrics()[RESENT] == before[RESENT] + report.chunks_resent
    waits = [later - sooner for sooner, later in zip(relay.hung_up, relay.hung_up[1:])]
    assert sum(waits[-2:]) > 2 * sum(waits[:2]), waits


@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
def test_a_link_that_stays_broken_is_given_up(pull, pair, transfer_id):
    with half_done(pair, transfer_id, pull) as (ends, relay):
        broken = time.monotonic()
        relay.break_down()
        dialler, acceptor = (ends.target, ends.source) if pull else (ends.source, ends.target)
        for client in (acceptor, dialler):
            report = ended(client, transfer_id)
            assert (report.code, report.reason) == (14, "PEER_GONE"), report  # UNAVAILABLE
            assert report.chunks_resent == 0
        took = time.monotonic() - broken
        assert PROGRESS_S * 2 / 3 < took < PROGRESS_S + 1, took


def test_nobody_dials_beyond_the_deadline(pair, transfer_id):
    deadline_s = 1.5
    begin = time.monotonic()
    with half_done(pair, transfer_id, True, deadline_ms=int(deadline_s * 1000)) as (ends, relay):
        relay.break_down()
        report = ended(ends.target, transfer_id)
        took = time.monotonic() - begin
        assert report.state == EXPIRED and "the link had broken" in report.message, report
        assert deadline_s < took < deadline_s + 2, took
        dials = len(relay.hung_up)
        time.sleep(1)
        assert len(relay.hung_up) == dials
    assert ended(ends.source, transfer_id).state in (EXPIRED, FAILED)
