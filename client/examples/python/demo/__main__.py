"""Moves the KV cache of a real prompt between two daemons and checks every bit. Started by scripts/demo."""

from __future__ import annotations

import argparse
import logging
import os
import pathlib
import signal
import statistics
import sys

# A daemon is started by fork and exec; gRPC's own preparations for forks can abort the child before the exec.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import table
from cases import CASES, Case, Prompt, load_prompt
from daemons import DaemonDied, Pair, find_program
from workers import Workers, verify

import spectrumkv as skv

ROOT = pathlib.Path(__file__).resolve().parents[4]
DATA = ROOT / "tests" / "data" / "smollm2_135m_wikitext2_256"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the daemons running")
    parser.add_argument("--daemon", help="the spectrumkvd to run (default: build-demo/server/spectrumkvd)")
    parser.add_argument("--rounds", type=int, default=5, help="transfers per line; times are their median")
    parser.add_argument("--corrupt", action="store_true", default=os.environ.get("SPECTRUMKV_DEMO_CORRUPT") == "1",
                        help="flip one byte after one transfer; the demo must then fail")  # fmt: skip
    return parser.parse_args()


def run_case(workers: Workers, prompt: Prompt, case: Case, number: int, rounds: int, corrupt: bool) -> bool:
    outcomes = [
        workers.transfer(f"demo-{number}-{turn}", case, corrupt=corrupt and turn == rounds - 1) for turn in range(rounds)
    ]
    found = [verify(outcome, prompt) for outcome in outcomes]
    shown = next((i for i, outcome in enumerate(outcomes) if outcome.problems), 0)
    first = statistics.median(outcome.first_layer_s for outcome in outcomes)
    commit = statistics.median(outcome.commit_s for outcome in outcomes)
    table.row(outcomes[shown], found[shown], first, commit)
    return not any(outcome.problems for outcome in outcomes)


def check_metrics(pair: Pair, workers: Workers) -> bool:
    """The daemons have counted what the transfers' reports add up to."""
    good = True
    for role, daemon in (("sender", pair.prefill), ("receiver", pair.decode)):
        counted = daemon.metrics().get(f'spectrumkv_wire_bytes_total{{role="{role}"}}')
        if counted != workers.sent_wire_bytes:
            print(f"spectrumkv_wire_bytes_total of the {role} is {counted}, the reports add up to {workers.sent_wire_bytes}")
            good = False
    return good


def run(pair: Pair, arguments: argparse.Namespace) -> bool:
    prompt = load_prompt(DATA)
    workers = Workers(pair, prompt)
    try:
        # The first transfers touch memory and open connections for the first time.
        for number, case in enumerate(CASES[:2]):
            workers.transfer(f"warm-up-{number}", case)
        table.head(prompt)
        good = True
        for number, case in enumerate(CASES):
            corrupt = arguments.corrupt and number == 2
            good = run_case(workers, prompt, case, number, arguments.rounds, corrupt) and good
        table.legend()
        table.metrics(pair.prefill)
        return check_metrics(pair, workers) and good
    finally:
        workers.close()


def main() -> int:
    arguments = parse_arguments()
    logging.getLogger("spectrumkv").setLevel(logging.ERROR)  # a lost daemon is explained once, below
    program = find_program(arguments.daemon, ROOT)
    # Every way out passes the daemons' context.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    try:
        with Pair(program, keep=arguments.keep) as pair:
            try:
                good = run(pair, arguments)
            except skv.SpectrumKVError:
                print(pair.explain(), file=sys.stderr)
                raise
            table.addresses(pair, arguments.keep)
    except (DaemonDied, skv.SpectrumKVError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print("\nevery check held" if good else "\nSOMETHING IS WRONG: see above")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
