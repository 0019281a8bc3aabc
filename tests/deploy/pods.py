"""The pods of deploy/kustomize/example as `podman kube play` can run them, and what is different from a cluster there."""

import contextlib
import copy
import json
import pathlib
import ssl
import time
import urllib.request

import yaml
from containers import IMAGE, WORKER
from manifests import KUSTOMIZE, kustomize, one, pod_of, sidecar_of, worker_of

GROUP = 65532


def until(what, timeout_s=60, why="it never came"):
    """Waits for a true value and returns it."""
    end = time.monotonic() + timeout_s
    while True:
        found = what()
        if found:
            return found
        if time.monotonic() > end:
            raise AssertionError(why() if callable(why) else why)
        time.sleep(0.1)


class Pods:
    """Prefill and decode of the example. What podman 4.3 lacks is done here by hand, and only that:

    - native sidecars: the sidecar is one of the containers, started before the worker by its place in the list;
    - fsGroup: an init container gives the shared folders to the group, as the kubelet does;
    - projected volumes: the certificates are a folder of this machine, with the mode and the group they would have;
    - probes and hooks: the test asks and runs the commands of the manifest itself;
    - folders of a pod have its name in theirs: podman would give two pods the same one;
    - ports are left out: podman would publish them on this machine;
    - `medium: Memory` is ignored: sharing and permissions are real, tmpfs and its accounting are not.
    """

    def __init__(self, podman, folder, certificates):
        self.podman, self.folder, self.certificates = podman, folder, certificates
        self.objects = kustomize(KUSTOMIZE / "example")
        self.played = {}

    def deployment(self, role):
        return one(self.objects, "Deployment", role)

    def _volumes(self, role):
        for volume in pod_of(self.deployment(role))["volumes"]:
            if "emptyDir" in volume:
                yield {"name": f"{role}-{volume['name']}", "emptyDir": {}}
            elif "projected" in volume:
                yield {"name": volume["name"], "hostPath": {"path": str(self.certificates), "type": "Directory"}}
            else:
                yield volume

    def manifest(self, role, environment):
        """A Pod, and the ConfigMap it mounts."""
        deployment = copy.deepcopy(self.deployment(role))  # the hooks are wanted later
        sidecar, worker = sidecar_of(deployment), worker_of(deployment)
        for container, image in ((sidecar, IMAGE), (worker, WORKER)):
            for key in ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "ports"):
                container.pop(key, None)
            container.update(image=image, imagePullPolicy="Never")
            for mount in container["volumeMounts"]:
                if not mount.get("readOnly"):
                    mount["name"] = f"{role}-{mount['name']}"
        sidecar.pop("restartPolicy")
        # Another user than the sidecar's, and the one that engines' images have most often.
        worker["securityContext"] = {"runAsUser": 0}
        worker["env"] = [e for e in worker.get("env", []) if e["name"] not in environment]
        worker["env"] += [{"name": name, "value": value} for name, value in environment.items()]
        shared = [m for m in sidecar["volumeMounts"] if not m.get("readOnly")]
        folders = " ".join(m["mountPath"] for m in shared)
        owner = {"name": "fsgroup", "image": IMAGE, "imagePullPolicy": "Never", "securityContext": {"runAsUser": 0},
                 "command": ["sh", "-c", f"chgrp {GROUP} {folders} && chmod 2777 {folders}"], "volumeMounts": shared}  # fmt: skip
        pod = {
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"skv-{role}", "labels": {"app": role}},
            "spec": {"restartPolicy": "Never", "initContainers": [owner], "containers": [sidecar, worker],
                     "volumes": list(self._volumes(role))},
        }  # fmt: skip
        config = one(self.objects, "ConfigMap")
        return [config, pod]

    def play(self, role, **environment):
        path = self.folder / f"{role}.yaml"
        path.write_text(yaml.safe_dump_all(self.manifest(role, environment)))
        self.played[role] = path
        self.podman.run("kube", "play", path)

    def remove(self):
        for path in self.played.values():
            self.podman.run("kube", "down", path, check=False)
        self.podman.run("volume", "prune", "--force", check=False)  # the configuration's; all here are the tests' own

    def name(self, role, container):
        return f"skv-{role}-{container}"

    def address(self, role):
        infra = self.podman.inspect("pod", f"skv-{role}")["InfraContainerID"]
        networks = self.podman.inspect("container", infra)["NetworkSettings"]["Networks"]
        (address,) = [network["IPAddress"] for network in networks.values()]
        return address

    def execute(self, role, container, *words, check=True):
        return self.podman.run("exec", self.name(role, container), *words, check=check)

    def status(self, role):
        """What spectrumkvctl says in the sidecar; {} while no daemon answers."""
        done = self.execute(role, "spectrumkvd", "spectrumkvctl", "status", "--json", check=False)
        return json.loads(done.stdout) if done.stdout.startswith("{") else {}

    def serving(self, role, service):
        words = ["spectrumkvctl", "health", "--address", "127.0.0.1:7421", "--service", service]
        return self.execute(role, "spectrumkvd", *words, check=False).returncode == 0

    def events(self, role):
        """What the worker has told, in order."""
        lines = self.podman.run("logs", self.name(role, "worker")).stdout.splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def told(self, role, event):
        return [e for e in self.events(role) if e["event"] == event]

    def hook(self, role, container, which):
        """Starts the command of a hook in its container."""
        part = sidecar_of(self.deployment(role)) if container == "spectrumkvd" else worker_of(self.deployment(role))
        return self.podman.start("exec", self.name(role, container), *part["lifecycle"][which]["exec"]["command"])

    def state(self, role, container):
        return self.podman.inspect("container", self.name(role, container))["State"]

    def metrics(self, role):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://{self.address(role)}:7422/metrics", timeout=20) as answer:
            lines = answer.read().decode().splitlines()
        return {n: float(v) for n, v in (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))}

    def logs(self):
        for role in self.played:
            for container in ("spectrumkvd", "worker"):
                done = self.podman.run("logs", "--tail", "40", self.name(role, container), check=False)
                yield f"--- {role} {container}\n{done.stdout}{done.stderr}"


def dial_without_certificate(address):
    """A TLS handshake as somebody without a certificate would try it; whether the daemon let it in."""
    import socket

    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with contextlib.suppress(OSError), socket.create_connection((address, 7420), timeout=10) as raw:
        with context.wrap_socket(raw) as wrapped:  # TLS 1.3: the refusal comes with the first read
            wrapped.settimeout(10)
            wrapped.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
            return bool(wrapped.recv(1))
    return False


def certificates(ca, folder):
    """The files of the Secret, as the kubelet would lay them: for the group of the sidecar alone."""
    import os

    issued = ca.issue("daemon", 30)
    folder = pathlib.Path(folder)
    folder.mkdir()
    for name, key in (("tls.crt", "certificate_file"), ("tls.key", "private_key_file"), ("ca.crt", "ca_file")):
        path = folder / name
        path.write_bytes(pathlib.Path(issued[f"peer__tls__{key}"]).read_bytes())
        path.chmod(0o440)
        os.chown(path, 0, GROUP)
    return folder
