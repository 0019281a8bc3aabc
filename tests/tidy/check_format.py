"""clang-format, as a report: versions differ in small things, so no file that differs is a problem."""

import shutil
import subprocess

from tree import Result

DIFFERS = "code should be clang-formatted"


def run(tree):
    result = Result()
    if not shutil.which("clang-format"):
        result.skipped.append("clang-format is not installed")
        return result
    sources = tree.select((".h", ".cc"), ("server/", "kernels/", "client/", "tests/"))
    # One process for all: starting one for each file takes most of a minute.
    told = subprocess.run(
        ["clang-format", "--style=file", "--dry-run", *map(tree.path, sources)], capture_output=True, text=True, check=False
    )
    if told.returncode:
        result.problems.append(f"clang-format ended with {told.returncode}: {told.stderr[-300:]}")
    differing = {line.split(":", 1)[0] for line in told.stderr.splitlines() if DIFFERS in line}
    unlike = [name for name in sources if tree.path(name) in differing]
    result.reports.append(f"{len(sources) - len(unlike)} of {len(sources)} files are as clang-format writes them")
    result.reports += [f"  differs: {name}" for name in unlike[:20]]
    return result
