"""What a budget costs in quality: a real model's KV through two real daemons.

A prefix is prefilled, its KV travels from one daemon to the other, and the continuation is scored teacher-forced over what
arrived. KL: mean over its tokens of KL(next token with exact KV || with what arrived), in nats; dPPL: change of perplexity.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client/python/src"), str(ROOT / "client/examples/python/demo")]

from daemons import Pair, find_program  # noqa: E402
from model import Model, find_gguf  # noqa: E402

import spectrumkv as skv  # noqa: E402

# (budget, KL at most, dPPL in % at most), with attention for importance and with energies alone.
GOALS = ((0.5, 0.00006, 0.1), (0.4, 0.00025, 0.15), (0.3, 0.0009, 0.2), (0.25, 0.0022, 0.3), (0.2, 0.006, 1.0),
         (0.16, 0.015, 2.0))  # fmt: skip
ENERGY_GOALS = ((0.3, 0.0024), (0.2, 0.011))
BLOCK_TOKENS = 16


@dataclass
class Variant:
    name: str
    budget: float
    policy: dict[str, Any]
    scores: str = ""  # "scores" or "scores_last" of the Prefill, or "mean": of the scores of all layers


def variants(quick: bool) -> list[Variant]:
    out = [Variant("OPTIMAL, attention", budget, {"allocator": "OPTIMAL"}, "scores") for budget, _, _ in GOALS]
    out += [Variant("OPTIMAL, energies", budget, {"allocator": "OPTIMAL"}) for budget, _ in ENERGY_GOALS]
    if quick:
        return [variant for variant in out if variant.budget in (0.3, 0.2)]
    out += [Variant("OPTIMAL, last 64 queries", 0.2, {"allocator": "OPTIMAL"}, "scores_last")]
    out += [Variant("OPTIMAL, attention, one order", budget, {"allocator": "OPTIMAL"}, "mean") for budget in (0.3, 0.2)]
    for budget in (0.3, 0.2):
        out.append(Variant("GREEDY, attention, one order", budget, {"allocator": "GREEDY"}, "mean"))
    out.append(Variant("paper GREEDY", 0.3, {"allocator": "GREEDY", "tiers": ["RAW", "P8", "P4"]}, "mean"))
    out.append(Variant("UNIFORM Q4", 0.31, {"allocator": "UNIFORM", "uniform_tier": "Q4"}))
    return out


class Mover:
    """Sends the KV of one prefix again and again."""

    def __init__(self, pair: Pair, kv: np.ndarray) -> None:
        self.peer = pair.decode.addresses.peer
        self.clients = [skv.Client(daemon.addresses.worker_socket) for daemon in (pair.prefill, pair.decode)]
        layers, _, self.tokens, heads, head_dim = kv.shape
        self.blocks = list(range(-(-self.tokens // BLOCK_TOKENS)))
        group = skv.Group(layers=range(layers), heads=heads, head_dim=head_dim, block_tokens=BLOCK_TOKENS,
                          num_blocks=len(self.blocks))  # fmt: skip
        self.pools = [client.shared_memory_pool([group], model="SmolLM2-135M") for client in self.clients]
        self.pools[0].write_tokens(kv, self.blocks)

    def move(self, name: str, policy: Any) -> tuple[np.ndarray, float]:
        """What arrived, and the share of the raw bytes that crossed the wire."""
        self.pools[1].segment.memory[:] = 0xA5
        self.clients[1].expect(name, pool=self.pools[1], token_count=self.tokens, blocks=self.blocks)
        self.clients[0].send(name, peer=self.peer, pool=self.pools[0], token_count=self.tokens, blocks=self.blocks,
                             policy=policy)  # fmt: skip
        report = self.clients[1].wait(name, timeout_s=120)
        return self.pools[1].read_tokens(self.tokens, self.blocks), report.wire_bytes / report.kv_bytes

    def close(self) -> None:
        for pool in self.pools:
            pool.close()
        for client in self.clients:
            client.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--daemon", help="the spectrumkvd to run; else the one scripts/demo builds")
    parser.add_argument("--text", type=pathlib.Path, help="a text file, as WikiText-2 test; else this repository's documents")
    parser.add_argument("--segments", type=int, default=2)
    parser.add_argument("--prefix", type=int, default=768)
    parser.add_argument("--scored", type=int, default=256)
    parser.add_argument("--quick", action="store_true", help="budgets .3 and .2 of OPTIMAL alone")
    parser.add_argument("--summary", action="store_true", help="print only the goals")
    parser.add_argument("--json", type=pathlib.Path, help="write the rows there too")
    args = parser.parse_args()
    model = Model(find_gguf())
    texts = [args.text] if args.text else [ROOT / "README.md", *sorted((ROOT / "docs").glob("a*.md")), ROOT / "CONTRIBUTING.md"]
    ids = model.encode("\n\n".join(path.read_text() for path in texts))
    need = args.prefix + args.scored
    if len(ids) < need * args.segments:
        raise SystemExit(f"quality: the text has {len(ids)} tokens, {args.segments} segments need {need * args.segments}")
    rows: dict[tuple[str, float], list[tuple[float, float, float]]] = {}
    for segment in range(args.segments):
        part = ids[segment * need : (segment + 1) * need]
        prefill = model.prefill(part[: args.prefix])
        tail = part[args.prefix :]
        exact = model.continue_over(tail, prefill.kv)
        nll = -exact[np.arange(len(tail) - 1), tail[1:]].mean()
        with Pair(find_program(args.daemon, ROOT), keep=False) as pair:
            mover = Mover(pair, prefill.kv)
            for number, variant in enumerate(variants(args.quick)):
                options = dict(variant.policy, budget=variant.budget)
                if variant.scores == "mean":
                    options["scores"] = prefill.scores.mean(axis=0)
                elif variant.scores:
                    options["scores"] = getattr(prefill, variant.scores)
                landed, wire = mover.move(f"q{number}", skv.policy(**options))
                lossy = model.continue_over(tail, landed)
                kl = float((np.exp(exact) * (exact - lossy)).sum(axis=1).mean())
                change = float(np.exp(-lossy[np.arange(len(tail) - 1), tail[1:]].mean() - nll) - 1) * 100
                rows.setdefault((variant.name, variant.budget), []).append((wire, kl, change))
            mover.close()
    report(rows, args)
    return 0


def report(rows: dict[tuple[str, float], list[tuple[float, float, float]]], args: argparse.Namespace) -> None:
    means = {key: np.mean(values, axis=0) for key, values in rows.items()}
    if not args.summary:
        print(f"{args.segments} segments of {args.prefix} + {args.scored} tokens")
        print(f"{'policy':<30}{'budget':>7}{'wire':>8}{'KL':>10}{'dPPL %':>9}")
        for (name, budget), (wire, kl, change) in means.items():
            print(f"{name:<30}{budget:>7.2f}{wire:>8.4f}{kl:>10.5f}{change:>9.2f}")
    wanted = [("OPTIMAL, attention", budget, kl, ppl) for budget, kl, ppl in GOALS]
    wanted += [("OPTIMAL, energies", budget, kl, None) for budget, kl in ENERGY_GOALS]
    for name, budget, most_kl, most_change in wanted:
        if (name, budget) not in means:
            continue
        _, kl, change = means[(name, budget)]
        short = name.replace("OPTIMAL, ", "")
        print(f"goal {short}-{budget}-KL measured {kl:.5f} wanted <={most_kl:.5f} {'ok' if kl <= most_kl else 'short'}")
        if most_change is not None:
            verdict = "ok" if abs(change) <= most_change else "short"
            print(f"goal {short}-{budget}-dPPL measured {change:.2f}% wanted <={most_change}% {verdict}")
    if args.json:
        args.json.write_text(json.dumps([[*key, *map(float, value)] for key, value in means.items()]) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
