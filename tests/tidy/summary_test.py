"""The summary of scripts/test shows every skip and fails with any failure."""

import json
import os
import subprocess
import sys
import tempfile
import unittest

SUMMARY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../scripts/lib/test_summary.py")
JUNIT = """<testsuite>
<testcase name="good" time="2" status="run"><system-out>x
SKIPPED: no GPU here
SKIPPED: no GPU here
file.cc:7: SKIPPED: small /dev/shm</system-out></testcase>
<testcase name="{second}" time="1" status="{status}"><system-out>[  SKIPPED ] A.B</system-out></testcase>
<testcase name="none" time="0" status="notrun"><skipped message="SKIP_RETURN_CODE=77"/></testcase>
</testsuite>"""


class SummaryTest(unittest.TestCase):
    def summary(self, second, status):
        labels = [{"name": "good", "properties": [{"name": "LABELS", "value": ["unit", "golden"]}]},
                  {"name": second, "properties": []}]
        with tempfile.TemporaryDirectory() as folder:
            with open(f"{folder}/all.json", "w", encoding="utf-8") as file:
                json.dump({"tests": labels}, file)
            with open(f"{folder}/all.xml", "w", encoding="utf-8") as file:
                file.write(JUNIT.format(second=second, status=status))
            done = subprocess.run([sys.executable, SUMMARY, f"{folder}/all.xml"], capture_output=True, text=True,
                                  check=False)
        return done.returncode, done.stdout

    def test_passed(self):
        code, out = self.summary("other", "run")
        self.assertEqual(code, 0)
        self.assertIn("100% tests passed, 0 tests failed out of 2; 1 skipped", out)
        self.assertEqual(out.count("SKIPPED: good (all): no GPU here"), 1)
        self.assertIn("SKIPPED: good (all): small /dev/shm", out)
        self.assertIn("SKIPPED: none (all): not run", out)
        self.assertRegex(out, r"all +golden +1 +2\.0")
        self.assertNotIn("A.B", out)

    def test_failed(self):
        code, out = self.summary("bad", "fail")
        self.assertEqual(code, 1)
        self.assertIn("FAILED: bad (all, 1.0 s)", out)
        self.assertIn("50% tests passed, 1 tests failed out of 2; 1 skipped", out)


if __name__ == "__main__":
    unittest.main()
