"""Two daemons, two workers, transfers both ways, and a fault at a random moment: once for each point.

SPECTRUMKV_FAULT_SEED, SPECTRUMKV_FAULT_POINTS (20), SPECTRUMKV_FAULT_POINT (one of them alone). Without a seed each run
has another; a failure prints what repeats it.
"""

import os
import random
import time
from collections import Counter

import invariants
import plan
import pytest
from actors import World
from authority import Ca
from torture import run_point

SEED = int(os.environ.get("SPECTRUMKV_FAULT_SEED") or random.randrange(1 << 31))
POINTS = int(os.environ.get("SPECTRUMKV_FAULT_POINTS") or 20)
ONLY = os.environ.get("SPECTRUMKV_FAULT_POINT")
# A fault that came when all was over says nothing: its point is tried again, a little otherwise.
ATTEMPTS = 4


def _numbers():
    return [int(ONLY)] if ONLY else range(POINTS)


def _report(hits, attempts, seconds):
    print(f"\nseed {SEED}: {sum(hits.values())} points in {seconds:.0f} s; hits per fault and moment:")
    for kind in plan.KINDS:
        by_moment = ", ".join(f"{moment} {hits[kind, moment]}" for moment in plan.MOMENTS if hits[kind, moment])
        print(f"  {kind:24} {by_moment or '-'}")
    print(f"  {attempts - sum(hits.values())} faults came too late to meet a transfer and were tried again")


def test_points(surroundings, tmp_path, capsys):
    net, disk_bytes, missing = surroundings
    kinds = plan.KINDS if net else plan.PROCESS_KINDS
    hits, attempts, begin = Counter(), 0, time.monotonic()
    world, secured, outcomes, refined = None, None, Counter(), Counter()
    ca = Ca(tmp_path)
    try:
        for number in _numbers():
            if world is None or plan.secured(number) != secured:
                if world is not None:
                    world.close()
                secured = plan.secured(number)
                keys = [ca.issue(f"side{side}-{number}", 3) if secured else {} for side in range(2)]
                world = World(SEED, net, keys=keys, disk_bytes=disk_bytes)
            for attempt in range(ATTEMPTS):
                point = plan.make_point(SEED, number, kinds, attempt)
                attempts += 1
                record, wrong = run_point(world, point)
                outcomes.update(f"{half.state} {half.reason}".strip() for half in record.halves.values())
                refined.update(f"{found.state} {found.reason}".strip() for found in record.refinements.values())
                if wrong:
                    _tell(point, record, wrong, world)
                if record.hit:
                    hits[point.kind, point.moment] += 1
                    break
    finally:
        with capsys.disabled():
            _report(hits, attempts, time.monotonic() - begin)
            for what, ends in (("ends", outcomes), ("refinements", refined)):
                print(f"  {what}: " + ", ".join(f"{end} {count}" for end, count in ends.most_common()))
            if world is not None:
                print(f"  at last: {world.now[0]}\n           {world.now[1]}")
            if missing:
                print(f"SKIPPED: {', '.join(plan.LINK_KINDS + plan.DISK_KINDS)}: {missing}")
        if world is not None:
            world.close()
    if not ONLY and POINTS >= len(kinds):
        met = Counter({kind: sum(hits[kind, moment] for moment in plan.MOMENTS) for kind in kinds})
        assert invariants.unhit(kinds, met) == []
        assert invariants.unhit(plan.MOMENTS, Counter(m for (_, m), n in hits.items() if n)) == []


def _tell(point, record, wrong, world):
    lines = [*wrong, str(point), f"fired {record.fired_at:.3f}, healed {record.healed_at:.3f}"]
    lines += [f"  {half}: joined {half.joined_at:.3f}, ended {half.ended_at:.3f}, attempts {half.attempts}"
              for half in record.halves.values()]  # fmt: skip
    lines.append(f"repeat: SPECTRUMKV_FAULT_SEED={SEED} SPECTRUMKV_FAULT_POINT={point.number} scripts/test --match fault_torture")
    for side in range(2):
        lines += [f"--- daemon {'AB'[side]}", *(line[:200] for line in world.daemons[side].log().splitlines()[-25:])]
    pytest.fail("\n".join(lines), pytrace=False)
