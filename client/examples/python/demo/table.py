"""What the demo prints."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import numpy as np
from cases import Prompt
from daemons import Daemon, Pair
from numpy.typing import NDArray
from workers import Outcome

from spectrumkv import wire

# Best first, as a person would rank them.
_RANK = (wire.Tier.RAW, wire.Tier.Q8, wire.Tier.P8, wire.Tier.Q4, wire.Tier.P4, wire.Tier.Q3, wire.Tier.Q2)
_HEAD = (
    f"{'allocator':<20}{'budget':>7} {'wire KiB':>9} {'saved':>6}  {'tokens per tier, K':<24}{'V':<24}"
    f"{'1st layer':>9} {'commit':>8} {'GB/s':>6} {'K error':>8} {'V error':>8} {'V error*':>8}  check"
)
_METRICS = (
    "spectrumkv_transfers_total", "spectrumkv_kv_bytes_total", "spectrumkv_wire_bytes_total",
    "spectrumkv_saved_bytes_total", "spectrumkv_tokens_total", "spectrumkv_codec_info",
)  # fmt: skip


def _coloured(text: str, code: int) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if sys.stdout.isatty() else text


def head(prompt: Prompt) -> None:
    layers, _, tokens, heads, dim = prompt.kv.shape
    print(
        f"{prompt.name}: {tokens} tokens of WikiText-2, {layers} layers, {heads} KV heads of {dim}, float16: "
        f"{prompt.kv.nbytes / 1024:.0f} KiB of KV"
    )
    print("prefill pool: pages of 16 tokens, NHD; decode pool: pages of 32 tokens, HND, other pages\n")
    print(_HEAD)
    print("-" * len(_HEAD))


def row(outcome: Outcome, found: Mapping[str, object], first_s: float, commit_s: float) -> None:
    k_error, v_error, attended = found["errors"]  # type: ignore[misc]
    report = outcome.sent
    saved = 100 * (1 - report.wire_bytes / report.kv_bytes)
    budget = "none" if outcome.case.budget > 1 else f"{outcome.case.budget:.2f}"
    verdict = _coloured("WRONG", 31) if outcome.problems else _coloured("bit-exact", 32)
    print(
        f"{outcome.case.label:<20}{budget:>7} {report.wire_bytes / 1024:>9.1f} {saved:>5.1f}%  "
        f"{_tiers(found['tiers_k']):<24}{_tiers(found['tiers_v']):<24}"  # type: ignore[arg-type]
        f"{1e3 * first_s:>6.1f} ms {1e3 * commit_s:>5.1f} ms {report.kv_bytes / commit_s / 1e9:>6.2f} "
        f"{k_error:>8.5f} {v_error:>8.5f} {attended:>8.5f}  {verdict}",
        flush=True,
    )
    for problem in outcome.problems:
        print(f"    {_coloured(problem, 31)}")


def _tiers(tiers: NDArray[np.uint8]) -> str:
    counts = [(tier, int((tiers == tier).sum())) for tier in _RANK]
    return " ".join(f"{tier.name}:{count}" for tier, count in counts if count)


def legend() -> None:
    print(
        "\nsaved: KV bytes that did not travel, everything counted. 1st layer, commit: seen by the decode worker, from Send.\n"
        "error: root of squared error over squared values; *: each token weighted by the attention it received.\n"
        "bit-exact: every value in the decode worker's memory is the one that the format gives by a second implementation\n"
        "(spectrumkv.wire), every byte is counted, nothing else was written."
    )


def metrics(daemon: Daemon) -> None:
    print(f"\nfrom http://{daemon.addresses.metrics}/metrics of the prefill daemon:")
    for name, value in sorted(daemon.metrics().items()):
        if name.split("{")[0] in _METRICS and value:
            print(f"  {name} {value:.0f}")


def addresses(pair: Pair, kept: bool) -> None:
    prefill, decode = pair.prefill.addresses, pair.decode.addresses
    print("\nto try:" if kept else "\nto try, after scripts/demo --keep (the addresses will be others):")
    print(f"  curl http://{prefill.metrics}/metrics")
    print(f"  curl http://{decode.metrics}/metrics")
    print(f"  grpcurl -plaintext -unix {prefill.worker_socket} list")
    print(f"  grpcurl -plaintext -unix {prefill.admin_socket} spectrumkv.v1.AdminService/GetStatus")
    print(f"  grpcurl -plaintext -unix {decode.admin_socket} spectrumkv.v1.AdminService/ListTransfers")
    print("  (scripts/install-deps does not install grpcurl)")
    print(f"  build-demo/client/ctl/spectrumkvctl transfers --admin-socket {decode.admin_socket}")
    if kept:
        print(f"\nthe daemons are running. To stop them:\n  {pair.stop_command()}")
