#!/usr/bin/env python3
"""Checks of the tree itself. tidy.py CHECK... [--root DIR]; exit 1 on a problem, 77 where nothing could be checked."""

import argparse
import importlib
import os
import sys

from tree import Tree

CHECKS = ("include_law", "link_law", "sizes", "documented", "words", "skips", "shell", "proto", "format")
MAX_SHOWN = 60


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=", ".join(CHECKS))
    parser.add_argument("--root", default=os.path.dirname(os.path.dirname(here)))
    arguments = parser.parse_args()
    for name in set(arguments.checks) - set(CHECKS):
        parser.error(f"no check {name}; there are {', '.join(CHECKS)}")
    tree = Tree(arguments.root)
    failed, skipped_only = False, True
    for name in arguments.checks or CHECKS:
        result = importlib.import_module("check_" + name).run(tree)
        for line in result.reports:
            print(f"{name}: {line}")
        for line in result.skipped:
            print(f"SKIPPED: {name}: {line}")
        for line in result.problems[:MAX_SHOWN]:
            print(f"{name}: PROBLEM: {line}")
        if len(result.problems) > MAX_SHOWN:
            print(f"{name}: and {len(result.problems) - MAX_SHOWN} more problems")
        failed = failed or bool(result.problems)
        skipped_only = skipped_only and bool(result.skipped) and not result.reports
    return 1 if failed else 77 if skipped_only else 0


if __name__ == "__main__":
    sys.exit(main())
