"""The page of the long tests says what ran, what did not, and what the fuzzers did."""

import json
import os
import subprocess
import sys
import tempfile
import unittest

REPORT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../scripts/lib/test_report.py")
ABOUT = "date: 2026-11-29\ncommit: abc1234\nmachine: a CPU, 2 cores\n"
FUZZ = """<testsuite>
<testcase name="frame_fuzz" time="61" status="run"><system-out>#9 DONE
stat::number_of_executed_units: 1234567
stat::peak_rss_mb: 5</system-out></testcase>
<testcase name="plan_fuzz" time="3" status="fail"><system-out>ERROR: libFuzzer: deadly signal</system-out></testcase>
</testsuite>"""
UNIT = """<testsuite><testcase name="a_test" time="2" status="run"><system-out>SKIPPED: no GPU</system-out></testcase>
<testcase name="b_test" time="0" status="notrun"/></testsuite>"""
TIDY = "/x/a.cc:3:4: error: bad [bugprone-x,-warnings-as-errors]\n/x/a.cc:3:4: error: bad [bugprone-x,-warnings-as-errors]\n"


class ReportTest(unittest.TestCase):
    def page(self, files, old=None):
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                with open(f"{folder}/{name}", "w", encoding="utf-8") as file:
                    file.write(text)
            if old is not None:
                with open(f"{folder}/old.md", "w", encoding="utf-8") as file:
                    file.write(old)
            return subprocess.run([sys.executable, REPORT, folder, f"{folder}/old.md"], capture_output=True, text=True, check=True).stdout

    def labels(self, label, *names):
        return json.dumps({"tests": [{"name": n, "properties": [{"name": "LABELS", "value": [label]}]} for n in names]})

    def test_parts(self):
        page = self.page({"fuzz.about": ABOUT, "fuzz.xml": FUZZ, "fuzz.json": self.labels("libfuzzer", "frame_fuzz", "plan_fuzz"),
                          "asan.unit.about": ABOUT + "only: label unit, tests ^(a|b)_\n", "asan.unit.xml": UNIT, "asan.unit.json": self.labels("unit", "a_test", "b_test"),
                          "clang-tidy.about": ABOUT, "clang-tidy.log": TIDY})
        self.assertIn("| frame_fuzz | 1,234,567 | 61 | no fault |", page)
        self.assertIn("| plan_fuzz | not told | 3 | a fault was found |", page)
        self.assertIn("only label unit, tests ^(a\\|b)_; 2026-11-29 | `abc1234` |", page)
        self.assertRegex(page, r"\| tsan \| .* \| not run \| \|")
        self.assertIn("| asan | unit | 1 | 0 | 1 | 2 |", page)
        self.assertIn("- plan_fuzz (fuzz)", page)
        self.assertIn("- asan: a_test: no GPU", page)
        self.assertIn("- asan: b_test: not run", page)
        self.assertIn("1 findings:\n\n- bugprone-x: 1", page)
        self.assertIn("Machine: a CPU, 2 cores.", page)

    def test_tests_that_were_run_again(self):
        later = ABOUT.replace("abc1234", "def5678") + "only: tests ^a_test$\n"
        page = self.page({"asan.about": ABOUT, "asan.xml": UNIT.replace('time="2" status="run"', 'time="2" status="fail"'),
                          "asan.json": self.labels("unit", "a_test", "b_test"), "asan.match.about": later,
                          "asan.match.xml": '<testsuite><testcase name="a_test" time="3" status="run"/></testsuite>',
                          "asan.match.json": self.labels("unit", "a_test", "b_test")})
        self.assertIn("all, then once more tests ^a_test$; 2026-11-29 | `abc1234`, `def5678` |", page)
        self.assertIn("| asan | unit | 1 | 0 | 1 | 3 |", page)
        self.assertIn("## Failed\n\nNothing.", page)

    def test_parts_that_ran_elsewhere_are_kept(self):
        files = {"fuzz.about": ABOUT, "fuzz.xml": FUZZ, "fuzz.json": self.labels("libfuzzer", "frame_fuzz", "plan_fuzz"),
                 "asan.about": ABOUT, "asan.xml": UNIT.replace('name="b_test" time="0" status="notrun"', 'name="b_test" time="0" status="fail"'),
                 "asan.json": self.labels("unit", "a_test", "b_test"), "clang-tidy.about": ABOUT, "clang-tidy.log": TIDY}
        first = self.page(files)
        self.assertEqual(self.page({}, old=first), first)
        later = "date: 2026-12-01\ncommit: def5678\nmachine: another CPU, 2 cores\n"
        page = self.page({"asan.about": later, "asan.xml": UNIT, "asan.json": self.labels("unit", "a_test", "b_test")}, old=first)
        self.assertIn("Machine: a CPU, 2 cores; another CPU, 2 cores.", page)
        self.assertRegex(page, r"\| asan \| .* \| all; 2026-12-01 \| `def5678` \|")
        self.assertRegex(page, r"\| fuzz \| .* \| all; 2026-11-29 \| `abc1234` \|")
        self.assertIn("| plan_fuzz | not told | 3 | a fault was found |", page)
        self.assertIn("- plan_fuzz (fuzz)", page)
        self.assertNotIn("b_test (asan)", page)
        self.assertIn("- asan: b_test: not run", page)
        self.assertIn("1 findings:\n\n- bugprone-x: 1", page)

    def test_nothing(self):
        page = self.page({})
        self.assertEqual(page.count("| not run | |"), 5)
        self.assertIn("## Failed\n\nNothing.", page)


if __name__ == "__main__":
    unittest.main()
