#!/usr/bin/env python3
"""Prints what CTest runs did: times by label, what was skipped and why, what failed.

test_summary.py RUN.xml...: JUnit files of CTest, each with a RUN.json (ctest --show-only=json-v1) beside it for the labels.
"""

import json
import os
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict

SKIP_LINE = re.compile(r"^\s*(?:\S+:\d+: )?(?:unittest\.case\.SkipTest: )?SKIPPED: (.*\S)", re.M)


def read_labels(path):
    """{test: its labels}; CTest's JUnit files do not have them before CMake 3.26."""
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as file:
        tests = json.load(file)["tests"]
    properties = ((test["name"], p) for test in tests for p in test.get("properties", []))
    return {name: p["value"] for name, p in properties if p["name"] == "LABELS"}


def read(path):
    """[(run, name, status, seconds, labels, reasons for skips)] of one file."""
    run = os.path.splitext(os.path.basename(path))[0]
    all_labels = read_labels(os.path.splitext(path)[0] + ".json")
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        labels = all_labels.get(case.get("name"), [""])
        output = case.findtext("system-out") or ""
        reasons = list(dict.fromkeys(SKIP_LINE.findall(output)))
        status = case.get("status", "run")
        if status == "notrun" and not reasons:
            reasons = ["not run"]
        yield run, case.get("name"), status, float(case.get("time") or 0), labels, reasons


def read_outputs(folder):
    """[(run, test, its output)] of all runs of a folder."""
    for name in sorted(os.listdir(folder)):
        if name.endswith(".xml"):
            for case in ElementTree.parse(os.path.join(folder, name)).getroot().iter("testcase"):
                yield name[:-len(".xml")], case.get("name"), case.findtext("system-out") or ""


def print_labels(cases):
    totals = defaultdict(lambda: [0, 0.0])
    for run, _, _, seconds, labels, _ in cases:
        for label in labels:
            totals[run, label or "(no label)"][0] += 1
            totals[run, label or "(no label)"][1] += seconds
    print(f"{'run':<18}{'label':<16}{'tests':>6}{'seconds':>10}")
    for (run, label), (count, seconds) in sorted(totals.items()):
        print(f"{run:<18}{label:<16}{count:>6}{seconds:>10.1f}")


def main():
    cases = [case for path in sys.argv[1:] for case in read(path)]
    failed = [case for case in cases if case[2] == "fail"]
    not_run = [case for case in cases if case[2] in ("notrun", "disabled")]
    print_labels(cases)
    for run, name, _, _, _, reasons in cases:
        for reason in reasons:
            print(f"SKIPPED: {name} ({run}): {reason}")
    for run, name, _, seconds, _, _ in failed:
        print(f"FAILED: {name} ({run}, {seconds:.1f} s)")
    ran = len(cases) - len(not_run)
    percent = 100 * (ran - len(failed)) // ran if ran else 100
    print(f"\n{percent}% tests passed, {len(failed)} tests failed out of {ran}; {len(not_run)} skipped")
    if not cases:
        print("SKIPPED: no test has this label in this build")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
