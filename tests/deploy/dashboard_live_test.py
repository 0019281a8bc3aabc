#!/usr/bin/env python3
"""Every query of the dashboard, and every recording rule, finds data: a real Prometheus scrapes two real daemons under
load. The engine's metric is served by the test itself (live/load.py). With SPECTRUMKV_PREVIEW=FOLDER the panels are left
there as page.html and, where chromium is installed, page.png; SPECTRUMKV_LIVE_SECONDS is the length of the load."""

import importlib.machinery
import importlib.util
import json
import math
import os
import pathlib
import re
import shutil
import sys
import tempfile
import time
import unittest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE / "live"), str(ROOT / "tests/integration/python"), str(ROOT / "deploy/grafana")]
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

try:
    import numpy  # noqa: F401
    import spectrumkv  # noqa: F401
except ImportError:
    print("SKIPPED: no Python environment; scripts/install-deps makes one")
    sys.exit(77)
import prometheus

if not prometheus.available():
    print("SKIPPED: prometheus is not installed")
    sys.exit(77)
from load import Deployment

loader = importlib.machinery.SourceFileLoader("preview", str(ROOT / "deploy/grafana/preview"))
preview = importlib.util.module_from_spec(importlib.util.spec_from_loader("preview", loader))
loader.exec_module(preview)

SECONDS = float(os.environ.get("SPECTRUMKV_LIVE_SECONDS", "8"))
RULES = [ROOT / f"deploy/prometheus/spectrumkv-{name}.yaml" for name in ("rules", "alerts")]


class LiveTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.mkdtemp(prefix="skv-live-")
        cls.addClassCleanup(shutil.rmtree, folder, ignore_errors=True)
        cls.deployment = Deployment(folder)
        cls.addClassCleanup(cls.deployment.close)
        cls.daemons = cls.deployment.daemons()
        jobs = {"spectrumkv": [daemon.metrics_address for daemon in cls.daemons.values()], "vllm": [cls.deployment.engine.address]}
        # Evaluated as often as is scraped, not each half minute.
        rules = [pathlib.Path(folder) / path.name for path in RULES]
        for path, copy in zip(RULES, rules, strict=True):
            copy.write_text(path.read_text(encoding="utf-8").replace("interval: 30s", "interval: 1s"), encoding="utf-8")
        cls.prometheus = prometheus.Prometheus(folder, jobs, rules)
        cls.addClassCleanup(cls.prometheus.stop)
        began = time.time()
        cls.deployment.transfers(SECONDS / 2)
        cls.deployment.troubles()
        cls.deployment.transfers(SECONDS / 2)
        cls.minutes = (time.time() - began) / 60
        # Not before the last of it has been scraped.
        time.sleep(1.5)
        cls.end = time.time()
        cls.dashboard = json.loads((ROOT / "deploy/grafana/spectrumkv.json").read_text(encoding="utf-8"))

    def test_everybody_is_scraped(self):
        targets = self.prometheus.api("targets")["activeTargets"]
        self.assertEqual([(t["labels"]["job"], t["health"], t["lastError"]) for t in targets],
                         [("spectrumkv", "up", ""), ("spectrumkv", "up", ""), ("vllm", "up", "")])  # fmt: skip

    def test_every_query_has_data(self):
        """At least one series with a number for each query; the shortest rate interval that Grafana would take."""
        variables = {"job": "spectrumkv", "instance": ".+", "engine_job": "vllm", "__rate_interval": "4s"}
        queries, empty = 0, []
        for panel in self.dashboard["panels"]:
            for target in panel.get("targets", []):
                queries += 1
                query = preview.filled(target["expr"], variables)
                result = self.prometheus.api("query_range", query=query, start=self.end - self.minutes * 60, end=self.end, step=1)["result"]
                if not any(math.isfinite(float(value)) for series in result for _, value in series["values"]):
                    empty.append(f"{panel['title']}: {query}")
        self.assertEqual(empty, [])
        self.assertGreater(queries, 40)
        print(f"{queries} queries, {len(self.deployment.reports)} transfers in {self.minutes * 60:.0f} s")

    def test_the_page_shows_every_panel(self):
        page, answers = preview.render(self.prometheus.url, end=self.end, minutes=self.minutes, scrape_seconds=1)
        folder = os.environ.get("SPECTRUMKV_PREVIEW")
        if folder:
            pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
            (pathlib.Path(folder) / "page.html").write_text(page, encoding="utf-8")
            if shutil.which("chromium"):
                preview.screenshot(pathlib.Path(folder) / "page.html", pathlib.Path(folder) / "page.png")
        without = re.findall(r"<h3>([^<]*)</h3><div class=.none", page)
        self.assertEqual(without, [], "panels that say No data")
        self.assertEqual(len(answers), page.count("<section"))
        self.assertEqual(page.count("<svg"), sum(1 for panel in self.dashboard["panels"] if panel["type"] in ("stat", "timeseries")))
        self.assertEqual(re.findall(r"\bnan\b|\binf\b|\{\{|\$__", page), [])

    def test_the_numbers_are_those_of_the_reports(self):
        """Counters as Prometheus has them are the sums of the transfers' reports."""
        reports = self.deployment.reports
        for metric, field in (("kv_bytes_total", "kv_bytes"), ("wire_bytes_total", "wire_bytes")):
            [one] = self.prometheus.api("query", query=f'sum(spectrumkv_{metric}{{role="sender"}})', time=self.end)["result"]
            self.assertEqual(float(one["value"][1]), sum(getattr(report, field) for report in reports), metric)
        for metric in ("spectrumkv", "vllm:"):
            name = f"{metric}{'_' if metric == 'spectrumkv' else ''}time_to_first_token_seconds_count"
            [one] = self.prometheus.api("query", query=f"sum({name})", time=self.end)["result"]
            self.assertEqual(float(one["value"][1]), len(reports), name)

    def test_rules_are_evaluated(self):
        groups = self.prometheus.api("rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        self.assertGreater(len(rules), 20)
        for rule in rules:
            self.assertEqual((rule["health"], rule.get("lastError", "")), ("ok", ""), rule["name"])

    def test_recording_rules_have_data(self):
        for path in RULES[:1]:
            expressions = re.findall(r"record: (\S+)\n +expr: (?:\|\n((?: {10}.*\n)+)|(.*)\n)", path.read_text())
            self.assertGreater(len(expressions), 5)
            for name, lines, line in expressions:
                result = self.prometheus.api("query", query=lines or line, time=self.end)["result"]
                self.assertTrue(any(math.isfinite(float(one["value"][1])) for one in result), name)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
