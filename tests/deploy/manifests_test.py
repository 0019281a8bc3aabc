#!/usr/bin/env python3
"""deploy/kustomize as kubectl renders it: what it makes of any worker, and whether its numbers fit each other.

Not checked by a machine: the PodMonitor against the schema of its operator, and what a real kubelet does with all this.
"""

import copy
import functools
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
try:
    import manifests
    import yaml
    from manifests import KUSTOMIZE, check_schema, kustomize, one, patched, pod_of, sidecar_of, worker_of
except ImportError as error:
    print(f"SKIPPED: {error.name} is not installed; scripts/install-deps brings it")
    sys.exit(77)
if manifests.tool("kubectl") is None:
    print("SKIPPED: kubectl is not installed; scripts/install-deps brings it")
    sys.exit(77)

DAEMON = os.environ.get("SPECTRUMKVD", "")
OLDEST, NEWEST = "1.29", "1.37"
CLAIMS_SINCE = "1.34"  # resource.k8s.io/v1


def worker(name="prefill", role="prefill", **container):
    """A Deployment as short as one can be, with changes to its container."""
    return {
        "apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {"name": name, **({"labels": {"spectrumkv.io/role": role}} if role else {})},
        "spec": {"selector": {"matchLabels": {"app": name}},
                 "template": {"metadata": {"labels": {"app": name}},
                              "spec": {"containers": [{"name": "engine", "image": "engine:1", **container}]}}},
    }  # fmt: skip


@functools.lru_cache(maxsize=1)
def _everything():
    return patched([worker(), worker("decode", "decode")], ("sidecar", "podmonitor"))


def everything():
    """Two workers with all that is for them."""
    return copy.deepcopy(_everything())


def bytes_of(text):
    number, unit = re.fullmatch(r"(\d+)([KMGT]i)B?", text).groups()
    return int(number) * 1024 ** ("KMGT".index(unit[0]) + 1)


def mounts(container):
    return {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}


class SchemaTest(unittest.TestCase):
    def test_every_object_fits_kubernetes(self):
        unchecked = set()
        for version in (OLDEST, NEWEST):
            unchecked |= check_schema(kustomize(KUSTOMIZE / "example"), version)
            unchecked |= check_schema(everything(), version)
        for kind in sorted(unchecked):
            print(f"SKIPPED: {kind} against a schema: it is not one of Kubernetes' own kinds")
        self.assertEqual(unchecked, {"PodMonitor"})

    def test_the_schemas_notice_mistakes(self):
        objects = everything()
        sidecar_of(one(objects, "Deployment", "prefill"))["livenesProbe"] = {}
        with self.assertRaises(AssertionError):
            check_schema(objects, NEWEST)

    def test_gpu_variant(self):
        objects = patched([worker()], ("sidecar", "cuda-ipc"))
        check_schema(objects, CLAIMS_SINCE)
        check_schema(objects, NEWEST)
        pod = pod_of(one(objects, "Deployment"))
        (claim,) = pod["resourceClaims"]
        self.assertEqual(claim["resourceClaimTemplateName"], one(objects, "ResourceClaimTemplate")["metadata"]["name"])
        for container in (sidecar_of(one(objects, "Deployment")), pod["containers"][0]):
            self.assertEqual(container["resources"]["claims"], [{"name": claim["name"]}])
        self.assertIs(pod["shareProcessNamespace"], True)
        self.assertNotIn("shareProcessNamespace", pod_of(one(patched([worker()]), "Deployment")))


class AnyWorkerTest(unittest.TestCase):
    def check(self, deployment):
        found, sidecar = worker_of(deployment), sidecar_of(deployment)
        here, there = mounts(found), mounts(sidecar)
        for path in ("/dev/shm", "/run/spectrumkv"):
            self.assertEqual(here[path], there[path], path)
        paths = [mount["mountPath"] for mount in found["volumeMounts"]]
        self.assertEqual(len(paths), len(set(paths)), "one path twice")
        volumes = {volume["name"]: volume for volume in pod_of(deployment)["volumes"]}
        self.assertLessEqual(set(there.values()), set(volumes))
        self.assertEqual(volumes[here["/dev/shm"]]["emptyDir"]["medium"], "Memory")
        self.assertNotIn("/run/spectrumkv-admin", here)
        self.assertNotIn("/etc/spectrumkv-tls", here)
        self.assertIn({"name": "SPECTRUMKV_WORKER_SOCKET", "value": "/run/spectrumkv/worker.sock"}, found["env"])
        self.assertEqual(pod_of(deployment)["initContainers"][0]["name"], "spectrumkvd", "others may need the daemon")
        self.assertEqual(sidecar["restartPolicy"], "Always")

    def test_a_worker_with_nothing(self):
        self.check(one(patched([worker()]), "Deployment"))

    def test_a_worker_with_mounts_environment_and_init_containers_of_its_own(self):
        busy = worker(
            volumeMounts=[{"name": "shm", "mountPath": "/dev/shm"}, {"name": "models", "mountPath": "/models"}],
            env=[{"name": "HF_HOME", "value": "/models"}], lifecycle={"postStart": {"exec": {"command": ["true"]}}},
        )  # fmt: skip
        pod = pod_of(busy)
        pod["volumes"] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}, {"name": "models", "emptyDir": {}}]
        pod["initContainers"] = [{"name": "download", "image": "download:1"}]
        pod["containers"].append({"name": "proxy", "image": "proxy:1"})
        pod["securityContext"] = {"runAsUser": 1000}
        before = copy.deepcopy(busy)
        deployment = one(patched([busy]), "Deployment")
        self.check(deployment)
        after = pod_of(deployment)
        self.assertEqual(mounts(after["containers"][0])["/models"], "models")
        self.assertIn(before["spec"]["template"]["spec"]["containers"][0]["env"][0], after["containers"][0]["env"])
        self.assertEqual(after["containers"][0]["lifecycle"]["postStart"], {"exec": {"command": ["true"]}})
        self.assertEqual(after["containers"][1], {"name": "proxy", "image": "proxy:1"})
        self.assertEqual([c["name"] for c in after["initContainers"]], ["spectrumkvd", "download"])
        self.assertEqual(after["securityContext"]["runAsUser"], 1000)
        self.assertEqual(after["securityContext"]["fsGroup"], 65532)

    def test_others_are_left_alone(self):
        plain = worker("web", role="")
        stateful = {**worker("db", role=""), "kind": "StatefulSet"}
        objects = patched([plain, stateful, worker()])
        self.assertEqual(one(objects, "Deployment", "web"), plain)
        self.assertEqual(one(objects, "StatefulSet", "db"), stateful)
        self.assertNotIn("PodTemplate", {o["kind"] for o in objects}, "what is only copied from must not be applied")


class SidecarTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.objects = everything()
        cls.deployment = one(cls.objects, "Deployment", "prefill")
        cls.sidecar = sidecar_of(cls.deployment)

    def test_restricted(self):
        """The Pod Security Standard "restricted", and more: nothing can be written but what is mounted."""
        context = self.sidecar["securityContext"]
        self.assertEqual(context["capabilities"], {"drop": ["ALL"]})
        self.assertEqual(context["seccompProfile"], {"type": "RuntimeDefault"})
        self.assertEqual((context["runAsUser"], context["runAsGroup"]), (65532, 65532))
        for key, wanted in (("runAsNonRoot", True), ("allowPrivilegeEscalation", False), ("readOnlyRootFilesystem", True)):
            self.assertIs(context[key], wanted, key)
        for key in ("hostNetwork", "hostPID", "hostIPC"):
            self.assertNotIn(key, pod_of(self.deployment))
        for volume in pod_of(self.deployment)["volumes"]:
            self.assertTrue({"emptyDir", "configMap", "projected"} & set(volume), volume)

    def test_whole_cpus(self):
        resources = self.sidecar["resources"]
        self.assertEqual(resources["requests"], resources["limits"])
        self.assertRegex(resources["limits"]["cpu"], r"^[1-9]\d*$")
        (threads,) = [e for e in self.sidecar["env"] if e["name"] == "SPECTRUMKV_CODEC_THREADS"]
        self.assertEqual(threads["valueFrom"]["resourceFieldRef"], {"resource": "limits.cpu", "divisor": "1"})

    def test_probes_ask_the_health_port(self):
        ports = {port["name"]: port["containerPort"] for port in self.sidecar["ports"]}
        for probe, service in (("startupProbe", "readiness"), ("readinessProbe", "readiness"), ("livenessProbe", "liveness")):
            self.assertEqual(self.sidecar[probe]["grpc"], {"port": ports["skv-health"], "service": service}, probe)
        text = (manifests.ROOT / "config/spectrumkvd.yaml").read_text()
        addresses = re.findall(r"^  listen_address: 0\.0\.0\.0:(\d+)$", text, re.M)
        self.assertEqual(sorted(map(int, addresses)), sorted(ports.values()), "ports are those of the configuration")

    def test_an_end_adds_up(self):
        """Drain, worker's wait, worker's end, sidecar's end: in this order, within the grace period."""
        drain = int(re.search(r"--drain-timeout (\d+)", str(self.sidecar["lifecycle"]["preStop"])).group(1))
        wait = int(re.search(r"-ge (\d+)", str(worker_of(self.deployment)["lifecycle"]["preStop"])).group(1))
        grace = pod_of(self.deployment)["terminationGracePeriodSeconds"]
        configured = re.search(r"timeout_ms: (\d+)s", one(self.objects, "ConfigMap")["data"]["spectrumkvd.yaml"]).group(1)
        self.assertEqual(int(configured), drain)
        self.assertGreater(wait, drain, "else the worker goes while its KV is read")
        self.assertGreaterEqual(grace - wait, 40, "the worker's own end and the sidecar's come after the wait")

    def test_certificates_are_a_folder(self):
        (volume,) = [v for v in pod_of(self.deployment)["volumes"] if v["name"] == "spectrumkv-tls"]
        (source,) = volume["projected"]["sources"]
        (mount,) = [m for m in self.sidecar["volumeMounts"] if m["name"] == "spectrumkv-tls"]
        self.assertNotIn("subPath", str(self.sidecar["volumeMounts"]))
        config = one(self.objects, "ConfigMap")["data"]["spectrumkvd.yaml"]
        peer = yaml.safe_load(config)["peer"]
        self.assertEqual(peer["security"], "mtls")
        files = {f"{mount['mountPath']}/{item['path']}" for item in source["secret"]["items"]}
        self.assertEqual(files, set(peer["tls"].values()))
        self.assertEqual(volume["projected"]["defaultMode"] & 0o007, 0)

    def test_verdicts_have_a_place(self):
        """The root is read-only, and the worker must not write what opens tiers to it."""
        config = yaml.safe_load(one(self.objects, "ConfigMap")["data"]["spectrumkvd.yaml"])
        folder = os.path.dirname(config["quality"]["verdicts_file"])
        self.assertIn(folder, mounts(self.sidecar))
        self.assertNotIn(folder, mounts(worker_of(self.deployment)))

    def test_memory_holds_what_the_daemon_takes(self):
        if not DAEMON:
            print("SKIPPED: memory of the sidecar: SPECTRUMKVD is not set")
            self.skipTest("SPECTRUMKVD is not set")
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(one(self.objects, "ConfigMap")["data"]["spectrumkvd.yaml"])
            file.flush()
            told = subprocess.run([DAEMON, "--config", file.name, "--print-config"], capture_output=True, text=True,
                                  check=False)  # fmt: skip
        self.assertEqual(told.returncode, 0, told.stderr)
        keys = dict(re.findall(r"^  (\w+): (\S+)$", told.stdout, re.M))
        slots = (int(keys["send_slots"]) + int(keys["receive_slots"])) * bytes_of(keys["slot_bytes"])
        owned = 0 if keys["max_owned_bytes"] == "0" else bytes_of(keys["max_owned_bytes"])
        limit = bytes_of(self.sidecar["resources"]["limits"]["memory"])
        print(f"sidecar: {slots >> 20} MiB of slots, {owned >> 20} MiB for pools, limit {limit >> 20} MiB")
        self.assertLess(2 * slots + owned, limit)


class NetworkTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.objects = everything()
        cls.labels = one(cls.objects, "Deployment", "decode")["spec"]["template"]["metadata"]["labels"]

    def selects(self, selector):
        return selector.items() <= self.labels.items()

    def test_who_reaches_which_port(self):
        policy = one(self.objects, "NetworkPolicy")["spec"]
        self.assertTrue(self.selects(policy["podSelector"]["matchLabels"]))
        everybody, closed = set(), set()
        for rule in policy["ingress"]:
            for port in rule["ports"]:
                if port["protocol"] != "TCP":
                    continue
                span = set(range(port["port"], port.get("endPort", port["port"]) + 1))
                (closed if "from" in rule else everybody).update(span)
        self.assertEqual(set(range(1, 65536)) - everybody, {7420, 7421, 7422}, "the worker's ports stay open")
        self.assertEqual(closed, {7420, 7422})
        (peers,) = [rule for rule in policy["ingress"] if {"protocol": "TCP", "port": 7420} in rule["ports"]]
        self.assertTrue(all(self.selects(f["podSelector"]["matchLabels"]) for f in peers["from"]))

    def test_discovery(self):
        service = one(self.objects, "Service")["spec"]
        self.assertEqual(service["clusterIP"], "None")
        self.assertTrue(self.selects(service["selector"]))
        names = {port["name"] for port in sidecar_of(one(self.objects, "Deployment", "decode"))["ports"]}
        self.assertIn(service["ports"][0]["targetPort"], names)

    def test_monitoring(self):
        monitor = one(self.objects, "PodMonitor")["spec"]
        self.assertTrue(self.selects(monitor["selector"]["matchLabels"]))
        (endpoint,) = monitor["podMetricsEndpoints"]
        names = {port["name"] for port in sidecar_of(one(self.objects, "Deployment", "decode"))["ports"]}
        self.assertIn(endpoint["port"], names)


class HooksTest(unittest.TestCase):
    """The commands of the hooks, run by a shell, with the folder in another place."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.deployment = one(everything(), "Deployment", "prefill")

    def command(self, hook, **changes):
        words = hook["exec"]["command"]
        text = words[-1].replace("/run/spectrumkv/", f"{self.folder.name}/")
        for before, after in changes.items():
            text = text.replace(before.strip("_"), after)
        return [*words[:-1], text]

    def worker_wait(self, **changes):
        return subprocess.Popen(self.command(worker_of(self.deployment)["lifecycle"]["preStop"], **changes))

    def test_the_worker_waits_until_the_sidecar_is_drained(self):
        waiting = self.worker_wait()
        with self.assertRaises(subprocess.TimeoutExpired):
            waiting.wait(1.2)
        # The sidecar's hook says so even where the drain failed: the worker must not wait for nothing.
        hook = self.command(sidecar_of(self.deployment)["lifecycle"]["preStop"], _spectrumkvctl="false")
        self.assertEqual(subprocess.run(hook, check=False).returncode, 0)
        self.assertEqual(waiting.wait(10), 0)

    def test_the_worker_does_not_wait_for_ever(self):
        start = time.monotonic()
        self.assertEqual(self.worker_wait(_65="2").wait(20), 0)
        self.assertGreater(time.monotonic() - start, 1.9)

    def test_an_old_drain_is_forgotten(self):
        drained = pathlib.Path(self.folder.name) / "drained"
        drained.touch()
        words = [w.replace("/run/spectrumkv/", f"{self.folder.name}/")
                 for w in sidecar_of(self.deployment)["lifecycle"]["postStart"]["exec"]["command"]]  # fmt: skip
        subprocess.run(words, check=True)
        self.assertFalse(drained.exists())


if __name__ == "__main__":
    unittest.main()
