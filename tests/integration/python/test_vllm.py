"""The vLLM connector without vLLM: both its sides over real daemons, in every phase of a request."""

import contextlib
import logging
import threading
import time

import numpy as np
import pytest
from ends import until
from engine_side import BLOCK, LAYERS, EngineSide, values
from real_daemon import running

from spectrumkv.errors import NotFound

TOKENS = 18  # five blocks, the last of them half used
HERE, THERE = [9, 2, 7, 30, 11], [1, 40, 3, 22, 5]


@pytest.fixture
def rng():
    return np.random.default_rng(5)


@contextlib.contextmanager
def side(daemon, **extra):
    made = EngineSide(daemon, **extra)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def p(prefill):
    with side(prefill) as made:
        yield made


@pytest.fixture
def d(decode):
    with side(decode) as made:
        yield made


def push(name, decode, tokens=TOKENS):
    return {"transfer_id": name, "transfer_token": "ab" * 16, "decode_peer": decode.peer}


def receiving(d, name, params, blocks=THERE, tokens=TOKENS):
    """A request that waits for remote KV in these blocks."""
    request = d.add(name, tokens, do_remote_prefill=True, **params)
    assert d.allocate(request, blocks) == (tokens, True)
    d.step()
    return request


def test_push_either_half_first(p, d, decode, transfer_id, rng):
    for order in ("decode first", "prefill first"):
        name = f"{transfer_id}-{order[0]}"
        kv = values(rng, TOKENS)
        if order == "decode first":
            receiving(d, name, push(name, decode))
        request = p.add(name, TOKENS, do_remote_decode=True, **push(name, decode))
        assert p.allocate(request, HERE) == (0, False)
        p.step(new=[(request, HERE, 0, TOKENS)], write=p.writer(kv, HERE))
        if order == "prefill first":
            receiving(d, name, push(name, decode))
        d.until(lambda: name in d.received)
        assert not d.failed
        np.testing.assert_array_equal(d.read(THERE, TOKENS), kv)
        p.step()
        assert name not in p.sent  # vLLM has not given us its blocks yet
        kept, told = p.scheduler.request_finished(request, aborted=False)
        assert kept and told["transfer_id"] == name and told["do_remote_prefill"]
        p.until(lambda: name in p.sent)


def test_layers_leave_before_the_step_has_ended(p, d, decode, transfer_id, rng):
    """The receiver has the first layers while later ones are not computed."""
    kv = values(rng, TOKENS)
    receiving(d, transfer_id, push(transfer_id, decode))
    request = p.add(transfer_id, TOKENS, do_remote_decode=True, **push(transfer_id, decode))
    p.step(new=[(request, HERE, 0, TOKENS)], write=p.writer(kv, HERE), layers=3)
    end = time.monotonic() + 20
    while not np.array_equal(d.read(THERE, TOKENS)[:3], kv[:3]):
        assert time.monotonic() < end
        time.sleep(0.01)
    d.step()
    assert transfer_id not in d.received
    for layer in (3, 4):
        p.writer(kv, HERE)(layer)
    p.finish_step()
    d.until(lambda: transfer_id in d.received)
    np.testing.assert_array_equal(d.read(THERE, TOKENS), kv)


def test_sides_of_other_block_size_and_type(p, decode, transfer_id, rng):
    """What the daemons convert: the connector names blocks of its own engine's size."""
    with side(decode, block=8, dtype="float16") as d:
        kv = values(rng, TOKENS).astype(np.float16)
        receiving(d, transfer_id, push(transfer_id, decode))
        request = p.add(transfer_id, TOKENS, do_remote_decode=True, **push(transfer_id, decode))
        p.step(new=[(request, HERE, 0, TOKENS)], write=p.writer(kv, HERE))
        d.until(lambda: transfer_id in d.received)
        assert not d.failed
        np.testing.assert_array_equal(d.read(THERE[:3], TOKENS), kv)


def test_pull_with_what_the_answer_tells(p, d, prefill, transfer_id, rng):
    kv = values(rng, TOKENS)
    request = p.add(transfer_id, TOKENS, do_remote_decode=True, transfer_id=transfer_id)
    p.step(new=[(request, HERE, 0, TOKENS)], write=p.writer(kv, HERE))
    kept, told = p.scheduler.request_finished(request, aborted=False)
    assert kept and told["prefill_peer"] == prefill.peer and len(told["transfer_token"]) == 32
    del told["do_remote_decode"]
    receiving(d, "other", {key: value for key, value in told.items() if key != "do_remote_prefill"})
    d.until(lambda: "other" in d.received)
    np.testing.assert_array_equal(d.read(THERE, TOKENS), kv)
    p.until(lambda: transfer_id in p.sent)


def test_pull_names_itself(p, prefill):
    request = p.add("request", TOKENS, do_remote_decode=True)
    p.step(new=[(request, HERE, 0, TOKENS)])
    kept, told = p.scheduler.request_finished(request, aborted=False)
    assert kept and told["transfer_id"].startswith("kv-") and told["prefill_peer"] == prefill.peer

    def cancelled():
        try:
            p.courier.client.sync.cancel(told["transfer_id"])
            return True
        except NotFound:  # the publish is still on its way
            return False

    p.until(cancelled)
    p.until(lambda: "request" in p.sent)


def test_prompt_in_chunks_and_a_cached_prefix(p, d, decode, transfer_id, rng):
    """Blocks come with the chunks; the transfer begins with the last one, and brings the others' tokens, too."""
    kv = values(rng, TOKENS)
    receiving(d, transfer_id, push(transfer_id, decode))
    request = p.add(transfer_id, TOKENS, do_remote_decode=True, **push(transfer_id, decode))
    for layer in range(LAYERS):  # a hit of one block
        p.writer(kv, HERE, 0, 4)(layer)
    first = p.step(new=[(request, HERE[:2], 4, 4)], write=p.writer(kv, HERE, 4, 8))
    middle = p.step(more=[(request, HERE[2:4], 8, 6)], write=p.writer(kv, HERE, 8, 14))
    assert not first.sends and not middle.sends
    last = p.step(more=[(request, HERE[4:], 14, 4)], write=p.writer(kv, HERE, 14, 18))
    assert last.sends[0].blocks == HERE and last.sends[0].computed == 14
    d.until(lambda: transfer_id in d.received)
    np.testing.assert_array_equal(d.read(THERE, TOKENS), kv)


def test_a_request_that_goes_on_is_sent_once(p, d, decode, transfer_id, rng):
    kv = values(rng, TOKENS)
    receiving(d, transfer_id, push(transfer_id, decode))
    request = p.add(transfer_id, TOKENS, do_remote_decode=True, **push(transfer_id, decode))
    p.step(new=[(request, HERE, 0, TOKENS)], write=p.writer(kv, HERE))
    for token in range(3):
        assert not p.step(more=[(request, [], TOKENS + token, 1)]).sends
    d.until(lambda: transfer_id in d.received)
    np.testing.assert_array_equal(d.read(THERE, TOKENS), kv)


def test_many_at_a_time(p, d, decode, transfer_id, rng):
    """Eight requests in one step, of both kinds and several sizes."""
    wanted = {}
    free_here, free_there = list(range(64)), list(reversed(range(64)))
    new, requests = [], []
    for i in range(8):
        name, tokens = f"{transfer_id}-{i}", 3 + 4 * i
        count = -(-tokens // BLOCK)
        here, there = [free_here.pop() for _ in range(count)], [free_there.pop() for _ in range(count)]
        kv = wanted[name] = (values(rng, tokens), there)
        pulled = i % 2 == 1
        params = {"transfer_id": name} if pulled else push(name, decode)
        request = p.add(name, tokens, do_remote_decode=True, **params)
        if not pulled:
            receiving(d, name, params, there, tokens)
        new.append((request, here, 0, tokens))
        requests.append((request, pulled, there, tokens, p.writer(kv[0], here)))
    p.step(new=new, write=lambda layer: [one[-1](layer) for one in requests])
    for request, pulled, there, tokens, _ in requests:
        kept, told = p.scheduler.request_finished(request, aborted=False)
        assert kept
        if pulled:
            params = {key: told[key] for key in ("transfer_id", "transfer_token", "prefill_peer")}
            receiving(d, request.request_id, params, there, tokens)
    d.until(lambda: d.received == set(wanted))
    assert not d.failed
    for kv, there in wanted.values():
        np.testing.assert_array_equal(d.read(there, kv.shape[2]), kv)
    p.until(lambda: p.sent == set(wanted))


def test_preempted_sender(p, d, decode, transfer_id, rng):
    """When the step that takes the blocks away goes on, nobody reads them; the receiver is told, and computes itself."""
    kv = values(rng, TOKENS)
    receiving(d, transfer_id, push(transfer_id, decode))
    request = p.add(transfer_id, TOKENS, do_remote_decode=True, **push(transfer_id, decode))
    p.step(new=[(request, HERE, 0, TOKENS)], write=p.writer(kv, HERE), layers=2)
    p.step(preempted=[transfer_id])
    p.kv[:] = 77.0
    d.until(lambda: transfer_id in d.received)
    assert d.failed == set(THERE)
    resumed = p.step(more=[(request, HERE, 0, TOKENS)], resumed=[transfer_id])
    assert not resumed.sends  # the receiver has given it up
    assert p.scheduler.request_finished(request, aborted=False) == (False, None)
    p.step()
    assert transfer_id not in p.sent  # it was not kept for us
    assert not (d.read(THERE, TOKENS) == 77.0).any()
    assert p.scheduler.take_counts()["sends_preempted"] == 1


def test_preempted_before_its_last_chunk(p, d, decode, transfer_id, rng):
    kv = values(rng, TOKENS)
    receiving(d, transfer_id, push(transfer_id, decode))
    request = p.add(transfer_id, TOKENS, do_remote_decode=True, **push(transfer_id, decode))
    p.step(new=[(request, [60, 61], 0, 8)])
    assert not p.step(preempted=[transfer_id]).preempted
    p.step(more=[(request, HERE, 0, TOKENS)], resumed=[transfer_id], write=p.writer(kv, HERE))
    d.until(lambda: transfer_id in d.received)
    np.testing.assert_array_equal(d.read(THERE, TOKENS), kv)


def test_abort_of_a_receiver_that_waits(p, d, decode, transfer_id):
    receiving(d, transfer_id, push(transfer_id, decode))
    request = d.scheduler._wanted[transfer_id].request
    assert d.scheduler.request_finished(request, aborted=True) == (False, None)
    d.until(lambda: transfer_id in d.received)  # now vLLM frees the blocks
    assert not d.failed
    with decode.client() as client:
        assert client.get_transfer(transfer_id).reason != ""


def test_abort_of_a_receiver_in_the_middle(p, d, decode, transfer_id, rng):
    receiving(d, transfer_id, push(transfer_id, decode))
    request = p.add(transfer_id, TOKENS, do_remote_decode=True, **push(transfer_id, decode))
    p.step(new=[(request, HERE, 0, TOKENS)], write=p.writer(values(rng, TOKENS), HERE), layers=2)
    d.scheduler.request_finished(d.scheduler._wanted[transfer_id].request, aborted=True)
    d.until(lambda: transfer_id in d.received)
    d.kv[:, :, THERE] = 5.0
    p.finish_step()
    kept, _ = p.scheduler.request_finished(request, aborted=False)
    assert kept
    p.until(lambda: transfer_id in p.sent)
    assert (d.kv[:, :, THERE] == 5.0).all()  # nothing landed after the end was told
    assert p.worker.take_counts()["sends_failed"] == 1


def test_abort_of_a_receiver_before_its_blocks(d, decode, transfer_id):
    request = d.add(transfer_id, TOKENS, do_remote_prefill=True, **push(transfer_id, decode))
    assert d.scheduler.num_new_matched_tokens(request, 0) == (TOKENS, True)
    d.step()
    assert d.scheduler.request_finished(request, aborted=True) == (False, None)
    step = d.step()
    assert not step.loads and not step.cancels and transfer_id not in d.received


def test_abort_of_a_receiver_that_has_arrived(p, d, decode, transfer_id, rng):
    receiving(d, transfer_id, push(transfer_id, decode))
    request = p.add(transfer_id, TOKENS, do_remote_decode=True, **push(transfer_id, decode))
    p.step(new=[(request, HERE, 0, TOKENS)], write=p.writer(values(rng, TOKENS), HERE))
    d.until(lambda: transfer_id in d.received)
    assert d.scheduler.request_finished(d.scheduler._wanted[transfer_id].request, aborted=True) == (False, None)
    assert not d.step().cancels


@pytest.mark.parametrize("layers", [0, 2, LAYERS])
def test_abort_of_a_sender(p, d, decode, transfer_id, rng, layers):
    """Its blocks are given back when nobody reads them any more; the receiver is told where it was not through."""
    receiving(d, transfer_id, push(transfer_id, decode))
    request = p.add(transfer_id, TOKENS, do_remote_decode=True, **push(transfer_id, decode))
    p.step(new=[(request, HERE, 0, TOKENS)], write=p.writer(values(rng, TOKENS), HERE), layers=layers)
    kept, _ = p.scheduler.request_finished(request, aborted=True)
    assert kept
    p.until(lambda: transfer_id in p.sent)
    p.kv[:] = 77.0
    d.until(lambda: transfer_id in d.received)
    if layers < LAYERS:
        assert d.failed == set(THERE)
    assert not (d.read(THERE, TOKENS) == 77.0).any()


def test_abort_of_a_sender_that_has_not_begun(p, decode, transfer_id):
    request = p.add(transfer_id, TOKENS, do_remote_decode=True, **push(transfer_id, decode))
    p.step(new=[(request, HERE[:2], 0, 8)])
    assert p.scheduler.request_finished(request, aborted=True) == (False, None)
    step = p.step()
    assert not step.cancels and not step.released


def test_receiver_with_a_prefix_of_its_own(d, decode, transfer_id):
    """The look into the prefix cache is skipped; where it was not, the rest is computed, for shared blocks are not written."""
    request = d.add(transfer_id, TOKENS, do_remote_prefill=True, **push(transfer_id, decode))
    assert request.skip_reading_prefix_cache  # when vLLM looks
    assert d.scheduler.num_new_matched_tokens(request, 0) == (TOKENS, True)
    assert not request.skip_reading_prefix_cache  # when it decides what to do with our answer
    d.step()
    assert request.skip_reading_prefix_cache  # it got no blocks: vLLM looks again
    assert d.scheduler.num_new_matched_tokens(request, 8) == (0, False)
    assert d.scheduler.num_new_matched_tokens(request, 0) == (0, False)
    assert d.scheduler.take_counts() == {"loads_refused": 1}


def test_failed_load_is_not_asked_for_again(d, transfer_id):
    """Nobody listens there: the blocks are told as failed, and the next answer is to compute."""
    params = {"transfer_id": transfer_id, "prefill_peer": "127.0.0.1:1"}
    request = d.add(transfer_id, TOKENS, do_remote_prefill=True, **params)
    with side_settings(d, deadline_ms=1500):
        assert d.allocate(request, THERE) == (TOKENS, True)
        d.until(lambda: transfer_id in d.received)
    assert d.failed == set(THERE)
    assert d.scheduler.num_new_matched_tokens(request, 0) == (0, False)
    assert d.worker.take_counts() == {"loads_failed": 1}


@contextlib.contextmanager
def side_settings(d, **changed):
    import dataclasses

    before = d.scheduler._settings
    d.scheduler._settings = dataclasses.replace(before, **changed)
    try:
        yield
    finally:
        d.scheduler._settings = before


def test_refused_by_the_daemon(d, decode, transfer_id):
    """A block that is not there: the load fails at once, and nothing is left reserved."""
    request = d.add(transfer_id, TOKENS, do_remote_prefill=True, **push(transfer_id, decode))
    assert d.allocate(request, [1, 2, 3, 4, 5000]) == (TOKENS, True)
    d.until(lambda: transfer_id in d.received)
    assert d.failed == {1, 2, 3, 4, 5000}
    assert d.scheduler.take_counts()["loads_refused"] == 1


def test_prefill_daemon_dies(d, decode, transfer_id, rng):
    with running() as dying, side(dying) as p:
        receiving(d, transfer_id, push(transfer_id, decode))
        request = p.add(transfer_id, TOKENS, do_remote_decode=True, **push(transfer_id, decode))
        kv = values(rng, TOKENS)
        p.step(new=[(request, HERE, 0, TOKENS)], write=p.writer(kv, HERE), layers=2)
        until(lambda: np.array_equal(d.read(THERE, TOKENS)[:2], kv[:2]))
        start = time.monotonic()
        dying.kill()
        d.until(lambda: transfer_id in d.received)
        print(f"the receiver heard of it after {time.monotonic() - start:.2f} s")
        assert d.failed == set(THERE)
        p.finish_step()  # the engine goes on
        kept, _ = p.scheduler.request_finished(request, aborted=False)
        assert kept
        p.until(lambda: transfer_id in p.sent)


def test_decode_daemon_dies_and_comes_back(p, transfer_id, rng):
    with running() as dying, side(dying) as d:
        first = f"{transfer_id}-1"
        receiving(d, first, push(first, dying))
        dying.restart()
        d.until(lambda: first in d.received)
        assert d.failed == set(THERE)
        d.failed.clear()
        # The scheduler's side knows the old pool alone; the worker's makes it good.
        name, kv = f"{transfer_id}-2", values(rng, TOKENS)
        receiving(d, name, push(name, dying))
        request = p.add(name, TOKENS, do_remote_decode=True, **push(name, dying))
        p.step(new=[(request, HERE, 0, TOKENS)], write=p.writer(kv, HERE))
        d.until(lambda: name in d.received)
        assert not d.failed
        np.testing.assert_array_equal(d.read(THERE, TOKENS), kv)


def test_prefill_daemon_restarts_between_two_requests(d, decode, transfer_id, rng):
    """The next request may come before the connection is there again: it is sent all the same."""
    with running() as dying, side(dying) as p:
        for i in range(2):
            name, kv = f"{transfer_id}-{i}", values(rng, TOKENS)
            receiving(d, name, push(name, decode))
            request = p.add(name, TOKENS, do_remote_decode=True, **push(name, decode))
            p.step(new=[(request, HERE, 0, TOKENS)], write=p.writer(kv, HERE))
            d.until(lambda name=name: name in d.received)
            assert not d.failed
            np.testing.assert_array_equal(d.read(THERE, TOKENS), kv)
            dying.restart()


def test_daemon_that_stands_still_keeps_the_blocks(p, transfer_id, rng):
    """No end is told while the daemon may still write."""
    import os
    import signal

    with running() as stopped, side(stopped) as d:
        receiving(d, transfer_id, push(transfer_id, stopped))
        os.kill(stopped.process.pid, signal.SIGSTOP)
        d.scheduler.request_finished(d.scheduler._wanted[transfer_id].request, aborted=True)
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            d.step()
        assert transfer_id not in d.received
        os.kill(stopped.process.pid, signal.SIGCONT)
        d.until(lambda: transfer_id in d.received)


@pytest.mark.parametrize("ends", [False, True])
def test_first_token_is_reported_once(p, d, decode, transfer_id, rng, ends):
    """Also where it is the last one, and vLLM ends the request in the same breath."""
    count, total = (f"spectrumkv_time_to_first_token_seconds_{what}" for what in ("count", "sum"))
    before = decode.metrics()
    receiving(d, transfer_id, push(transfer_id, decode) | {"arrived_s": time.time() - 3})
    request = p.add(transfer_id, TOKENS, do_remote_decode=True, **push(transfer_id, decode))
    p.step(new=[(request, HERE, 0, TOKENS)], write=p.writer(values(rng, TOKENS), HERE))
    d.until(lambda: transfer_id in d.received)
    ours = d.scheduler._wanted[transfer_id].request
    ours.num_output_tokens = 1
    if ends:
        d.scheduler.request_finished(ours, aborted=False)
    d.step()
    d.step()
    until(lambda: decode.metrics()[count] > before[count])
    assert decode.metrics()[count] == before[count] + 1
    assert decode.metrics()[total] - before[total] >= 3


def test_idle_steps_wait_for_an_end_but_computing_ones_do_not(d, decode, transfer_id):
    receiving(d, transfer_id, push(transfer_id, decode))
    other = d.add("other", 8)
    start = time.monotonic()
    steps = 0
    while time.monotonic() < start + 0.3:
        d.step()
        steps += 1
    busy = 0
    start = time.monotonic()
    while time.monotonic() < start + 0.3:
        d.step(new=[(other, [50, 51], 0, 8)])
        busy += 1
    print(f"{steps} idle steps, {busy} others in 0.3 s")
    assert steps <= 0.3 / 0.002 + 1
    d.scheduler.request_finished(d.scheduler._wanted[transfer_id].request, aborted=True)
    d.until(lambda: transfer_id in d.received)


def test_budget_of_a_request(p, d, decode, transfer_id, rng):
    tokens, here, there = 64, list(range(16)), list(range(20, 36))
    receiving(d, transfer_id, push(transfer_id, decode), there, tokens)
    asked = push(transfer_id, decode) | {"policy": {"budget": 0.3, "allocator": "GREEDY"}}
    request = p.add(transfer_id, tokens, do_remote_decode=True, **asked)
    p.step(new=[(request, here, 0, tokens)], write=p.writer(values(rng, tokens), here))
    d.until(lambda: transfer_id in d.received)
    with decode.client() as client:
        report = client.get_transfer(transfer_id)
    assert 0 < report.wire_bytes <= 0.3 * report.kv_bytes


def test_budget_that_a_short_prompt_cannot_meet(p, d, decode, transfer_id, rng):
    """The least possible is taken: a prompt of three tokens has more to say of its chunks than it has values to save."""
    kv = values(rng, 3)
    receiving(d, transfer_id, push(transfer_id, decode), [8], 3)
    asked = push(transfer_id, decode) | {"policy": {"budget": 0.15}}
    request = p.add(transfer_id, 3, do_remote_decode=True, **asked)
    p.step(new=[(request, [6], 0, 3)], write=p.writer(kv, [6]))
    d.until(lambda: transfer_id in d.received)
    assert not d.failed
    assert p.worker.take_counts()["budgets_raised"] == 1


BAD = {
    "no id": {"do_remote_prefill": True, "decode_peer": "h:1"},
    "no peer": {"do_remote_prefill": True, "transfer_id": "t"},
    "push without an id": {"do_remote_decode": True, "decode_peer": "h:1"},
    "both halves": {"do_remote_decode": True, "do_remote_prefill": True, "transfer_id": "t"},
    "token": {"do_remote_decode": True, "transfer_id": "t", "transfer_token": "xyz"},
    "id": {"do_remote_decode": True, "transfer_id": 5},
    "policy": {"do_remote_decode": True, "policy": {"bugdet": 1}},
    "policy's kind": {"do_remote_decode": True, "policy": 0.3},
    "allocator": {"do_remote_decode": True, "policy": {"allocator": "BEST"}},
}


@pytest.mark.parametrize("what", BAD)
def test_parameters_that_cannot_be(p, what, caplog):
    """The request is served as any other, without a transfer; the log and a count say why."""
    with caplog.at_level(logging.WARNING):
        request = p.add("request", TOKENS, **BAD[what])
    assert "request request: its KV is not transferred" in caplog.text
    assert p.scheduler.num_new_matched_tokens(request, 0) == (0, False)
    assert not p.step(new=[(request, HERE, 0, TOKENS)]).sends
    assert p.scheduler.request_finished(request, aborted=False) == (False, None)
    assert p.scheduler.take_counts() == {"requests_refused": 1}


def test_close_ends_what_is_under_way(decode, transfer_id):
    made = EngineSide(decode)
    receiving(made, transfer_id, push(transfer_id, decode))
    made.close()
    assert not any(thread.name == "spectrumkv-courier" for thread in threading.enumerate())
