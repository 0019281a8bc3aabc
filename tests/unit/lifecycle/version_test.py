#!/usr/bin/env python3
"""What a build says of its commit. version_test.py CMAKE WRITE_VERSION"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

CMAKE, SCRIPT = sys.argv[1:3]
# Nobody's settings, and no repository around the temporary folder.
ENVIRONMENT = {**{k: v for k, v in os.environ.items() if not k.startswith("GIT_")}, "GIT_CONFIG_GLOBAL": "/dev/null",
               "GIT_CONFIG_SYSTEM": "/dev/null"}  # fmt: skip


class VersionTest(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        self.tree = self.folder / "tree"
        self.tree.mkdir()
        self.output = self.folder / "version.cc"

    def git(self, *words):
        author = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(["git", *author, *words], cwd=self.tree, env=ENVIRONMENT, check=True, text=True,
                              capture_output=True).stdout.strip()  # fmt: skip

    def commit(self):
        self.git("init", "-q")
        (self.tree / "file").write_text("1")
        self.git("add", "file")
        self.git("commit", "-qm", "one")
        return self.git("rev-parse", "--short=12", "HEAD")

    def written(self, **environment):
        subprocess.run([CMAKE, f"-DSOURCE_DIR={self.tree}", "-DVERSION=1.2.3", f"-DOUTPUT={self.output}", "-P", SCRIPT],
                       env={**ENVIRONMENT, **environment}, check=True, capture_output=True)  # fmt: skip
        return dict(re.findall(r'(\w+)\(\) { return "([^"]*)"', self.output.read_text()))

    def test_no_checkout(self):
        self.assertEqual(self.written(), {"Version": "1.2.3", "Revision": "unknown", "VersionText": "1.2.3 (unknown)"})

    def test_inside_another_checkout(self):
        self.tree = self.folder
        self.commit()
        self.tree = self.folder / "tree"
        self.assertEqual(self.written()["Revision"], "unknown")

    def test_without_a_commit(self):
        self.git("init", "-q")
        self.assertEqual(self.written()["Revision"], "unknown")

    def test_without_git(self):
        self.commit()
        # The dynamic loader needs no PATH; find_program looks in it and in the usual folders.
        told = subprocess.run([CMAKE, f"-DSOURCE_DIR={self.tree}", "-DVERSION=1.2.3", f"-DOUTPUT={self.output}",
                               "-DGIT=GIT-NOTFOUND", "-DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF",
                               "-DCMAKE_FIND_USE_SYSTEM_ENVIRONMENT_PATH=OFF", "-P", SCRIPT],
                              env=ENVIRONMENT, capture_output=True)  # fmt: skip
        self.assertEqual(told.returncode, 0, told.stderr)
        self.assertIn('Revision() { return "unknown"; }', self.output.read_text())

    def test_a_commit_and_changes_to_it(self):
        revision = self.commit()
        self.assertEqual(self.written()["Revision"], revision)
        self.assertEqual(self.written()["VersionText"], f"1.2.3 ({revision})")
        (self.tree / "file").write_text("2")
        self.assertEqual(self.written()["Revision"], f"{revision}-dirty")
        self.git("checkout", "-q", "file")
        (self.tree / "untracked").write_text("x")
        self.assertEqual(self.written()["Revision"], revision)

    def test_a_tag_does_not_hide_the_commit(self):
        revision = self.commit()
        self.git("tag", "v9.9.9")
        self.git("tag", "-a", "v9.9.8", "-m", "annotated")
        self.assertEqual(self.written()["Revision"], revision)

    def test_a_worktree(self):
        revision = self.commit()
        self.git("worktree", "add", "-q", str(self.folder / "other"))
        self.tree = self.folder / "other"
        self.assertTrue((self.tree / ".git").is_file())
        self.assertEqual(self.written()["Revision"], revision)

    def test_a_revision_that_was_given(self):
        """A copy without .git, as in an image; empty is as good as none."""
        for given, told in (("4f2a90c1d3e5", "4f2a90c1d3e5"), ("", "unknown")):
            subprocess.run([CMAKE, f"-DSOURCE_DIR={self.tree}", "-DVERSION=1.2.3", f"-DREVISION={given}",
                            f"-DOUTPUT={self.output}", "-P", SCRIPT], env=ENVIRONMENT, check=True,
                           capture_output=True)  # fmt: skip
            self.assertIn(f'Revision() {{ return "{told}"; }}', self.output.read_text())

    def test_is_written_only_where_it_changes(self):
        self.commit()
        self.written()
        os.utime(self.output, (1, 1))
        self.written()
        self.assertEqual(self.output.stat().st_mtime, 1)


if __name__ == "__main__":
    if shutil.which("git") is None:
        print("SKIPPED: git is not installed")
        sys.exit(77)
    unittest.main(argv=sys.argv[:1])
