"""Bad input from workers: a canonical code, a stable reason, the offending field, a counted error, and no harm."""

import math
import socket

import grpc
import numpy as np
import pytest
from bad_schemas import BAD_SCHEMAS, good_schema, register
from moves import check, fill, make_side, move, poison, random_words, small_group, unique
from real_daemon import refused, running
from small_sides import RAW, TOKENS

import spectrumkv as skv
from spectrumkv.errors import error_from_rpc, rpc
from spectrumkv.v1 import policy_pb2, schema_pb2, worker_service_pb2


@pytest.mark.parametrize("bad", BAD_SCHEMAS, ids=lambda bad: bad.name)
def test_schema(bad, source, prefill, counted):
    schema = good_schema()
    bad.change(schema)
    with refused(bad.code, bad.reason, **({"field": bad.field} if bad.field else {})):
        register(source, schema)


def test_the_schema_the_bad_ones_come_from_is_good(source, next_is_served):
    pool = register(source, good_schema()).pool
    rpc(source.worker.UnregisterPool, worker_service_pb2.UnregisterPoolRequest(pool=pool), 20)


@pytest.mark.parametrize("ttl", [1, 2**63])
def test_lease_out_of_range(ttl, source, counted):
    with refused("INVALID_ARGUMENT", "OUT_OF_RANGE", field="lease_ttl_ms"):
        register(source, good_schema(), lease_ttl_ms=ttl)


def test_request_id_reused_for_another_schema(source, counted):
    request = worker_service_pb2.RegisterPoolRequest(request_id=unique("again"), schema=good_schema())
    first = source.worker.RegisterPool(request)
    assert source.worker.RegisterPool(request).pool == first.pool
    request.schema.model = "another"
    with refused("ALREADY_EXISTS", "REQUEST_ID_REUSED"):
        source.worker.RegisterPool(request)
    source.worker.UnregisterPool(worker_service_pb2.UnregisterPoolRequest(pool=first.pool))


# field of SendRequest -> what must be said about it
def _blocks(*runs, group=0):
    blocks = schema_pb2.GroupBlocks(group=group)
    for first, count in runs:
        blocks.runs.add(first=first, count=count)
    return [blocks]


BAD_SENDS = {
    "unknown pool": (dict(pool_id="0" * 32), "NOT_FOUND", "UNKNOWN_POOL"),
    "strange pool id": (dict(pool_id="../x"), "INVALID_ARGUMENT", "INVALID_POOL_REF"),
    "stale epoch": (dict(epoch=12345), "FAILED_PRECONDITION", "STALE_EPOCH"),
    "unknown block": (dict(blocks=_blocks((11, 3))), "NOT_FOUND", "UNKNOWN_BLOCK"),
    "block 2^64-1": (dict(blocks=_blocks((2**64 - 1, 1))), "INVALID_ARGUMENT", "INVALID_BLOCKS"),
    "run of 2^64-1": (dict(blocks=_blocks((0, 2**64 - 1))), "NOT_FOUND", "UNKNOWN_BLOCK"),
    "run of nothing": (dict(blocks=_blocks((0, 0))), "INVALID_ARGUMENT", "INVALID_BLOCKS"),
    "too few blocks": (dict(blocks=_blocks((0, 2))), "INVALID_ARGUMENT", "INVALID_BLOCKS"),
    "no blocks": (dict(blocks=[]), "INVALID_ARGUMENT", "INVALID_BLOCKS"),
    "unknown group": (dict(blocks=_blocks((0, 3), group=1)), "INVALID_ARGUMENT", "INVALID_BLOCKS"),
    "no tokens": (dict(token_count=0), "INVALID_ARGUMENT", "OUT_OF_RANGE"),
    "2^32-1 tokens": (dict(token_count=2**32 - 1), "INVALID_ARGUMENT", "OUT_OF_RANGE"),
    "empty id": (dict(transfer_id=""), "INVALID_ARGUMENT", "INVALID_TRANSFER_ID"),
    "long id": (dict(transfer_id="x" * 129), "INVALID_ARGUMENT", "INVALID_TRANSFER_ID"),
    "newline in id": (dict(transfer_id="a\nb"), "INVALID_ARGUMENT", "INVALID_TRANSFER_ID"),
    "short token": (dict(transfer_token=b"123"), "INVALID_ARGUMENT", "INVALID_TOKEN"),
    "no peer": (dict(peer=""), "INVALID_ARGUMENT", "INVALID_PEER"),
    "peer without port": (dict(peer="localhost"), "INVALID_ARGUMENT", "INVALID_PEER"),
    "peer of another scheme": (dict(peer="unix:/tmp/x:1"), "INVALID_ARGUMENT", "INVALID_PEER"),
    "deadline of a year": (dict(deadline_ms=365 * 86400000), "INVALID_ARGUMENT", "OUT_OF_RANGE"),
    "part 1 of 1": (dict(part=policy_pb2.Part(index=1, count=1)), "INVALID_ARGUMENT", "INVALID_PART"),
    "part of nothing": (dict(part=policy_pb2.Part()), "INVALID_ARGUMENT", "INVALID_PART"),
    "65 parts": (dict(part=policy_pb2.Part(count=65)), "INVALID_ARGUMENT", "INVALID_PART"),
    "a whole block skipped": (dict(blocks=[schema_pb2.GroupBlocks(runs=_blocks((0, 4))[0].runs, skip_tokens=4)]),
                              "INVALID_ARGUMENT", "INVALID_BLOCKS"),
}
NAN = float("nan")
BAD_POLICIES = {
    "budget NaN": (dict(budget=NAN), "INVALID_ARGUMENT", "INVALID_BUDGET"),
    "budget infinite": (dict(budget=float("inf")), "INVALID_ARGUMENT", "INVALID_BUDGET"),
    "budget negative": (dict(budget=-0.5), "INVALID_ARGUMENT", "INVALID_BUDGET"),
    "budget 0": (dict(budget=0.0), "INVALID_ARGUMENT", "INVALID_BUDGET"),
    "budget 30, a percentage": (dict(budget=30.0), "INVALID_ARGUMENT", "INVALID_BUDGET"),
    "budget just above 10": (dict(budget=math.nextafter(10, 11)), "INVALID_ARGUMENT", "INVALID_BUDGET"),
    "budget too small": (dict(budget=0.01), "INVALID_ARGUMENT", "BUDGET_TOO_SMALL"),
    "budget too small for RAW": (dict(budget=0.5, allocator="RAW"), "INVALID_ARGUMENT", "BUDGET_TOO_SMALL"),
    "too few scores": (dict(scores=[1.0] * 9), "INVALID_ARGUMENT", "INVALID_SCORES"),
    "too many scores": (dict(scores=[1.0] * 11), "INVALID_ARGUMENT", "INVALID_SCORES"),
    "scores of too few layers": (dict(scores=np.ones((1, 10))), "INVALID_ARGUMENT", "INVALID_SCORES"),
    "a NaN score": (dict(scores=[1.0] * 9 + [NAN]), "INVALID_ARGUMENT", "INVALID_SCORES"),
    "an infinite score": (dict(scores=[1.0] * 9 + [float("inf")]), "INVALID_ARGUMENT", "INVALID_SCORES"),
    "a negative score": (dict(scores=[1.0] * 9 + [-1.0]), "INVALID_ARGUMENT", "INVALID_SCORES"),
    "SCORES without scores": (dict(importance="SCORES"), "INVALID_ARGUMENT", "INVALID_SCORES"),
    "lambda NaN": (dict(decay_lambda=NAN), "INVALID_ARGUMENT", "INVALID_DECAY"),
    "lambda negative": (dict(decay_lambda=-1.0), "INVALID_ARGUMENT", "INVALID_DECAY"),
    "a tier twice": (dict(tiers=["RAW", "Q4", "Q4"]), "INVALID_ARGUMENT", "INVALID_TIERS"),
    "UNIFORM of DROP": (dict(allocator="UNIFORM", uniform_tier="DROP"), "INVALID_ARGUMENT", "INVALID_TIERS"),
    "PDTRIM without DROP": (dict(allocator="PDTRIM", budget=0.3), "INVALID_ARGUMENT", "DROP_NOT_ALLOWED"),
}


@pytest.mark.parametrize("call", ["Send", "Publish", "Plan", "Expect", "Fetch"])
@pytest.mark.parametrize("name", BAD_SENDS)
def test_request(name, call, sides, source, decode, counted, transfer_id):
    change, code, reason = BAD_SENDS[name]
    request = getattr(worker_service_pb2, call + "Request")()
    known = {field.name for field in request.DESCRIPTOR.fields}
    # Plan may go without a peer: it predicts no time then.
    if not set(change) - {"pool_id", "epoch"} <= known or (name, call) == ("no peer", "Plan"):
        with refused(code, reason):  # this call has no such field: it must still be refused where it has one
            rpc(source.worker.Send, _send_request(change, sides[0], decode, transfer_id), 20)
        return
    full = _send_request(change, sides[0], decode, transfer_id)
    for field, value in full.ListFields():
        if field.name in known:
            getattr(request, field.name).MergeFrom(value) if hasattr(value, "MergeFrom") else setattr(
                request, field.name, value
            )
    with refused(code, reason):
        rpc(getattr(source.worker, call), request, 20)


def _send_request(change, side, decode, transfer_id):
    change = dict(change)
    request = worker_service_pb2.SendRequest(
        transfer_id=transfer_id, peer=decode.peer, pool=side.pool.ref, token_count=TOKENS,
        blocks=[skv.block_runs(side.blocks[0])], policy=skv.policy(**RAW),
    )  # fmt: skip
    for name in ("pool_id", "epoch"):
        if name in change:
            setattr(request.pool, name, change.pop(name))
    for name, value in change.items():
        request.ClearField(name)
        if name == "blocks":
            request.blocks.extend(value)
        elif name == "part":
            request.part.CopyFrom(value)
        else:
            setattr(request, name, value)
    return request


@pytest.mark.parametrize("call", ["Send", "Plan"])
@pytest.mark.parametrize("name", BAD_POLICIES)
def test_policy(name, call, sides, source, decode, counted, transfer_id):
    change, code, reason = BAD_POLICIES[name]
    here, _ = sides
    policy = skv.policy(**{"allocator": "GREEDY", "budget": 0.9, **change})
    try:
        with refused(code, reason):
            if call == "Plan":
                source.plan(here.pool, TOKENS, here.blocks, policy)
            else:
                source.send(transfer_id, peer=decode.peer, pool=here.pool, token_count=TOKENS, blocks=here.blocks,
                            policy=policy)  # fmt: skip
    except AssertionError:
        if call == "Send":  # leave nothing behind that the next test would trip over
            source.cancel(transfer_id)
        raise


def test_unknown_tier_and_allocator(sides, source, counted):
    for change, reason in ((dict(tiers=[99]), "UNKNOWN_TIER"), (dict(allocator=77), "UNKNOWN_ALLOCATOR")):
        policy = policy_pb2.Policy(budget=0.9, **change)
        with refused("UNIMPLEMENTED", reason):
            source.plan(sides[0].pool, TOKENS, sides[0].blocks, policy)


def test_the_least_budget_is_the_least(sides, source, target, prefill, decode, transfer_id):
    """What the refusal names is accepted, and the next smaller number is not."""
    here, there = sides
    options = dict(allocator="GREEDY", importance="POSITION", sinks=0)
    with pytest.raises(skv.SpectrumKVError) as caught:
        source.plan(here.pool, TOKENS, here.blocks, skv.policy(budget=0.01, **options))
    least = float(caught.value.metadata["least_budget"])
    assert 0.01 < least < 1
    plan = source.plan(here.pool, TOKENS, here.blocks, skv.policy(budget=least, **options))
    assert plan.wire_bytes <= least * plan.kv_bytes
    with refused("INVALID_ARGUMENT", "BUDGET_TOO_SMALL"):
        source.plan(here.pool, TOKENS, here.blocks, skv.policy(budget=least * 0.9999, **options))
    sent, _ = move(transfer_id, source, target, prefill, decode, here, there, TOKENS,
                   policy=skv.policy(budget=least, **options))  # fmt: skip
    assert sent.wire_bytes == plan.wire_bytes


# Headers cost the more, the smaller the prompt: one token of one head of 8 values is the least there is.
TINY = {
    "one latent value": (dict(layers=[0], heads=1, has_v=False), "RAW", 6),
    "one token": (dict(layers=[0], heads=1), "RAW", 3.5),
    "one token of two tiers": (dict(layers=[0], heads=1), "GREEDY", 3.5),
    "a small model": (dict(layers=[0, 1], heads=2), "RAW", 2.25),
}


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_prompt_may_cost_more_than_its_values(name, source, target, prefill, decode, transfer_id):
    """A budget above 1 is taken where it is needed, the refusal names the least, and more than enough is no error."""
    shape, allocator, least = TINY[name]
    group = small_group(head_dim=8, **shape)
    rng = np.random.default_rng(5)
    planes = 2 if group.has_v else 1
    kv = random_words(rng, (len(group.layers), planes, 1, group.heads, 8), "float16")
    a, b = make_side(source, prefill, [group], {0: [3]}), make_side(target, decode, [group], {0: [4]})
    options = dict(allocator=allocator, tiers=["RAW"], importance="POSITION")
    with a.pool, b.pool:
        fill(a, [kv])
        for low in (0.001, 1.0, 1.1, least - 0.001):
            with refused("INVALID_ARGUMENT", "BUDGET_TOO_SMALL", least_budget=f"{least:.6f}"):
                source.plan(a.pool, 1, a.blocks, skv.policy(budget=low, **options))
        for number, budget in enumerate((least, least + 0.01, 10)):
            poison(b)
            sent, _ = move(f"{transfer_id}.{number}", source, target, prefill, decode, a, b, 1,
                           policy=skv.policy(budget=budget, **options))  # fmt: skip
            assert sent.wire_bytes == least * sent.kv_bytes and sent.budget == budget
            check(b, [kv])


CALLS_ON_NOBODY = {
    "GetTransfer": {}, "CancelTransfer": {}, "ReleaseTransfer": {},
    "ReportFirstToken": {"time_to_first_token_seconds": 1.0},
}  # fmt: skip


@pytest.mark.parametrize("call", [*CALLS_ON_NOBODY, "Advance", "WatchTransfer"])
def test_unknown_transfer(call, source, counted):
    request = getattr(worker_service_pb2, call + "Request")(**CALLS_ON_NOBODY.get(call, {}))
    if call == "Advance":
        request.transfer_id = "nobody"
    else:
        request.transfer.transfer_id = "nobody"
    with refused("NOT_FOUND", "UNKNOWN_TRANSFER"):
        answer = getattr(source.worker, call)(request, timeout=20)
        list(answer) if call == "WatchTransfer" else None


SHAPES = {
    "model": (dict(model="other"), {}, "model"),
    "revision": (dict(revision="other"), {}, "revision"),
    "heads": ({}, dict(heads=4), "groups[0].heads_total"),
    "tensor parallel rank": ({}, dict(heads_total=4, head_first=2), "groups[0].heads_total"),
    "head_dim": ({}, dict(head_dim=24), "groups[0].head_dim"),
    "layers": ({}, dict(layers=[0, 2]), "groups[0].layers"),
    "number of layers": ({}, dict(layers=[0, 1, 2]), "groups[0].layers"),
    "kind": ({}, dict(sliding_window_tokens=4), "groups[0].kind"),
    "latent": ({}, dict(has_v=False), "groups[0].kind"),
}


@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize("name", SHAPES)
def test_schemas_that_do_not_fit(name, pull, source, target, prefill, decode, transfer_id, next_is_served):
    options, changes, field = SHAPES[name]
    here = make_side(source, prefill, [small_group()], {0: [3, 1, 2]}, revision="r")
    there = make_side(target, decode, [small_group(**changes)], {0: [5, 0, 7]}, **{"revision": "r", **options})
    before = prefill.errors() + decode.errors()
    with here.pool, there.pool:
        poison(there)
        with pytest.raises(skv.TransferFailed) as failed:
            move(transfer_id, source, target, prefill, decode, here, there, TOKENS, policy=skv.policy(**RAW), pull=pull)
        assert (failed.value.code, failed.value.reason) == ("FAILED_PRECONDITION", "SCHEMA_MISMATCH")
        assert field in failed.value.report.message
        with refused("FAILED_PRECONDITION", "SCHEMA_MISMATCH"):  # the other half says so, too, and by the same field
            source.wait(transfer_id, timeout_s=20)
        assert field in source.get_transfer(transfer_id).message
        assert source.get_transfer(transfer_id).attempts <= 1  # nobody tried again: one exchange told both
        assert (there.pool.segment.memory == 0xA5).all()
    assert prefill.errors() + decode.errors() > before


def test_token_counts_that_differ(sides, source, target, decode, transfer_id, next_is_served):
    here, there = sides
    target.expect(transfer_id, pool=there.pool, token_count=TOKENS - 1, blocks=there.blocks)
    source.send(transfer_id, peer=decode.peer, pool=here.pool, token_count=TOKENS, blocks=here.blocks,
                policy=skv.policy(**RAW))  # fmt: skip
    for client in (target, source):
        with refused("FAILED_PRECONDITION", "SCHEMA_MISMATCH"):
            client.wait(transfer_id, timeout_s=20)
    assert "token_count" in source.get_transfer(transfer_id).message


def test_conversion_that_would_round(source, target, prefill, decode, transfer_id, next_is_served):
    here = make_side(source, prefill, [small_group()], {0: [3, 1, 2]})
    there = make_side(target, decode, [small_group(dtype="bfloat16")], {0: [5, 0, 7]})
    with here.pool, there.pool:
        with refused("FAILED_PRECONDITION", "SCHEMA_MISMATCH"):
            move(transfer_id, source, target, prefill, decode, here, there, TOKENS, policy=skv.policy(**RAW),
                 exact_conversion=True)  # fmt: skip
        with refused("FAILED_PRECONDITION", "SCHEMA_MISMATCH"):
            source.wait(transfer_id, timeout_s=20)
        for client in (source, target):
            told = client.get_transfer(transfer_id).message
            assert "groups[0].data_type: float16 and bfloat16" in told


def test_transfer_id_used_before(sides, source, target, prefill, decode, transfer_id, counted, next_is_served):
    here, there = sides
    policy = skv.policy(**RAW)
    move(transfer_id, source, target, prefill, decode, here, there, TOKENS, policy=policy)
    with refused("ALREADY_EXISTS", "TRANSFER_EXISTS"):
        source.send(transfer_id, peer=decode.peer, pool=here.pool, token_count=TOKENS, blocks=here.blocks, policy=policy)
    with refused("ALREADY_EXISTS", "TRANSFER_EXISTS"):
        target.expect(transfer_id, pool=there.pool, token_count=TOKENS, blocks=there.blocks)
    with refused("ALREADY_EXISTS", "TRANSFER_EXISTS"):
        source.publish(transfer_id, pool=here.pool, token_count=TOKENS, blocks=here.blocks, policy=policy)


def test_transfer_id_in_use(sides, target, decode, transfer_id, next_is_served):
    _, there = sides
    before = decode.errors()
    target.expect(transfer_id, pool=there.pool, token_count=TOKENS, blocks=there.blocks)
    target.expect(transfer_id, pool=there.pool, token_count=TOKENS, blocks=there.blocks)  # a repeat is no error
    with refused("ALREADY_EXISTS", "TRANSFER_EXISTS"):
        target.expect(transfer_id, pool=there.pool, token_count=TOKENS - 1, blocks=there.blocks)
    with refused("FAILED_PRECONDITION", "BLOCKS_IN_USE"):
        target.expect(transfer_id + "b", pool=there.pool, token_count=TOKENS, blocks=there.blocks)
    with refused("INVALID_ARGUMENT", "INVALID_BLOCKS"):
        target.expect(transfer_id + "c", pool=there.pool, token_count=TOKENS, blocks={0: [1, 1, 2]})
    target.cancel(transfer_id)
    assert decode.errors() > before


@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
def test_peer_that_is_not_there(pull, sides, source, target, prefill, decode, transfer_id, next_is_served):
    side, client, daemon = (sides[1], target, decode) if pull else (sides[0], source, prefill)
    before = daemon.errors()
    common = dict(peer="127.0.0.1:1", pool=side.pool, token_count=TOKENS, blocks=side.blocks, deadline_ms=20000)
    if pull:
        client.fetch(transfer_id, **common)
    else:
        client.send(transfer_id, policy=skv.policy(**RAW), **common)
    with refused("UNAVAILABLE", "PEER_UNREACHABLE"):
        client.wait(transfer_id, timeout_s=30)
    assert daemon.errors() > before


def test_peer_that_is_no_daemon(sides, source, prefill, transfer_id, counted, next_is_served):
    here, _ = sides
    source.send(transfer_id, peer=prefill.metrics_address, pool=here.pool, token_count=TOKENS, blocks=here.blocks,
                deadline_ms=15000, policy=skv.policy(**RAW))  # fmt: skip
    with pytest.raises(skv.TransferFailed) as failed:
        source.wait(transfer_id, timeout_s=30)
    assert failed.value.code in ("UNAVAILABLE", "UNIMPLEMENTED", "UNKNOWN") and failed.value.reason


def test_message_above_the_limit(sides, source, next_is_served):
    here, _ = sides
    block = worker_service_pb2.BlockData(plane=worker_service_pb2.PLANE_K, data=bytes(80 << 20))
    request = worker_service_pb2.PutBlocksRequest(pool=here.pool.ref, blocks=[block])
    with pytest.raises(grpc.RpcError) as caught:
        source.worker.PutBlocks(iter([request]), timeout=30)
    assert error_from_rpc(caught.value).code == "RESOURCE_EXHAUSTED"


BAD_PUTS = {
    "short data": (dict(data=b"x"), "INVALID_ARGUMENT", "INVALID_BLOCKS"),
    "unknown layer": (dict(layer=9), "INVALID_ARGUMENT", "INVALID_BLOCKS"),
    "unknown group": (dict(group=9), "INVALID_ARGUMENT", "INVALID_BLOCKS"),
    "no plane": (dict(plane=0), "INVALID_ARGUMENT", "INVALID_BLOCKS"),
    "unknown block": (dict(block=99), "NOT_FOUND", "UNKNOWN_BLOCK"),
}


@pytest.mark.parametrize("name", BAD_PUTS)
def test_put_blocks(name, sides, source, counted):
    change, code, reason = BAD_PUTS[name]
    block = dict(plane=worker_service_pb2.PLANE_K, block=6, data=bytes(4 * 2 * 16 * 2))
    request = worker_service_pb2.PutBlocksRequest(pool=sides[0].pool.ref)
    request.blocks.add(**{**block, **change})
    with refused(code, reason):
        source.worker.PutBlocks(iter([request]), timeout=20)


def test_hosts_that_may_not_be_dialled():
    """Nothing is dialled before the request is refused: an open port there hears nothing."""
    group = small_group()
    with socket.create_server(("127.0.0.1", 0)) as open_port:
        open_port.settimeout(0.5)
        place = f"127.0.0.1:{open_port.getsockname()[1]}"
        with running(peer__allowed_hosts="[10.1.0.0/16, localhost]") as daemon, daemon.client() as client:
            side = make_side(client, daemon, [group], {0: [1, 2, 3]})
            with side.pool:
                for call in (client.send, client.fetch):
                    for peer in (place, f"[::ffff:127.0.0.1]:{open_port.getsockname()[1]}", "169.254.169.254:80"):
                        with refused("PERMISSION_DENIED", "PEER_NOT_ALLOWED", peer=peer):
                            call(unique("host"), peer=peer, pool=side.pool, token_count=10, blocks=side.blocks)
                with pytest.raises(TimeoutError):
                    open_port.accept()
                client.send("allowed", peer=place.replace("127.0.0.1", "localhost"), pool=side.pool, token_count=10,
                            blocks=side.blocks)  # fmt: skip
                client.cancel("allowed")
            assert daemon.errors("permission_denied") == 6
