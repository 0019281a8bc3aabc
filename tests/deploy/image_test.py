#!/usr/bin/env python3
"""The Dockerfiles: hadolint, and that their lists are those of the build. containers_test.py builds and runs them."""

import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCKERFILES = ["Dockerfile", "deploy/demo/Dockerfile"]
# Of the build's packages in scripts/install-deps: what scripts need, not the compilation.
NOT_COMPILATION = {"curl", "python3", "python3-venv"}


def installed(dockerfile):
    """The packages of each `apt-get install` of a Dockerfile."""
    text = (ROOT / dockerfile).read_text().replace("\\\n", " ")
    return [set(found.split()) for found in re.findall(r"--no-install-recommends ([^&]*)", text)]


class ImageTest(unittest.TestCase):
    def test_hadolint(self):
        hadolint = pathlib.Path(sys.executable).parent / "hadolint"
        if not hadolint.exists():
            print("SKIPPED: hadolint is not installed; scripts/install-deps brings it")
            self.skipTest("no hadolint")
        done = subprocess.run([hadolint, "--failure-threshold", "style", *DOCKERFILES], cwd=ROOT, capture_output=True,
                              text=True, check=False)  # fmt: skip
        self.assertEqual((done.returncode, done.stdout), (0, ""), done.stderr)

    def test_what_hadolint_leaves_out_has_a_reason(self):
        """Only that versions of packages are not pinned, and that is explained."""
        rules = {rule for name in DOCKERFILES for rule in re.findall(r"ignore=(\S+)", (ROOT / name).read_text())}
        self.assertEqual(rules, {"DL3008"})
        self.assertIn("a pin would only keep security updates out", (ROOT / "Dockerfile").read_text())

    def test_the_packages_of_the_build(self):
        told = re.search(r"^build_packages=\(([^)]*)\)", (ROOT / "scripts/install-deps").read_text(), re.M).group(1)
        self.assertEqual(installed("Dockerfile")[0], set(told.split()) - NOT_COMPILATION)

    def test_the_runtime_has_no_compiler(self):
        runtime = installed("Dockerfile")[1]
        self.assertFalse([name for name in runtime if name.endswith("-dev") or name in installed("Dockerfile")[0]])

    def test_nobody_in_particular(self):
        for name in DOCKERFILES:
            last = (ROOT / name).read_text().rsplit("\nFROM ", 1)[1]
            self.assertRegex(last, r"\nUSER [1-9]\d+:[1-9]\d+\n", name)


if __name__ == "__main__":
    unittest.main()
