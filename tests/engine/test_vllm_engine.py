"""vLLM with SmolLM2-135M in float32: what disaggregation must not change, what it costs, and what becomes of requests whose KV
does not come. Figures are printed; only what must be so is checked."""

import concurrent.futures
import functools
import json
import math
import os
import pathlib
import threading
import time

import pytest

from spectrumkv.v1 import policy_pb2, report_pb2

RAW = {"allocator": "RAW"}
# Fewer and shorter ones where time is short; the figures are of the defaults.
PASSAGES, CHARACTERS, TOKENS = (int(n) for n in os.environ.get("SPECTRUMKV_ENGINE_SIZE", "4,1200,24").split(","))
ROUNDS = 3
_ARTICLES = pathlib.Path(__file__).resolve().parents[1] / "data/wikipedia_excerpts/articles.json"


@functools.cache
def passages():
    """(prompt, what follows it in the article)."""
    texts = [article["text"] for article in json.loads(_ARTICLES.read_text(encoding="utf-8"))]
    return [(text[:CHARACTERS], text[CHARACTERS : CHARACTERS + 400]) for text in texts[:PASSAGES]]


@pytest.fixture(scope="module")
def baseline(pair):
    """Greedy tokens of each prompt where one engine does it all."""
    return {prompt: pair.alone(prompt, max_tokens=TOKENS)["token_ids"] for prompt, _ in passages()}


def test_raw_is_no_disaggregation_token_for_token(pair, baseline):
    for i, (prompt, tokens) in enumerate(baseline.items()):
        name = f"raw-{i}"
        assert pair.routed(prompt, policy=RAW, name=name, max_tokens=TOKENS)["token_ids"] == tokens
        _, report = pair.report(name)
        assert report.state == report_pb2.TRANSFER_STATE_COMMITTED, report
        print(f"{name}: {report.kv_bytes} bytes of KV, {report.wire_bytes} on the wire, {report.duration_seconds:.2f} s")
    assert pair.until_free() == pair.blocks


def test_at_the_same_time(pair, baseline):
    """All prompts at once: batches of several requests, sends and loads that overlap."""
    with concurrent.futures.ThreadPoolExecutor(len(baseline)) as pool:
        answers = pool.map(lambda prompt: pair.routed(prompt, policy=RAW, max_tokens=TOKENS)["token_ids"], baseline)
        together = list(answers)
    same = [a == b for a, b in zip(together, baseline.values(), strict=True)]
    print(f"{sum(same)} of {len(same)} as one at a time")
    assert all(same)
    assert pair.until_free() == pair.blocks


def test_pull(pair, baseline):
    prompt, tokens = next(iter(baseline.items()))
    assert pair.routed(prompt, policy=RAW, pull=True, name="pulled", max_tokens=TOKENS)["token_ids"] == tokens
    assert pair.report("pulled")[1].state == report_pb2.TRANSFER_STATE_COMMITTED
    assert pair.until_free() == pair.blocks


def test_what_a_budget_costs(pair, baseline):
    """Agreement of greedy tokens, and perplexity of what the article really goes on with, over KV that has travelled."""
    rows = {"alone": None, "RAW": RAW, "0.25": {"budget": 0.25}, "0.15": {"budget": 0.15}}
    logprobs = {}
    for title, policy in rows.items():
        agree, told, wire = [], [], []
        for i, (prompt, after) in enumerate(passages()):
            forced = pair.decode.request("POST", "/tokenize", {"prompt": after})["tokens"][:TOKENS]
            ask = pair.alone if policy is None else functools.partial(pair.routed, policy=policy)
            named = (lambda kind: {}) if policy is None else (lambda kind, i=i, title=title: {"name": f"cost-{title}-{kind}-{i}"})
            greedy = ask(prompt, max_tokens=TOKENS, **named("greedy"))["token_ids"]
            agree.append(sum(a == b for a, b in zip(greedy, baseline[prompt], strict=False)) / TOKENS)
            told.append(ask(prompt, max_tokens=TOKENS, force=forced, **named("forced")))
            if policy is not None:
                sent, report = pair.report(f"cost-{title}-forced-{i}")
                assert report.state == report_pb2.TRANSFER_STATE_COMMITTED, report
                wire.append(report.wire_bytes / report.kv_bytes)
                if "budget" in policy:
                    assert sent.importance == policy_pb2.IMPORTANCE_SOURCE_RECENT_QUERIES
        values = [value for answer in told for value in answer["token_logprobs"]]
        logprobs[title] = values
        ppl = math.exp(-sum(values) / len(values))
        print(f"{title:>6}: agreement {sum(agree) / len(agree):.3f}, perplexity {ppl:.3f}, "
              f"wire {max(wire, default=0):.3f} of the KV")  # fmt: skip
        if policy is not None and "budget" in policy:
            assert max(wire) <= policy["budget"]
    assert logprobs["RAW"] == pytest.approx(logprobs["alone"], abs=1e-3)


def test_refined_while_it_decodes(pair, baseline):
    """Requests begin with 4.8 bits a value and get the words themselves between their steps."""
    agree = {}
    for refine in ("", "RAW"):
        before, counted, agree[refine] = pair.decode.refined_bytes(), pair.decode.counts(), []
        for i, (prompt, tokens) in enumerate(baseline.items()):
            name = f"refined-{refine}-{i}"
            answer = pair.routed(prompt, policy={"budget": 0.15}, refine=refine, name=name, max_tokens=TOKENS)
            assert 0 < len(answer["token_ids"]) <= TOKENS
            agree[refine].append(sum(a == b for a, b in zip(answer["token_ids"], tokens, strict=False)) / TOKENS)
        assert pair.until_free() == pair.blocks
        if refine:
            until(lambda before=before: pair.decode.refined_bytes() > before)
        applied = pair.decode.refined_bytes() - before
        assert (applied > 0) == bool(refine)
        events = {event: number - counted.get(event, 0) for event, number in pair.decode.counts().items() if "refine" in event}
        print(f"budget 0.15, refined to {refine or 'nothing'}: agreement with RAW {sum(agree[refine]) / len(agree[refine]):.3f}, "
              f"{applied:.0f} bytes applied; {events}")  # fmt: skip
        assert not events.get("refinements_failed")


def test_preempted_while_it_is_refined(pair):
    """vLLM takes the blocks of a running request away: the daemon lets go of them, and the request computes its prompt again."""
    if pair.no_network:
        pytest.skip(f"SKIPPED: {pair.no_network}")
    pair.slow("8mbit")  # some seconds for the rest of such a request
    before, ended = pair.decode.refined_bytes(), pair.decode.counts().get("refinements_ended", 0)
    tokens, answers, options = 6 * TOKENS, [], {"policy": {"budget": 0.15}, "refine": "RAW", "name": "preempted"}
    asked = threading.Thread(target=lambda: answers.append(pair.routed(passages()[0][0], max_tokens=tokens, **options)))
    asked.start()
    until(lambda: pair.decode.refined_bytes() > before)
    pair.decode.preempt()
    until(lambda: not known(pair.decode_daemon, "preempted"))
    released, applied = not answers, pair.decode.refined_bytes()
    pair.slow("10gbit")
    asked.join(300)
    assert released, "while the request runs"
    assert 0 < len(answers[0]["token_ids"]) <= tokens
    assert pair.until_free() == pair.blocks
    assert pair.decode.counts()["refinements_ended"] == ended + 1
    assert pair.decode.refined_bytes() == applied
    print(f"{applied - before:.0f} bytes had been applied")


def test_abort_of_either_half(pair):
    """Blocks come back, and the engines go on."""
    prompt = passages()[0][0]
    lonely = {"transfer_id": "lonely", "decode_peer": pair.decode_daemon.peer, "do_remote_prefill": True}
    waiting = threading.Thread(target=pair.decode.complete, kwargs={
        "prompt": prompt, "request_id": "waits", "kv_transfer_params": lonely, "max_tokens": 4})  # fmt: skip
    waiting.start()
    until(lambda: pair.decode.stats()["free_blocks"] < pair.blocks[1])
    stats = pair.decode.stats()
    time.sleep(1)
    print(f"{pair.decode.stats()['steps'] - stats['steps']} steps in a second of waiting")
    pair.decode.abort("waits")
    waiting.join(60)
    assert pair.until_free() == pair.blocks
    unanswered = {"transfer_id": "unanswered", "decode_peer": pair.decode_daemon.peer, "do_remote_decode": True}
    sending = threading.Thread(target=pair.prefill.complete, kwargs={
        "prompt": prompt, "request_id": "sends", "kv_transfer_params": unanswered, "max_tokens": 400})  # fmt: skip
    sending.start()
    until(lambda: known(pair.prefill_daemon, "unanswered"))
    pair.prefill.abort("sends")
    sending.join(60)
    assert pair.until_free() == pair.blocks


def test_prefill_daemon_dies_on_the_way(pair, baseline):
    """The decode engine computes the prompt itself; once the daemon is back, all is as before."""
    prompt, tokens = next(iter(baseline.items()))
    pair.slow("8mbit")  # a minute for so much KV
    answers = []
    asked = threading.Thread(target=lambda: answers.append(pair.routed(prompt, policy=RAW, name="dying", max_tokens=TOKENS)))
    asked.start()
    if pair.no_network:
        until(lambda: known(pair.decode_daemon, "dying"))
    else:
        until(lambda: pair.decode_daemon.client().get_transfer("dying").wire_bytes > 0 if known(pair.decode_daemon, "dying") else False)
    start = time.monotonic()
    pair.prefill_daemon.kill()
    asked.join(300)
    print(f"the answer came {time.monotonic() - start:.1f} s after the daemon's death")
    assert [answer["token_ids"] for answer in answers] == [tokens]
    pair.slow("10gbit")
    pair.prefill_daemon.restart()
    assert pair.until_free() == pair.blocks
    until(lambda: answers_again(pair, prompt, tokens))


def answers_again(pair, prompt, tokens):
    name = f"again-{time.monotonic_ns()}"
    assert pair.routed(prompt, policy=RAW, name=name, max_tokens=TOKENS)["token_ids"] == tokens
    return known(pair.prefill_daemon, name)


@pytest.mark.parametrize("rate", ["1gbit", "100mbit"])
def test_time_to_first_token(pair, rate):
    if pair.no_network:
        pytest.skip(f"SKIPPED: {pair.no_network}")
    prompt = passages()[-1][0]
    pair.slow(rate)
    policies = {"RAW": RAW, "0.25": {"budget": 0.25}, "0.15": {"budget": 0.15}}
    times = {(title, pull): [] for title in policies for pull in (False, True)}
    before = first_tokens(pair)
    for _ in range(ROUNDS):  # in turn, so that what else the machine does hits all
        for title, pull in times:
            start = time.monotonic()
            pair.routed(prompt, policy=policies[title], pull=pull, max_tokens=1)
            times[title, pull].append(time.monotonic() - start)
    pair.slow("10gbit")
    for pull, kind in ((False, "pushed while it is computed"), (True, "pulled afterwards")):
        raw = min(times["RAW", pull])
        ratios = ", ".join(f"{title} {min(times[title, pull]) / raw:.2f}" for title in policies)
        print(f"{rate}, {kind}: time to first token, RAW {raw:.2f} s; as a share of it: {ratios}")
    until(lambda: first_tokens(pair)[0] >= before[0] + len(times) * ROUNDS)
    count, seconds = (after - was for after, was in zip(first_tokens(pair), before, strict=True))
    print(f"the daemon's histogram has {count:.0f} of them, {seconds / count:.2f} s on average")


def test_what_became_of_requests_is_counted(pair):
    """The last test: vLLM's /metrics has what the others did."""
    prefill, decode = pair.prefill.counts(), pair.decode.counts()
    print(prefill, decode)
    assert prefill["sends_committed"] > 0 and decode["loads_committed"] > 0
    assert prefill["sends_failed"] > 0 and decode["loads_failed"] > 0


def first_tokens(pair):
    metrics = pair.decode_daemon.metrics()
    return [metrics[f"spectrumkv_time_to_first_token_seconds_{what}"] for what in ("count", "sum")]


def known(daemon, name):
    import spectrumkv as skv

    with daemon.client() as client:
        try:
            client.get_transfer(name)
            return True
        except skv.NotFound:
            return False


def until(what, timeout_s=120):
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)
