#!/usr/bin/env python3
"""deploy/helm as Helm's own engine renders it: lint, schema of the values, and the same pods as deploy/kustomize.

Not checked by a machine: an installation in a cluster.
"""

import pathlib
import re
import shutil
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
try:
    import helm_python
    import manifests
    import yaml
    from manifests import CHART, KUSTOMIZE, ROOT, check_schema, documents, kustomize, one, pod_of, sidecar_of, worker_of
except ImportError as error:
    print(f"SKIPPED: {error.name} is not installed; scripts/install-deps brings it")
    sys.exit(77)

DEMO = {"demo": {"enabled": True}}


def render(values=None, chart=CHART):
    rendered = helm_python.Chart.load(str(chart)).render(values or {}, name="rel", namespace="ns")
    return [o for name, text in sorted(rendered.items()) if name.endswith(".yaml") for o in documents(text)]


class ChartTest(unittest.TestCase):
    def test_lint(self):
        for values in ({}, DEMO):
            report = helm_python.lint(str(CHART), values, strict=True)
            self.assertEqual(report["errors"], [])
            self.assertEqual([m for m in report["messages"] if m["severity"] > 1], [])

    def test_every_object_fits_kubernetes(self):
        objects = render({**DEMO, "podMonitor": {"enabled": True}})
        self.assertEqual(len([o for o in objects if o["kind"] == "Deployment"]), 2)
        for version in ("1.29", "1.37"):
            self.assertEqual(check_schema(objects, version), {"PodMonitor"})
        print("SKIPPED: PodMonitor against a schema: it is not one of Kubernetes' own kinds")

    def test_nothing_is_made_unasked(self):
        kinds = sorted(o["kind"] for o in render())
        self.assertEqual(kinds, ["ConfigMap", "NetworkPolicy", "Service"])
        self.assertEqual(len(render({"networkPolicy": {"enabled": False}})), 2)

    def test_the_same_pods_as_kustomize(self):
        ours, others = render(DEMO), kustomize(KUSTOMIZE / "example")
        for role in ("prefill", "decode"):
            here, there = one(ours, "Deployment", f"rel-demo-{role}"), one(others, "Deployment", role)
            left, right = sidecar_of(here), sidecar_of(there)
            left.pop("imagePullPolicy")
            self.assertEqual(left, right)
            for key in ("lifecycle", "volumeMounts", "securityContext", "resources", "args"):
                self.assertEqual(worker_of(here)[key], worker_of(there)[key], key)
            self.assertIn({"name": "SPECTRUMKV_WORKER_SOCKET", "value": "/run/spectrumkv/worker.sock"}, worker_of(here)["env"])
            for key in ("terminationGracePeriodSeconds", "securityContext"):
                self.assertEqual(pod_of(here)[key], pod_of(there)[key], key)
            volumes = {v["name"]: v for v in pod_of(there)["volumes"]}
            volumes["spectrumkv-config"] = {"name": "spectrumkv-config", "configMap": {"name": "rel-spectrumkv"}}
            self.assertEqual({v["name"]: v for v in pod_of(here)["volumes"]}, volumes)
        config = [yaml.safe_load(one(o, "ConfigMap")["data"]["spectrumkvd.yaml"]) for o in (ours, others)]
        self.assertEqual(*config)
        self.assertEqual(*(one(o, "NetworkPolicy")["spec"] for o in (ours, others)))
        peers = one(ours, "Service", "rel-spectrumkv-peers"), one(others, "Service", "spectrumkv-peers")
        self.assertEqual(peers[0]["spec"], peers[1]["spec"])
        monitors = render({"podMonitor": {"enabled": True}}), manifests.patched([], ("podmonitor",))
        self.assertEqual(*(one(o, "PodMonitor")["spec"] for o in monitors))

    def test_numbers_follow_the_values(self):
        worker = {"role": "decode", "image": "engine:1", "replicas": 0, "ports": [{"containerPort": 8000}]}
        objects = render({"workers": {"engine": worker}, "termination": {"drainSeconds": 100, "workerSeconds": 200},
                          "resources": {"cpu": 8, "memory": "2Gi"}, "image": {"repository": "r/x", "tag": "t"},
                          "sharedMemory": {"sizeLimit": "1Ti"}, "tls": {"secretName": "other"},
                          "config": {"peer": {"identities": ["a.example"]}}})  # fmt: skip
        deployment = one(objects, "Deployment", "rel-engine")
        self.assertEqual(deployment["spec"]["replicas"], 0)
        pod, sidecar = pod_of(deployment), sidecar_of(deployment)
        self.assertEqual(pod["terminationGracePeriodSeconds"], 100 + 5 + 200 + 10)
        self.assertIn("--drain-timeout 100;", str(sidecar["lifecycle"]["preStop"]))
        self.assertIn("-ge 105 ]", str(worker_of(deployment)["lifecycle"]["preStop"]))
        self.assertEqual(sidecar["resources"]["requests"], {"cpu": "8", "memory": "2Gi"})
        self.assertEqual(sidecar["image"], "r/x:t")
        config = yaml.safe_load(one(objects, "ConfigMap")["data"]["spectrumkvd.yaml"])
        self.assertEqual(config["drain"], {"timeout_ms": "100s"})
        self.assertEqual(config["peer"]["identities"], ["a.example"])
        self.assertEqual(config["peer"]["security"], "mtls", "a value beside the default, not instead of it")
        self.assertIn("1Ti", str(pod["volumes"]))
        self.assertIn("other", str(pod["volumes"]))

    def test_a_new_configuration_starts_new_pods(self):
        def annotations(values):
            deployment = one(render({**DEMO, **values}), "Deployment", "rel-demo-prefill")
            return deployment["spec"]["template"]["metadata"]["annotations"]

        self.assertEqual(annotations({}), annotations({}))
        self.assertNotEqual(annotations({}), annotations({"config": {"peer": {"streams": 4}}}))

    def test_values_that_are_refused(self):
        bad = [
            {"tyop": 1}, {"resources": {"cpu": 1.5}}, {"resources": {"cpu": 0}}, {"resources": {"memory": "much"}},
            {"termination": {"drainSeconds": 0}}, {"tls": {"secretName": ""}}, {"image": {"pullPolicy": "Sometimes"}},
            {"workers": {"a": {"image": "x"}}}, {"workers": {"a": {"role": "both", "image": "x"}}},
            {"workers": {"A_B": {"role": "decode", "image": "x"}}}, {"networkPolicy": {"enabled": "yes"}},
        ]  # fmt: skip
        for values in bad:
            with self.assertRaises(helm_python.HelmValuesError, msg=str(values)):
                render(values)

    def test_parts_in_a_chart_of_another(self):
        """What NOTES.txt tells: the parts, by their names, through .Subcharts."""
        notes = (CHART / "templates/NOTES.txt").read_text()
        parts = ["sidecar", *re.findall(r"podLabels|podAnnotations|podSpec|volumes|workerEnv|workerMounts|workerLifecycle", notes)]
        self.assertEqual(len(parts), 8)
        defined = set(re.findall(r'define "spectrumkv\.(\w+)"', (CHART / "templates/_parts.tpl").read_text()))
        self.assertLessEqual(set(parts), defined)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "engine"
            (path / "templates").mkdir(parents=True)
            (path / "Chart.yaml").write_text("apiVersion: v2\nname: engine\nversion: 1.0.0\n")
            shutil.copytree(CHART, path / "charts/spectrumkv")
            for part in parts:
                (path / "templates" / f"{part.lower()}.yaml").write_text(
                    f'kind: Part\nmetadata: {{name: {part}}}\nit:\n{{{{ include "spectrumkv.{part}" .Subcharts.spectrumkv | indent 2 }}}}\n')
            found = {o["metadata"]["name"]: o["it"] for o in render(chart=path) if o["kind"] == "Part"}
        self.assertEqual(set(found), set(parts))
        self.assertEqual(found["sidecar"][0]["name"], "spectrumkvd")
        self.assertIn("rel-spectrumkv", str(found["volumes"]), "the configuration that the subchart makes")

    def test_versions_agree(self):
        version = re.search(r"^project\(spectrumkv VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text(), re.M).group(1)
        chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
        self.assertEqual(chart["appVersion"], version)
        self.assertIn(f"\nARG VERSION={version}\n", (ROOT / "Dockerfile").read_text())
        example = yaml.safe_load((KUSTOMIZE / "example/kustomization.yaml").read_text())
        self.assertEqual({image["newTag"] for image in example["images"]}, {version})
        self.assertTrue(yaml.safe_load((CHART / "values.yaml").read_text())["demo"]["image"].endswith(f":{version}"))


if __name__ == "__main__":
    unittest.main()
