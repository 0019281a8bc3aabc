#!/usr/bin/env python3
"""deploy/grafana/spectrumkv.json by the rules of Grafana's dashboard-linter (its names in the messages), and that every
metric, label and label value it asks for exists. That every query finds data, dashboard_live_test.py sees."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
GRAFANA = os.path.join(ROOT, "deploy/grafana")
ROWS = ["At a glance", "Time to first token", "Stages", "Bytes and tiers", "Saturation", "Errors",
        "Build, backend, certificates"]
# Of Grafana's list, those a panel here may have.
UNITS = {"none", "short", "percentunit", "s", "bytes", "Bps", "cps"}
# Metrics that no panel needs: "Raw against wire" shows the same as bytes.
NOT_SHOWN = {"spectrumkv_chunks_total"}
# Metrics of others, with their labels.
OTHERS = {"vllm:time_to_first_token_seconds": set()}
METRIC = re.compile(r"(?<![\w:$])((?:spectrumkv|process|exposer)_\w+|vllm:\w+)(\{[^}]*\})?(\[[^\]]*\])?")
TARGET_LABELS = {"job", "instance", "le"}


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


def documented():
    """({metric: labels}, {metric: type}, {label: values}) of docs/metrics.md."""
    labels, types, values = {}, {}, {}
    for name, kind, words in re.findall(r"^\| `(\w+)` \| (counter|gauge|histogram) \| (.*?) \|", read("docs/metrics.md"), re.M):
        labels[name], types[name] = set(re.findall(r"`(\w+)`", words)), kind
    for names, words in re.findall(r"^\| (`\w+`(?: of \w+|, `\w+`)?) \| (`.*) \|$", read("docs/metrics.md"), re.M):
        for name in re.findall(r"`(\w+)`", names):
            values.setdefault(name, set()).update(re.findall(r"`(\w+)`", words))
    return labels, types, values


def exclusions():
    """{rule: panels} of .lint."""
    found = {}
    for rule, reason, entries in re.findall(r"^  ([\w-]+):\n    reason: (.+)\n    entries:\n((?: {6}.*\n)+)", read("deploy/grafana/.lint"), re.M):
        assert len(reason) > 20
        found[rule] = set(re.findall(r"panel: (.+)", entries))
    return found


class DashboardTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.dashboard = json.loads(read("deploy/grafana/spectrumkv.json"))
        cls.panels = [panel for panel in cls.dashboard["panels"] if panel["type"] != "row"]
        cls.labels, cls.types, cls.values = documented()

    def queries(self):
        for panel in self.panels:
            for target in panel["targets"]:
                yield panel["title"], target["expr"]

    def test_it_is_what_its_source_makes(self):
        done = subprocess.run([sys.executable, os.path.join(GRAFANA, "dashboard.py"), "--check"], capture_output=True, text=True,
                              check=False)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_rows(self):
        self.assertEqual([panel["title"] for panel in self.dashboard["panels"] if panel["type"] == "row"], ROWS)
        self.assertGreater(len(self.panels), 30)

    def test_template_rules(self):
        variables = {v["name"]: v for v in self.dashboard["templating"]["list"]}
        sources = [v for v in variables.values() if v["type"] == "datasource"]
        self.assertEqual([(v["name"], v["label"], v["query"]) for v in sources], [("datasource", "Data source", "prometheus")])
        for name, label in (("job", "Job"), ("instance", "Instance"), ("engine_job", "Engine job")):
            one = variables[name]
            self.assertEqual((one["type"], one["label"], one["allValue"]), ("query", label, ".+"), "template-job-rule")
            self.assertTrue(one["multi"] and one["includeAll"], name)
            self.assertEqual(one["datasource"]["uid"], "${datasource}", name)
            self.assertEqual(one["refresh"], 2, "template-on-time-change-reload-rule")
            query = re.fullmatch(r"label_values\(([\w:]+)(?:\{.*\})?, (\w+)\)", one["query"])
            self.assertIsNotNone(query, "template-label-promql-rule")
            self.assertTrue(self.known(query.group(1)), name)
        self.assertIs(self.dashboard["editable"], False, "uneditable-dashboard")

    def test_panel_rules(self):
        ids = [panel["id"] for panel in self.dashboard["panels"]]
        self.assertEqual(len(set(ids)), len(ids))
        self.assertEqual(len({panel["title"] for panel in self.panels}), len(self.panels))
        for panel in self.panels:
            with self.subTest(panel["title"]):
                self.assertTrue(panel["title"] and len(panel["description"]) > 20, "panel-title-description-rule")
                self.assertIn(panel["fieldConfig"]["defaults"]["unit"], UNITS, "panel-units-rule")
                self.assertTrue(panel["targets"], "panel-no-targets-rule")
                for source in [panel["datasource"], *(target["datasource"] for target in panel["targets"])]:
                    self.assertEqual(source, {"type": "prometheus", "uid": "${datasource}"}, "panel-datasource-rule")
                legends = [target["legendFormat"] for target in panel["targets"]]
                self.assertEqual(len(set(legends)), len(legends))
                if panel["type"] == "timeseries":
                    self.assertTrue(all(legends), "lines without a name")

    def test_panels_lie_beside_each_other(self):
        taken = {}
        for panel in self.dashboard["panels"]:
            place = panel["gridPos"]
            self.assertLessEqual(place["x"] + place["w"], 24, panel["title"])
            for x in range(place["x"], place["x"] + place["w"]):
                for y in range(place["y"], place["y"] + place["h"]):
                    self.assertNotIn((x, y), taken, f"{panel['title']} over {taken.get((x, y))}")
                    taken[x, y] = panel["title"]

    def known(self, series):
        base = re.sub(r"_(bucket|sum|count)$", "", series)
        return series in self.labels or self.types.get(base) == "histogram" or base in OTHERS

    def test_target_rules(self):
        excluded, used = exclusions(), set()
        for title, query in self.queries():
            with self.subTest(title, query=query):
                self.assertEqual(query.count("("), query.count(")"))
                for name, selector, window in METRIC.findall(query):
                    self.assertTrue(self.known(name), f"there is no {name}")
                    for label in ("job", "instance"):
                        rule = f"target-{label}-rule"
                        if title in excluded.get(rule, ()):
                            used.add((rule, title))
                        else:
                            self.assertIn(f'{label}=~"${label}"', selector, rule)
                    counts = re.search(r"_(total|bucket|sum|count)$", name)
                    self.assertEqual(window, "[$__rate_interval]" if counts else "", "target-rate-interval-rule")
                    if counts:
                        self.assertIn(f"rate({name}{{", query, "target-counter-agg-rule")
                    if name.endswith("_bucket"):
                        self.assertRegex(query, r"histogram_quantile\(0\.\d+, sum by \(le\b")
        self.assertEqual(used, {(rule, title) for rule, titles in excluded.items() for title in titles}, "stale in .lint")

    def test_labels_and_their_values_exist(self):
        for title, query in self.queries():
            with self.subTest(title, query=query):
                having = set()
                for name, selector, _ in METRIC.findall(query):
                    base = re.sub(r"_(bucket|sum|count)$", "", name)
                    of = self.labels.get(name, self.labels.get(base, OTHERS.get(base))) | TARGET_LABELS
                    having |= of
                    for label, operator, value in re.findall(r'(\w+)(=~|!=|=)"([^"]*)"', selector):
                        self.assertIn(label, of, name)
                        if not value.startswith("$"):
                            fits = [v for v in self.values[label] if re.fullmatch(value, v)]
                            self.assertTrue(fits, f"no {label} is {value}")
                for labels in re.findall(r"(?:by|ignoring|on) \(([^)]*)\)", query):
                    self.assertLessEqual(set(re.findall(r"\w+", labels)), having)
        for panel in self.panels:
            for target in panel["targets"]:
                for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                    self.assertRegex(target["expr"], rf"by \([^)]*\b{label}\b", panel["title"])

    def test_every_metric_is_shown(self):
        shown = {re.sub(r"_(bucket|sum|count)$", "", name) for _, query in self.queries() for name, _, _ in METRIC.findall(query)}
        self.assertEqual(set(self.labels) - shown, NOT_SHOWN)

    def test_promql_is_valid(self):
        promtool = shutil.which("promtool")
        if promtool is None:
            print("SKIPPED: promtool is not installed", file=sys.stderr)
            self.skipTest("SKIPPED: promtool is not installed")
        rules = [{"record": f"query:{i}", "expr": re.sub(r"\$__rate_interval", "5m", query)}
                 for i, (_, query) in enumerate(self.queries())]
        with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
            json.dump({"groups": [{"name": "dashboard", "rules": rules}]}, file)  # JSON is YAML
            file.flush()
            done = subprocess.run([promtool, "check", "rules", "--lint=none", file.name], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn(f"{len(rules)} rules found", done.stdout)


if __name__ == "__main__":
    unittest.main()
