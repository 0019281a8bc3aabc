#!/usr/bin/env python3
"""Rules and alerts of deploy/prometheus: promtool's checks and unit tests, and that nothing is left out of them."""

import os
import re
import shutil
import subprocess
import sys
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
RULES = [os.path.join(ROOT, "deploy/prometheus", f"spectrumkv-{name}.yaml") for name in ("rules", "alerts")]
TESTS = os.path.join(ROOT, "tests/deploy/prometheus/alerts_test.yaml")
# Prometheus' own.
OTHERS = {"up"}


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def alerts():
    """{name: its text} of all alerts."""
    parts = re.split(r"^      - alert: (\w+)\n", read(RULES[1]), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def documented():
    names = set(re.findall(r"^\| `((?:spectrumkv|process)_\w+)`", read(os.path.join(ROOT, "docs/metrics.md")), re.M))
    return names | {name + ending for name in names for ending in ("_bucket", "_sum", "_count")}


class RulesTest(unittest.TestCase):
    def promtool(self, *words):
        if shutil.which("promtool") is None:
            print("SKIPPED: promtool is not installed", file=sys.stderr)
            self.skipTest("SKIPPED: promtool is not installed")
        done = subprocess.run(["promtool", *words], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_promtool_accepts_the_rules(self):
        self.promtool("check", "rules", *RULES)

    def test_alerts_fire_and_are_quiet(self):
        self.promtool("test", "rules", TESTS)

    def test_every_alert_is_tried_both_ways(self):
        text = read(TESTS)
        self.assertGreater(len(alerts()), 10)
        for name in alerts():
            self.assertRegex(text, rf"alertname: {name}\n +exp_alerts:\n", f"{name} is never seen firing")
            self.assertIn(f"alertname: {name}, exp_alerts: []", text, f"{name} is never seen quiet")

    def test_every_alert_says_what_to_do(self):
        runbook = read(os.path.join(ROOT, "docs/runbook.md"))
        for name, text in alerts().items():
            for field in ("summary", "description"):
                self.assertRegex(text, rf'\n          {field}: ".{{20,}}"\n', name)
            self.assertIn(f"runbook_url: docs/runbook.md#{name.lower()}\n", text)
            self.assertRegex(text, r"severity: (critical|warning|info)\n", name)
            self.assertIn(f"\n## {name}\n", runbook, f"docs/runbook.md has no page for {name}")
        for name in re.findall(r"^## (SpectrumKV\w+)$", runbook, re.M):
            self.assertIn(name, alerts(), "a page of docs/runbook.md for an alert that is gone")

    def test_every_series_exists(self):
        known = documented() | OTHERS
        recorded = set(re.findall(r"record: (\S+)", read(RULES[0])))
        for path in RULES:
            expressions = re.findall(r"expr: (?:\|\n((?: {10}.*\n)+)|(.*)\n)", read(path))
            for expression in ("".join(pair) for pair in expressions):
                for name in re.findall(r"\b(?:job|job_instance):[\w:]+", expression):
                    self.assertIn(name, recorded)
                for name in re.findall(r"(?<![\w:])(?:spectrumkv|process|exposer)_\w+", expression):
                    self.assertIn(name, known, f"{os.path.basename(path)}: no such series")


if __name__ == "__main__":
    unittest.main()
