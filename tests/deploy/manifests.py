"""Renders what is in deploy/ with the tools that operators use; for the tests beside it."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import kubernetes_validate
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
KUSTOMIZE = ROOT / "deploy/kustomize"
CHART = ROOT / "deploy/helm/spectrumkv"
# Schemas of these belong to others than Kubernetes and are in no package.
FOREIGN = {"PodMonitor"}


def tool(name):
    """A program of the tests' Python environment, or of PATH; None where there is none."""
    beside = pathlib.Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def documents(text):
    return [document for document in yaml.safe_load_all(text) if document]


def kustomize(folder):
    """The objects of a kustomization."""
    done = subprocess.run([tool("kubectl"), "kustomize", "--load-restrictor=LoadRestrictionsNone", str(folder)],
                          capture_output=True, text=True, check=False, env={**os.environ, "HOME": "/nonexistent"})  # fmt: skip
    if done.returncode != 0:
        raise AssertionError(f"kubectl kustomize {folder}: {done.stderr}")
    return documents(done.stdout)


def patched(resources, components=("sidecar",), **more):
    """Objects (dicts) with these components of deploy/kustomize applied, as a user's kustomization would."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        (path / "resources.yaml").write_text(yaml.safe_dump_all(resources))
        kustomization = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": ["resources.yaml"],
            "components": [os.path.relpath(KUSTOMIZE / name, path.resolve()) for name in components], **more,
        }  # fmt: skip
        (path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        return kustomize(path)


def one(objects, kind, name=None):
    """The object of this kind, and name where given; there must be exactly one."""
    found = [o for o in objects if o["kind"] == kind and name in (None, o["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} objects {kind} {name or ''}"
    return found[0]


def pod_of(deployment):
    return deployment["spec"]["template"]["spec"]


def sidecar_of(deployment):
    (found,) = [c for c in pod_of(deployment)["initContainers"] if c["name"] == "spectrumkvd"]
    return found


def worker_of(deployment):
    return pod_of(deployment)["containers"][0]


def check_schema(objects, version):
    """Against the schemas of a Kubernetes version, unknown fields refused. The kinds that nobody here can check."""
    left = set()
    for found in objects:
        if found["kind"] in FOREIGN:
            left.add(found["kind"])
            continue
        try:
            kubernetes_validate.validate(found, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            raise AssertionError(f"{found['kind']} {found['metadata']['name']}, {version}: {error}") from error
    return left
