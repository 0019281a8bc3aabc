"""What a budget costs in quality: a real model's KV through two real daemons.

A prefix is prefilled, its KV travels from one daemon to the other, and the continuation is scored teacher-forced over what
arrived. KL: mean over its tokens of KL(next token with exact KV || with what arrived), in nats; dPPL: change of perplexity.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client/python/src"), str(ROOT / "client/examples/python/demo")]

import corpus  # noqa: E402
import families  # noqa: E402
import further  # noqa: E402
import probe_run  # noqa: E402
import refine_curve  # noqa: E402
import report  # noqa: E402
from daemons import Pair, find_program  # noqa: E402
from goals import goals, order_faults  # noqa: E402
from measure import Log, Results, measure_needle, measure_segment, version  # noqa: E402
from mover import Mover  # noqa: E402


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--daemon", help="the spectrumkvd to run; else the one scripts/demo builds")
    parser.add_argument("--model", choices=families.NAMES, default=families.NAMES[0])
    parser.add_argument("--text", type=pathlib.Path, help="another text than the committed one, such as WikiText-2 test")
    parser.add_argument("--segments", type=int, help="by default 16, of --refine-curve 8")
    parser.add_argument("--needles", type=int, default=corpus.TRIALS)
    parser.add_argument("--prefix", type=int, help="tokens; by default 768, of --refine-curve 512")
    parser.add_argument("--scored", type=int, help="tokens; by default 256, of a second family 128, of --refine-curve 512")
    parser.add_argument("--quick", action="store_true", help="the policies whose order is asserted, 2 segments, no needles")
    parser.add_argument("--summary", action="store_true", help="print only the goals")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no segment or trial after so many")
    parser.add_argument("--json", type=pathlib.Path, help="write all measurements there, as they come")
    parser.add_argument("--from", dest="load", type=pathlib.Path, help="measure nothing: what --json wrote before")
    parser.add_argument("--page", action="store_true", help="write docs/quality.md and docs/quality.png, or the page of --refine-curve")
    parser.add_argument("--check", action="store_true", help="fail where the order is not as it must be, whatever the figures")
    parser.add_argument("--further", action="store_true", help="what further tiers could win, on the KV of tests/data")
    probe_run.arguments(parser)
    refine_curve.arguments(parser)
    args = parser.parse_args()
    if args.model != families.NAMES[0] and (args.page or args.probe or args.refine_curve):
        parser.error(f"--page, --probe and --refine-curve are about {families.NAMES[0]}")
    if args.refine_curve:
        return refine_curve.with_defaults(args)
    args.segments, args.prefix = args.segments or 16, args.prefix or 768
    if args.quick:
        args.segments, args.needles = min(args.segments, 2), 0
    return args


def measure(args: argparse.Namespace) -> Results:
    program = find_program(args.daemon, ROOT)
    family = families.find(args.model, ROOT / "build-quality")
    model, scored = family.load(), args.scored or family.scored
    variants = family.quick_variants if args.quick else family.variants
    text = args.text.name if args.text else "tests/data/wikipedia_excerpts"
    about = {"daemon": version(program), "date": time.strftime("%Y-%m-%d", time.gmtime()), "text": text, "prefix": args.prefix,
             "scored": scored, "model": family.title}  # fmt: skip
    results, log, begin = Results(about), Log(args.summary), time.monotonic()
    segments = corpus.segments(model, args.segments, args.prefix, scored, args.text)
    # In turn, so that a run that is cut short has both.
    steps: list[tuple[Any, Any, Any]] = [(i / args.segments, measure_segment, item) for i, item in enumerate(segments)]
    needles = corpus.needles(model, args.needles, args.prefix)
    steps += [(i / args.needles, measure_needle, item) for i, item in enumerate(needles)]
    shape = (model.layers, 2, args.prefix, model.kv_heads, model.head_dim)
    with Pair(program, keep=False) as pair, Mover(pair, shape, about["model"]) as mover:
        for _, step, item in sorted(steps, key=lambda entry: entry[0]):
            if time.monotonic() - begin > 60 * args.minutes:
                log(f"the time is over before {item.name}")
                break
            step(model, mover, item, family.needle_variants if step is measure_needle else variants, results)
            log(item.name)
            results.save(args.json)
    return results


def main() -> int:
    args = arguments()
    if args.further:
        return further.run()
    if args.probe:
        return probe_run.run(args.daemon, ROOT, args.tiers.split(","), args.prompt_characters)
    if args.refine_curve:
        return refine_curve.run(args, ROOT)
    results = Results.load(args.load) if args.load else measure(args)
    if not args.summary:
        print(report.table(results))
        if results.spread:
            least, most = min(results.spread), max(results.spread)
            print(f"deviation of the largest key channel over the median one, by layer: {least:.1f} to {most:.1f}")
        if results.perplexity:
            print(f"perplexity over exact KV: {', '.join(f'{value:.1f}' for value in results.perplexity)}")
    if families.has_goals(results.about["model"]):
        for goal in goals(results):
            print(goal)
    else:
        print("\n".join(report.against_paper(results)))
    if args.page:
        report.write_page(results, ROOT / "docs")
    faults = order_faults(results) if args.check else []
    for fault in faults:
        print(f"ORDER: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
