"""What refine_curve.py has measured, and its table, plot and page."""

from __future__ import annotations

import json
import pathlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from goals import Goal
from numpy.typing import NDArray

BASE, EXACT = "base only", "exact from the start"
_SPANS = ((0, 32), (32, 64), (64, 128), (128, 256), (256, 512))
_SMOOTHED = 16


def after(tokens: int) -> str:
    return f"exact after {tokens}"


@dataclass
class Curves:
    """about: what was run, with the switches. kl: by budget and variant, for each segment the KL at each position, nats.
    wire: by budget, for each segment the shares of the raw bytes that the base and its refinement put on the wire.
    split: for each segment, what rounding alone does to a continuation that is made in two calls, KL."""

    about: dict[str, Any] = field(default_factory=dict)
    kl: dict[str, dict[str, list[list[float]]]] = field(default_factory=dict)
    wire: dict[str, list[list[float]]] = field(default_factory=dict)
    split: list[float] = field(default_factory=list)

    @property
    def budgets(self) -> list[float]:
        return [float(budget) for budget in self.kl]

    @property
    def switches(self) -> list[int]:
        return list(self.about["switches"])

    @property
    def variants(self) -> list[str]:
        return [BASE, *(after(switch) for switch in self.switches), EXACT]

    def add(self, budget: float, variant: str, kl: NDArray[np.float64]) -> None:
        self.kl.setdefault(f"{budget:g}", {}).setdefault(variant, []).append(kl.tolist())

    def of(self, budget: float, variant: str) -> NDArray[np.float64]:
        """[segments, positions]."""
        return np.array(self.kl[f"{budget:g}"][variant])

    def residual(self, budget: float, switch: int, span: slice | None = None) -> float:
        """KL from the switch on, or in `span`, of what the base only has there; both are means over all segments."""
        span = span or slice(switch, None)
        return float(self.of(budget, after(switch))[:, span].mean() / self.of(budget, BASE)[:, span].mean())

    def residuals(self, budget: float, switch: int) -> NDArray[np.float64]:
        """The same of each segment alone."""
        ratios: NDArray[np.float64] = (self.of(budget, after(switch))[:, switch:].mean(axis=1)
                                       / self.of(budget, BASE)[:, switch:].mean(axis=1))  # fmt: skip
        return ratios

    def save(self, path: pathlib.Path | None) -> None:
        if path is not None:
            path.write_text(json.dumps(vars(self), ensure_ascii=False) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: pathlib.Path) -> Curves:
        return Curves(**json.loads(path.read_text(encoding="utf-8")))


_PAGE = """\
# Refinement: what the next tokens notice

`scripts/quality --refine-curve` decodes over a coarse prefix, refines it to the exact words on the way, and scores every token. This
page was written by `scripts/quality --refine-curve --page` from one run: {daemon}, {date}.

## Protocol

{model}, float32 arithmetic in numpy, as in [quality.md](quality.md). A prefix of {prefix} tokens is prefilled; its KV
goes through two real daemons at a small budget (OPTIMAL, weighed by the last 64 queries), with `retain_seconds` and `refinable`. When
it has arrived, its words are read from the destination's blocks. Then `refine` of everything to RAW, staged: the blocks must be
unchanged until `apply_refinement`, which must say `exact`, and equal the source's bit for bit from then on; otherwise the run fails.
The next {scored} tokens are scored teacher-forced. KL at a position: of the token after it, KL(exact || variant), in nats.
{segments} segments, each of one passage of Wikipedia ([tests/data/wikipedia_excerpts](../tests/data/README.md)).

- base only: all tokens over what arrived first
- exact after n: the first n over that, the others over the refined blocks **and the KV that the first n have made**, which stays as it
  is, as in an engine. So the curve does not fall to 0 but to what those tokens remember
- exact from the start: all tokens over the refined blocks. 0 at every position, or the run fails

![KL by position](refinement_curve.png)

## Measured

Mean KL over positions; last, from n on, its share of base only's at the same positions: of all segments, and from the least to the
most of one segment:

{table}

{findings}

{goals}
"""


def _kl(value: float) -> str:
    return "0" if value == 0 else f"{value:.7f}"


def _spans(curves: Curves) -> list[tuple[int, int]]:
    scored = curves.about["scored"]
    return [(first, min(last, scored)) for first, last in _SPANS if first < scored]


def table(curves: Curves) -> str:
    spans = _spans(curves)
    lines = ["| budget | prefix | " + " | ".join(f"{first} to {last - 1}" for first, last in spans) + " | of base only |",
             "|---" * (len(spans) + 3) + "|"]  # fmt: skip
    for budget in curves.budgets:
        residuals = {after(switch): f"{curves.residual(budget, switch):.4f} ({curves.residuals(budget, switch).min():.4f} to "
                     f"{curves.residuals(budget, switch).max():.4f})" for switch in curves.switches}  # fmt: skip
        for variant in curves.variants:
            cells = [_kl(float(curves.of(budget, variant)[:, first:last].mean())) for first, last in spans]
            lines.append(f"| {budget:g} | {variant} | {' | '.join(cells)} | {residuals.get(variant, '')} |")
    return "\n".join(lines)


def findings(curves: Curves) -> list[str]:
    """As a Markdown list."""
    lines = []
    for budget in curves.budgets:
        base, refined = np.array(curves.wire[f"{budget:g}"]).mean(axis=0)
        soon, late = ([curves.residual(budget, switch, span(switch)) for switch in curves.switches]
                      for span in (lambda switch: slice(switch, switch + _SMOOTHED), lambda _: slice(-_SMOOTHED, None)))  # fmt: skip
        lines.append(f"- at {budget:g} the base moved {base:.3f} of the raw bytes and its refinement {refined:.3f}, together "
                     f"{base + refined:.3f};\n  of the first {_SMOOTHED} tokens after EXACT the KL is {min(soon):.3f} to {max(soon):.3f} of "
                     f"base only's, of the last {_SMOOTHED} {min(late):.4f} to {max(late):.4f}")  # fmt: skip
    lines.append("- over exact KV, a continuation that is made in two calls differs from one in a single call by a KL of at most "
                 f"{max(curves.split):.1e}:\n  what is left after EXACT is no rounding")  # fmt: skip
    return lines


def smoothed(kl: NDArray[np.float64]) -> NDArray[np.float64]:
    """Running mean of _SMOOTHED positions, of fewer at the ends."""
    window = np.ones(min(_SMOOTHED, len(kl)))
    out: NDArray[np.float64] = np.convolve(kl, window, "same") / np.convolve(np.ones(len(kl)), window, "same")
    return out


def plot(curves: Curves, path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    count = len(curves.budgets)
    figure, all_axes = pyplot.subplots(1, count, figsize=(2 + 5 * count, 4.5), sharey=True, squeeze=False)
    for axes, budget in zip(all_axes[0], curves.budgets, strict=True):
        axes.plot(smoothed(curves.of(budget, BASE).mean(axis=0)), color="black", label=BASE)
        for number, switch in enumerate(curves.switches):
            # Smoothed on its own: no mean over both sides of the switch.
            kl = smoothed(curves.of(budget, after(switch))[:, switch:].mean(axis=0))
            axes.plot(range(switch, switch + len(kl)), kl, color=f"C{number}", label=after(switch))
            axes.axvline(switch, color=f"C{number}", linestyle=":", linewidth=1)
        axes.plot([], [], color="gray", linestyle="--", label=f"{EXACT}: 0, not to be shown")
        axes.set(yscale="log", title=f"budget {budget:g}", xlabel="tokens of the continuation")
        axes.grid(visible=True, which="major", alpha=0.3)
    all_axes[0][0].set_ylabel(f"KL, nats, mean of {_SMOOTHED} positions")
    all_axes[0][-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def write_page(curves: Curves, goals: list[Goal], folder: pathlib.Path) -> None:
    segments = len(curves.split)
    lines = ["| goal | measured | wanted at most | |", "|---|---|---|---|"]
    lines += [f"| {goal.name} | {goal.measured:.5f} | {goal.wanted:.5f} | {'ok' if goal.met else 'short'} |" for goal in goals]
    page = _PAGE.format(segments=segments, table=table(curves), findings="\n".join(findings(curves)), goals="\n".join(lines),
                        **curves.about)  # fmt: skip
    (folder / "refinement-quality.md").write_text(page, encoding="utf-8")
    plot(curves, folder / "refinement_curve.png")
