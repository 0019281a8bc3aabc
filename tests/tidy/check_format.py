"""clang-format, as a report: versions differ in small things, so it fails nothing."""

import shutil
import subprocess

from tree import Result


def run(tree):
    result = Result()
    if not shutil.which("clang-format"):
        result.skipped.append("clang-format is not installed")
        return result
    sources = tree.select((".h", ".cc"), ("server/", "kernels/", "client/", "tests/"))
    unlike = []
    for name in sources:
        formatted = subprocess.run(["clang-format", "--style=file", tree.path(name)], capture_output=True, check=False)
        with open(tree.path(name), "rb") as file:
            if formatted.returncode or formatted.stdout != file.read():
                unlike.append(name)
    result.reports.append(f"{len(sources) - len(unlike)} of {len(sources)} files are as clang-format writes them")
    result.reports += [f"  differs: {name}" for name in unlike[:20]]
    return result
