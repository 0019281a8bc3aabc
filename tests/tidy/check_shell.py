"""Shell scripts are strict and pass shellcheck."""

import re
import shutil
import subprocess

from tree import Result


def scripts(tree):
    for name in tree.files:
        if name.endswith((".sh", ".bash")) or ("." not in name.rsplit("/", 1)[-1] or name == ".ci/run"):
            first = tree.read(name).split("\n", 1)[0]
            if re.match(r"#!.*\b(ba|da)?sh\b", first) or name.endswith((".sh", ".bash")):
                yield name


def run(tree):
    result, found = Result(), list(scripts(tree))
    for name in found:
        text = tree.read(name)
        executable = text.startswith("#!")
        if executable and not re.search(r"^set -\w*e\w*u?", text, re.M):
            result.problems.append(f"{name}: runs without `set -eu` (and pipefail in bash)")
    result.reports.append(f"{len(found)} shell scripts")
    if not shutil.which("shellcheck"):
        result.skipped.append("shellcheck is not installed")
    elif found:
        checked = subprocess.run(["shellcheck", "-x", "-S", "warning", "-f", "gcc", *found], cwd=tree.root,
                                 capture_output=True, text=True, check=False)
        result.problems += (checked.stdout + checked.stderr).splitlines() if checked.returncode else []
    return result
