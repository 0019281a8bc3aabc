#!/usr/bin/env python3
"""Prints docs/test-results.md from what `scripts/test --long` left in a folder.

test_report.py FOLDER [PAGE]: RUN.xml and RUN.json as test_summary.py reads them, RUN.about beside each (lines "key: value":
date, commit, machine, only), clang-tidy.log with clang-tidy.about. What has not been run is said. Tests of a part that
were run again alone, after a fault was mended, say: PART.match of its whole run PART. Of a part that FOLDER has nothing
of, what PAGE (an earlier page) says is kept: it names its date and commit.
"""

import os
import re
import sys
from collections import Counter, defaultdict

import test_summary

PARTS = {
    "test": "Every test, Release, warnings are errors (preset `test`)",
    "asan": "Every test with AddressSanitizer and UndefinedBehaviorSanitizer (preset `asan`), without labels tidy, languages, deploy, quality, engine",
    "tsan": "Every test with ThreadSanitizer (preset `tsan`), without labels tidy, languages, deploy, quality, engine",
    "fuzz": "libFuzzer targets under ASan and UBSan (preset `fuzz`, clang)",
    "clang-tidy": "clang-tidy over `server`, `kernels`, `client`",
}
EXECUTED = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
FINDING = re.compile(r"^(/\S+?):(\d+):\d+: (?:warning|error): .*\[([\w.,-]+)\]$", re.M)


def read_about(path):
    with open(path, encoding="utf-8") as file:
        return dict(line.rstrip("\n").split(": ", 1) for line in file if ": " in line)


def part_of(run):
    """A part of a part is PART.LABEL or PART.match; its .about says `only`."""
    return run.split(".", 1)[0]


def latest(cases):
    """Without what a whole run said of tests that were run once more, by name or label, after it."""
    again = {(part_of(run), name) for run, name, *_ in cases if run != part_of(run)}
    return [case for case in cases if case[0] != part_of(case[0]) or (case[0], case[1]) not in again]


class OldPage:
    """What an earlier page says, by section."""

    def __init__(self, path):
        self.sections, name = defaultdict(list), ""
        if path and os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                for line in file.read().splitlines():
                    name = line[3:] if line.startswith("## ") else name
                    self.sections[name].append(line)

    def row(self, part):
        return next((line for line in self.sections[""] if line.startswith(f"| {part} |")), None)

    def rows(self, section, parts):
        return [line for line in self.sections[section] if line.startswith(tuple(f"| {part} |" for part in parts))]

    def skipped(self, parts):
        return [line for line in self.sections["Skipped, and why"] if line.startswith(tuple(f"- {part}: " for part in parts))]

    def failed(self, parts):
        return [line for line in self.sections["Failed"] if line.endswith(")") and part_of(line[line.rindex("(") + 1:-1]) in parts]

    def section(self, name):
        return "\n" + "\n".join(self.sections[name]).rstrip() if self.sections[name] else None


def rows_of_tests(cases):
    counts, seconds = defaultdict(Counter), Counter()
    for run, _, status, took, labels, _ in cases:
        key = part_of(run), " ".join(label for label in labels if label) or "(no label)"
        counts[key][{"notrun": "skipped", "disabled": "skipped", "fail": "failed"}.get(status, "passed")] += 1
        seconds[key] += took
    for (part, label), count in sorted(counts.items()):
        yield f"| {part} | {label} | {count['passed']} | {count['failed']} | {count['skipped']} | {seconds[part, label]:.0f} |"


def print_parts(abouts, old):
    print("| Part | What | Ran | Commit |\n|---|---|---|---|")
    for part, what in PARTS.items():
        own = {run: about for run, about in abouts.items() if part_of(run) == part}
        if not own:
            print(old.row(part) or f"| {part} | {what} | not run | |")
            continue
        only = "; ".join(sorted(about["only"] for about in own.values() if "only" in about)).replace("|", "\\|")
        ran = f"only {only}" if part not in own else f"all, then once more {only}" if only else "all"
        dates = sorted({about.get("date", "?") for about in own.values()})
        commits = sorted({about.get("commit", "?") for about in own.values()})
        print(f"| {part} | {what} | {ran}; {', '.join(dates)} | {', '.join(f'`{c}`' for c in commits)} |")


def print_fuzzers(folder, cases, old):
    outputs = {name: output for run, name, output in test_summary.read_outputs(folder) if part_of(run) == "fuzz"}
    rows = [(name, EXECUTED.findall(outputs.get(name, "")), status, took)
            for run, name, status, took, labels, _ in cases if part_of(run) == "fuzz" and "libfuzzer" in labels]
    if not rows:
        if kept := old.section("Fuzzing"):
            print(kept)
        return
    print("\n## Fuzzing\n\n| Target | Executions | Seconds | Result |\n|---|---|---|---|")
    for name, executed, status, took in sorted(rows):
        count = f"{int(executed[-1]):,}" if executed else "not told"
        print(f"| {name} | {count} | {took:.0f} | {'a fault was found' if status == 'fail' else 'no fault'} |")


def print_clang_tidy(folder, old):
    path = os.path.join(folder, "clang-tidy.log")
    if not os.path.exists(path):
        if kept := old.section("clang-tidy"):
            print(kept)
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        found = {(name, line, check.split(",")[0]) for name, line, check in FINDING.findall(file.read())}
    print(f"\n## clang-tidy\n\n{len(found)} findings" + (":\n" if found else "."))
    for check, count in Counter(check for _, _, check in found).most_common():
        print(f"- {check}: {count}")


def main():
    folder = sys.argv[1]
    old = OldPage(sys.argv[2] if len(sys.argv) > 2 else None)
    runs = sorted(name[:-len(".about")] for name in os.listdir(folder) if name.endswith(".about"))
    abouts = {run: read_about(os.path.join(folder, run + ".about")) for run in runs}
    cases = latest([case for run in runs if os.path.exists(os.path.join(folder, run + ".xml"))
                    for case in test_summary.read(os.path.join(folder, run + ".xml"))])
    print("# Results of the long tests\n\n"
          "`scripts/test --long` writes this page; `--part` runs one part of it, `--only` one label. Each part tells\n"
          "its date and commit; one that was never run is said to be so.\n")
    kept = PARTS.keys() - {part_of(run) for run in abouts}
    machines = {about["machine"] for about in abouts.values() if "machine" in about}
    if any(old.row(part) for part in kept):
        machines |= {machine for line in old.sections[""] if line.startswith("Machine: ")
                     for machine in line[len("Machine: "):].rstrip(".").split("; ")}
    print("Machine: " + "; ".join(sorted(machines)) + ".\n")
    print_parts(abouts, old)
    print("\n## Tests\n\n| Part | Labels | Passed | Failed | Skipped | Seconds |\n|---|---|---|---|---|---|")
    for row in sorted([*rows_of_tests(cases), *old.rows("Tests", kept)]):
        print(row)
    print_fuzzers(folder, cases, old)
    print_clang_tidy(folder, old)
    failed = old.failed(kept) + [f"- {name} ({run})" for run, name, status, _, _, _ in cases if status == "fail"]
    print("\n## Failed\n\n" + ("\n".join(failed) or "Nothing."))
    skipped = Counter(f"- {part_of(run)}: {name}: {reason}" for run, name, _, _, _, reasons in cases for reason in reasons)
    print("\n## Skipped, and why\n\n" + ("\n".join(sorted([*skipped, *old.skipped(kept)])) or "Nothing."))


if __name__ == "__main__":
    main()
