"""What is measured: policies at budgets, and where their scores come from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BUDGETS = (0.5, 0.4, 0.3, 0.25, 0.2, 0.16)
# The paper's tiers need .27 with everything counted.
PAPER_BUDGETS = (0.5, 0.4, 0.3)
PAPER_TIERS = ["RAW", "P8", "P4"]

OURS, ENERGIES, RECENT = "OPTIMAL, attention", "OPTIMAL, energies", "OPTIMAL, last 64 queries"
PAPER = "paper "  # prefix of the names of what the paper has


# Which are asked for needles, too: what the goals are about, and what else might lose them.
_NEEDLE_BUDGETS = (0.3, 0.2, 0.16)


@dataclass
class Variant:
    """scores: "" none; "scores", by layer; "mean", of all layers together; "queries": the daemon computes them from the last ones."""

    name: str
    budget: float
    policy: dict[str, Any] = field(default_factory=dict)
    scores: str = ""

    @property
    def key(self) -> str:
        return f"{self.name} @ {self.budget:g}"


def _optimal(name: str, budgets: tuple[float, ...], scores: str) -> list[Variant]:
    return [Variant(name, budget, {"allocator": "OPTIMAL"}, scores) for budget in budgets]


def _paper() -> list[Variant]:
    out = []
    for allocator in ("GREEDY", "SINK_PROTECT", "BALANCED", "RANDOM"):
        policy: dict[str, Any] = {"allocator": allocator, "tiers": PAPER_TIERS}
        if allocator == "RANDOM":
            policy["random_seed"] = 1
        out += [Variant(PAPER + allocator, budget, policy, "" if allocator == "RANDOM" else "mean") for budget in PAPER_BUDGETS]
    for allocator, tiers in (("TWO_TIER", ["RAW", "P8", "DROP"]), ("PDTRIM", ["RAW", "DROP"]),
                             ("SLIDING_WINDOW_SINK", ["RAW", "DROP"])):  # fmt: skip
        scores = "" if allocator == "PDTRIM" else "mean"
        out += [Variant(PAPER + allocator, budget, {"allocator": allocator, "tiers": tiers}, scores) for budget in BUDGETS]
    return out + [_uniform(PAPER + "UNIFORM", "P8", 0.53), _uniform(PAPER + "UNIFORM", "P4", 0.28)]


def _uniform(name: str, tier: str, budget: float) -> Variant:
    return Variant(f"{name} {tier}", budget, {"allocator": "UNIFORM", "uniform_tier": tier})


def all_variants() -> list[Variant]:
    out = _optimal(OURS, BUDGETS, "scores") + _optimal(ENERGIES, BUDGETS, "") + _optimal(RECENT, (0.3, 0.2), "queries")
    out += _optimal("OPTIMAL, attention, one order", (0.3, 0.2), "mean")
    out += [Variant("GREEDY, attention, one order", budget, {"allocator": "GREEDY"}, "mean") for budget in (0.3, 0.2)]
    out += [_uniform("UNIFORM", tier, budget) for tier, budget in (("Q8", 0.55), ("Q4", 0.31), ("Q3", 0.23), ("Q2", 0.16))]
    return out + _paper()


def needle_variants() -> list[Variant]:
    names = (OURS, ENERGIES, PAPER + "GREEDY", PAPER + "TWO_TIER", PAPER + "PDTRIM", PAPER + "SLIDING_WINDOW_SINK")
    chosen = [variant for variant in all_variants() if variant.name in names and variant.budget in _NEEDLE_BUDGETS]
    return chosen + [variant for variant in all_variants() if "UNIFORM" in variant.name]


def short_variants() -> list[Variant]:
    """Of a second family. Nothing that drops tokens: it could not say which of the others a window has."""
    wanted = {(name, budget) for name in (OURS, ENERGIES, RECENT) for budget in (0.3, 0.2)}
    wanted |= {(OURS, 0.5), ("UNIFORM Q4", 0.31), (PAPER + "GREEDY", 0.5), (PAPER + "GREEDY", 0.3), (PAPER + "UNIFORM P4", 0.28)}
    return [variant for variant in all_variants() if (variant.name, variant.budget) in wanted]


def quick_variants() -> list[Variant]:
    """What the order is asserted of."""
    wanted = {(OURS, 0.3), (OURS, 0.2), (ENERGIES, 0.3), (PAPER + "GREEDY", 0.3), (PAPER + "BALANCED", 0.3),
              (PAPER + "PDTRIM", 0.2), (PAPER + "SLIDING_WINDOW_SINK", 0.2)}  # fmt: skip
    return [variant for variant in all_variants() if (variant.name, variant.budget) in wanted]
