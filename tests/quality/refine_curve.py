"""KL token by token of a continuation that begins over a coarse prefix, which is refined to EXACT on its way.

The prefix's KV travels through two real daemons and is refined there. What the continuation has computed over the coarse prefix
stays as it is, as in an engine: so after EXACT the KL falls to what these tokens remember, not to 0.
"""

from __future__ import annotations

import argparse
import pathlib
import time

import corpus
import families
import numpy as np
import refine_report
from daemons import Pair, find_program
from goals import Goal
from measure import Log, policy_of, version
from model import Floats, Model
from mover import Mover
from numpy.typing import NDArray
from refine_report import BASE, EXACT, Curves, after
from variants import RECENT, Variant

BUDGETS = (0.2, 0.15)
SWITCHES = (32, 64, 128)
# Of the KL with the base only, at the same positions.
RESIDUAL = 0.1
# What a continuation in two calls may differ from one in a single call: float32's rounding, and no more.
ROUNDING_KL = 1e-6
_RETAIN_S = 60.0


def divergence(exact: Floats, other: Floats) -> NDArray[np.float64]:
    """KL(exact || other) at each position in nats, of log-probabilities [positions, vocabulary].

    Normalised again, in float64: what is left after EXACT is less than float32's rounding of a sum of 50,000 terms.
    """
    out = np.empty(len(exact))
    for position, rows in enumerate(zip(exact, other, strict=True)):
        p, q = (row.astype(np.float64) for row in rows)
        p, q = p - np.log(np.exp(p).sum()), q - np.log(np.exp(q).sum())
        out[position] = np.exp(p) @ (p - q)
    return out


def split_divergence(model: Model, tail: corpus.Ids, kv: NDArray[np.float16], exact: tuple[Floats, Floats], at: int) -> float:
    """The largest KL that a continuation over exact KV has of being made in two calls, the second from `at` on."""
    rest = model.continue_over(tail[at:], np.concatenate([kv, exact[1][:, :, :at]], axis=2), kv.shape[2] + at)
    return float(divergence(exact[0][at:], rest).max())


def measure_segment(
    model: Model, mover: Mover, segment: corpus.Segment, budgets: list[float], switches: list[int], curves: Curves
) -> None:
    """Adds the curves of one segment. Raises NotExact."""
    prefill, tail, position = model.prefill(segment.prefix), segment.tail, len(segment.prefix)
    mover.load(prefill.kv)
    exact, own_exact = model.continue_keeping(tail, prefill.kv, position)
    curves.split.append(split_divergence(model, tail, prefill.kv, (exact, own_exact), switches[0]))
    for budget in budgets:
        variant = Variant(RECENT, budget, {"allocator": "OPTIMAL", "retain_seconds": _RETAIN_S}, "queries")
        base, refined = mover.move_and_refine(policy_of(variant, prefill))
        curves.wire.setdefault(f"{budget:g}", []).append([base.wire, refined.wire])
        curves.add(budget, EXACT, divergence(exact, model.continue_over(tail, refined.kv, position)))
        coarse, own = model.continue_keeping(tail, base.kv, position)
        before = divergence(exact, coarse)
        curves.add(budget, BASE, before)
        for switch in switches:
            past = np.concatenate([refined.kv, own[:, :, :switch]], axis=2)
            rest = model.continue_over(tail[switch:], past, position + switch)
            curves.add(budget, after(switch), np.concatenate([before[:switch], divergence(exact[switch:], rest)]))


def faults(curves: Curves) -> list[str]:
    """What is wrong whatever the figures: EXACT is no KL at all, and refining helps from where it is applied."""
    out = []
    if max(curves.split, default=1) > ROUNDING_KL:
        out.append(f"a continuation in two calls is another than in one, KL {max(curves.split, default=1):g}")
    for budget in curves.budgets:
        if not (curves.of(budget, EXACT) == 0).all():
            out.append(f"{EXACT} at {budget:g}: KL is {curves.of(budget, EXACT).max():g} somewhere, not 0")
        for switch in curves.switches:
            if not curves.residual(budget, switch) < 1:
                out.append(f"{after(switch)} at {budget:g}: KL is {curves.residual(budget, switch):g} of {BASE}, not lower")
    return out if curves.budgets else ["nothing was measured"]


def goals(curves: Curves) -> list[Goal]:
    return [Goal(f"refine-curve-after-exact-{budget:g}", max(curves.residual(budget, switch) for switch in curves.switches), RESIDUAL)
            for budget in curves.budgets]  # fmt: skip


def measure(args: argparse.Namespace, root: pathlib.Path) -> Curves:
    program = find_program(args.daemon, root)
    family = families.find(args.model, root / "build-quality")
    model = family.load()
    budgets, switches = ([BUDGETS[0]], [SWITCHES[0]]) if args.quick else (list(BUDGETS), list(SWITCHES))
    text = args.text.name if args.text else "tests/data/wikipedia_excerpts"
    curves = Curves({"daemon": version(program), "date": time.strftime("%Y-%m-%d", time.gmtime()), "text": text,
                     "prefix": args.prefix, "scored": args.scored, "model": family.title, "switches": switches})  # fmt: skip
    log, begin = Log(args.summary), time.monotonic()
    segments = corpus.segments(model, args.segments, args.prefix, args.scored, args.text)
    shape = (model.layers, 2, args.prefix, model.kv_heads, model.head_dim)
    with Pair(program, keep=False) as pair, Mover(pair, shape, family.title) as mover:
        for segment in segments:
            if time.monotonic() - begin > 60 * args.minutes:
                log(f"the time is over before {segment.name}")
                break
            measure_segment(model, mover, segment, budgets, switches, curves)
            log(segment.name)
            curves.save(args.json)
    return curves


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--refine-curve", action="store_true", help="instead: KL by position where the prefix is refined meanwhile")


def with_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """Its own, as a committed passage has hardly more than 1024 tokens. --quick: one segment, one budget, one switch."""
    args.segments, args.prefix, args.scored = args.segments or 8, args.prefix or 512, args.scored or 512
    if args.quick:
        args.segments, args.scored = 1, min(args.scored, 128)
    return args


def run(args: argparse.Namespace, root: pathlib.Path) -> int:
    curves = Curves.load(args.load) if args.load else measure(args, root)
    if not args.summary:
        print(refine_report.table(curves))
        print("\n".join(refine_report.findings(curves)))
    reached = goals(curves)
    for goal in reached:
        print(goal)
    if args.page:
        refine_report.write_page(curves, reached, root / "docs")
    wrong = faults(curves)
    for fault in wrong:
        print(f"ORDER: {fault}")
    return 1 if wrong else 0
