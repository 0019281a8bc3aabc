"""proto/ passes buf lint, breaks nothing the committed descriptor set has, and that set is current."""

import os
import shutil
import subprocess

from tree import Result

DESCRIPTORS = "spectrumkv.protoset"


def find_buf(root):
    own = os.path.join(root, ".venv", "bin", "buf")
    return own if os.access(own, os.X_OK) else shutil.which("buf")


def run_buf(buf, tree, *arguments):
    """Lines of complaint; none where buf is content."""
    done = subprocess.run([buf, *arguments], cwd=tree.path("proto"), capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).splitlines() or ["buf failed"] if done.returncode else []


def run(tree):
    result = Result()
    buf = find_buf(tree.root)
    if not buf:
        result.skipped.append("buf is not installed (pip install buf-bin, or scripts/install-deps)")
        return result
    result.problems += [f"buf lint: proto/{line}" for line in run_buf(buf, tree, "lint")]
    if not tree.has(f"proto/{DESCRIPTORS}"):
        result.problems.append(f"proto/{DESCRIPTORS} is missing: run scripts/lib/update-descriptors")
        return result
    image = f"{DESCRIPTORS}#format=binpb"
    result.problems += [f"buf breaking: {line}" for line in run_buf(buf, tree, "breaking", ".", "--against", image)]
    # The other way round: whatever the protos have and the committed set lacks would count as a removal.
    result.problems += [f"proto/{DESCRIPTORS} is stale, run scripts/lib/update-descriptors: {line}"
                        for line in run_buf(buf, tree, "breaking", image, "--against", ".")]
    result.reports.append("buf lint, buf breaking, descriptor set")
    return result
