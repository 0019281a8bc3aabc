"""Time from the death or the stop of a transfer's peer to an error at the other side."""

import argparse
import concurrent.futures
import datetime
import importlib.util
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
NAMES = {"ours": "SpectrumKV", "nixl": "NIXL (UCX, TCP)", "mooncake": "Mooncake (TCP)"}
FAULTS = ("SIGKILL", "SIGSTOP")
# The others' targets of a one-sided write wait in no call here: their senders alone are asked.
SEEN_BY = {"ours": ("sender", "receiver"), "nixl": ("sender",), "mooncake": ("sender",)}
SKIPPED = 77


def arguments():
    parser = argparse.ArgumentParser(
        prog="scripts/compare-failures",
        description="Hits one side of a transfer with SIGKILL or SIGSTOP while 64 MiB cross a loopback link of 100 Mbit/s,"
        " in a network namespace for each run, and prints how long the other side's API takes to tell an error."
        " Needs root, ip, tc and unshare. Exits with 1 where a run could not be made.",
    )
    parser.add_argument("--systems", default="ours,nixl,mooncake", help="of ours,nixl,mooncake (default: all)")
    parser.add_argument("--runs", type=int, default=3, help="of each row (default: 3)")
    parser.add_argument("--jobs", type=int, default=4, help="runs at a time (default: 4)")
    parser.add_argument("--bound", type=float, default=60, help="seconds that a run waits for the error (default: 60)")
    parser.add_argument("--daemon", default="build/server/spectrumkvd")
    parser.add_argument("--peer-python", default="build-bench/peers/bin/python", help="made by scripts/bench")
    parser.add_argument("--progress-timeout-ms", type=int, default=0, help="of our daemons (default: the daemon's own)")
    parser.add_argument("--write", action="store_true", help="write docs/failures.md")
    args = parser.parse_args()
    args.systems = args.systems.split(",")
    for system in args.systems:
        if system not in NAMES:
            parser.error("--systems: %s is none of %s" % (system, ", ".join(NAMES)))
    if args.runs < 1 or args.jobs < 1 or args.bound <= 0:
        parser.error("--runs, --jobs and --bound must be above 0")
    return args


def run_case(args, system, fault, seen_by):
    case = {"system": system, "fault": fault, "seen_by": seen_by, "bound_s": args.bound,
            "daemon": str(pathlib.Path(args.daemon).absolute()), "peer_python": str(pathlib.Path(args.peer_python).absolute()),
            "progress_timeout_ms": args.progress_timeout_ms}  # fmt: skip
    command = ["unshare", "--net", sys.executable, str(HERE / "failure_case.py"), json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=args.bound + 180)
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not answers:
        raise RuntimeError("%s %s %s: %s" % (system, fault, seen_by, done.stderr[-2000:]))
    return json.loads(answers[-1])


def seconds(value, bound):
    return "> %g s" % bound if value is None else "%.3f s" % value


def row(system, fault, seen_by, answers, bound):
    """One line of the table; a run without an error counts as the longest."""
    taken = sorted((a["seconds"] for a in answers), key=lambda s: (s is None, s or 0.0))
    middle = taken[(len(taken) - 1) // 2] if None in taken else statistics.median(taken)
    said = sorted({a["said"].replace("|", "/") for a in answers if a["said"]}) or ["nothing"]
    spread = "%s .. %s" % (seconds(taken[0], bound), seconds(taken[-1], bound))
    return [NAMES[system], fault, seen_by, seconds(middle, bound), spread, "; ".join(said)]


def table(rows):
    head = ["System", "Fault of the peer", "Seen by", "Median", "Min .. max", "What the API said"]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])


def document(args, rows, load):
    model = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
    versions = [line.strip() for line in (HERE / "peers" / "requirements.txt").read_text().splitlines()
                if line.strip() and not line.startswith(("#", "numpy"))]  # fmt: skip
    timeout = "%d ms" % args.progress_timeout_ms if args.progress_timeout_ms else "its default, 5 s"
    options = "--systems %s --runs %d --jobs %d --bound %g --daemon %s --peer-python %s" % (
        ",".join(args.systems), args.runs, args.jobs, args.bound, args.daemon, args.peer_python)  # fmt: skip
    if args.progress_timeout_ms:
        options += " --progress-timeout-ms %d" % args.progress_timeout_ms
    return "\n".join([
        "# When the peer dies or stops", "",
        "Seconds from the signal to the peer of a transfer until the other side's API told an error. `scripts/compare-failures"
        " --write` writes this file.", "", table(rows), "",
        "Each run moves 64 MiB over a loopback device of 100 Mbit/s in a network namespace of its own; the signal comes when"
        " 8 MiB have crossed it and the transfer has not ended. %d runs a row; `> %g s` means that no error came while the run"
        " waited, which is no claim that none comes later. `transfer.progress_timeout_ms` is %s. NIXL and Mooncake have their"
        " defaults; their transfers are one-sided writes, whose targets wait in no call here, so only their senders are"
        " asked." % (args.runs, args.bound, timeout), "",
        "The sender dials here. When its peer's process is gone, the connection breaks, the next dial is refused, and the"
        " transfer fails with `PEER_GONE`: who listens at that address later has another epoch and nothing of this"
        " transfer. The receiver cannot dial; it gives a sender whose connection broke the progress timeout to come back."
        " A peer that stops is known by its silence alone, for the same time.", "",
        "Machine: %s, %d cores, Linux %s, load average %.1f when the runs began. Date: %s. Command:"
        " `scripts/compare-failures %s --write`. Peers: %s." % (
            model, os.cpu_count(), platform.release(), load, datetime.date.today().isoformat(), options,
            ", ".join(versions)), "",
    ])  # fmt: skip


def main():
    args = arguments()
    if os.geteuid() != 0 or subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode != 0:
        print("SKIPPED: network namespaces need root")
        return SKIPPED
    if "ours" in args.systems and importlib.util.find_spec("spectrumkv") is None:
        print("SKIPPED: no Python environment; scripts/install-deps makes one")
        return SKIPPED
    rows, failed, load = [], [], os.getloadavg()[0]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        kinds = [(s, f, b) for s in args.systems for f in FAULTS for b in SEEN_BY[s]]
        begun = {kind: [pool.submit(run_case, args, *kind) for _ in range(args.runs)] for kind in kinds}
        for kind, futures in begun.items():
            try:
                rows.append(row(*kind, [future.result() for future in futures], args.bound))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                failed.append(str(error))
    print(table(rows))
    for words in failed:
        print("FAILED: %s" % words, file=sys.stderr)
    if args.write and not failed:
        (ROOT / "docs" / "failures.md").write_text(document(args, rows, load))
        print("docs/failures.md is written")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
