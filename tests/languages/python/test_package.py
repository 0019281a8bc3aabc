"""The package as its users get it: a wheel, typed, and a page whose programs run as printed."""

import os
import pathlib
import re
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "client" / "python"
sys.path.insert(0, str(ROOT / "tests" / "integration" / "python"))
from real_daemon import PROGRAM, running  # noqa: E402

real = pytest.mark.skipif(not PROGRAM, reason="SKIPPED: SPECTRUMKVD is not set")

USER = """
from collections.abc import Iterator
import numpy
import spectrumkv as skv
from spectrumkv import aio
from spectrumkv.v1.report_pb2 import TransferReport
from spectrumkv.v1.worker_service_pb2 import Progress

def seen(step: Progress) -> None:
    print(step.chunks_done)

def use(client: skv.Client, pool: skv.SharedMemoryPool) -> TransferReport:
    keys: numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.float16]] = pool.k(0)
    try:
        return client.wait("t", on_progress=seen)
    except skv.reasons.STALE_EPOCH as error:
        wait_ms: int | None = error.retry_after_ms
        raise

async def use_async(client: aio.Client, pool: aio.Pool[skv.SharedMemoryPool]) -> TransferReport:
    await client.send("t", peer="h:1", pool=pool, token_count=1, blocks=[0], policy=skv.policy(budget=0.5))
    return await client.wait("t", on_progress=seen)
"""
WRONG = """
import spectrumkv as skv
def use(client: skv.Client, pool: skv.Pool) -> str:
    client.send("t", peer=7, pool=pool, token_count=1, blocks=[0])
    return client.wait("t").wire_bytes
"""


def run(command, **options):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=240, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the wheel's content and nothing else. Built from a copy: a build writes into its tree."""
    copy = tmp_path_factory.mktemp("source")
    run(["cp", "-r", ROOT / "proto", copy / "proto"])
    (copy / "client").mkdir()
    run(["cp", "-r", PACKAGE, copy / "client" / "python"])
    run(["rm", "-rf", copy / "client/python/src/spectrumkv/v1"])  # the build makes it
    wheels = tmp_path_factory.mktemp("wheels")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "-q"]
    run([*pip, "wheel", "--no-build-isolation", "--no-deps", "-w", wheels, copy / "client" / "python"])
    (wheel,) = wheels.glob("*.whl")
    target = tmp_path_factory.mktemp("installed")
    run([*pip, "install", "--no-deps", "--no-index", "--target", target, wheel])
    return wheel, target


def environment(target):
    return {**os.environ, "PYTHONPATH": str(target)}


def test_the_wheel_has_everything_and_nothing_else(installed):
    wheel, _ = installed
    names = zipfile.ZipFile(wheel).namelist()
    modules = {str(path.relative_to(PACKAGE / "src")) for path in (PACKAGE / "src" / "spectrumkv").rglob("*.py")}
    assert modules <= set(names) and "spectrumkv/py.typed" in names
    assert {"spectrumkv/v1/worker_service_pb2.py", "spectrumkv/v1/worker_service_pb2_grpc.py",
            "spectrumkv/v1/report_pb2.pyi"} <= set(names)  # fmt: skip
    assert all(re.match(r"spectrumkv(-[0-9.]+\.dist-info)?/", name) for name in names)
    assert not any(name.endswith((".pyc", ".so", ".proto")) for name in names)
    metadata = next(name for name in names if name.endswith("/METADATA"))
    told = zipfile.ZipFile(wheel).read(metadata).decode()
    assert {"grpcio", "protobuf", "googleapis-common-protos", "numpy"} == set(re.findall(r"^Requires-Dist: ([a-z-]+)", told, re.M))


def test_users_are_told_of_wrong_types(installed, tmp_path):
    mypy = pathlib.Path(sys.executable).parent / "mypy"
    if not mypy.exists():
        pytest.skip("SKIPPED: no mypy; scripts/install-deps installs it")
    _, target = installed
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text(USER)
    wrong.write_text(WRONG)
    command = [mypy, "--strict", f"--cache-dir={tmp_path}/cache", "--config-file=", "--ignore-missing-imports"]
    done = subprocess.run([*command, right, wrong], env={**os.environ, "MYPYPATH": str(target)}, capture_output=True,
                          text=True, timeout=350)  # fmt: skip
    # As for a package in site-packages: what is wrong in the users' own files, and nothing else.
    errors = re.findall(r"^.*?\b(right|wrong)\.py:\d+: error: .*\[(.*)\]$", done.stdout, re.MULTILINE)
    assert sorted(errors) == [("wrong", "arg-type"), ("wrong", "return-value")], done.stdout + done.stderr


def programs():
    return re.findall(r"^```python\n(.*?)^```$", (PACKAGE / "README.md").read_text(), re.MULTILINE | re.DOTALL)


@real
def test_every_program_of_the_page_runs_with_the_wheel(installed, tmp_path):
    _, target = installed
    said = []
    with running() as prefill, running() as decode:
        for number, text in enumerate(programs()):
            path = tmp_path / f"program{number}.py"
            path.write_text(f"{text}\nprint('from', skv.__file__)\n")
            said.append(run([sys.executable, path, prefill.worker, decode.worker, prefill.peer, decode.peer],
                            env=environment(target)))  # fmt: skip
            assert f"from {target}/spectrumkv/__init__.py" in said[-1]
    assert len(said) == 4
    assert "30 layers are ready" in said[0] and re.search(r"^\d+ of \d+ chunks$", said[0], re.M)
    sent, raw, error = re.search(r"^(\d+) of (\d+) bytes; largest error ([0-9.]+)", said[0], re.M).groups()
    assert int(sent) <= 0.3 * int(raw) and int(raw) == 30 * 2 * 48 * 3 * 64 * 2 and float(error) < 2
    means = [float(mean) for mean in re.search(r"means of the heads: \[(.*)\]", said[1]).group(1).split()]
    assert means == pytest.approx([1, 1, 2, 2], rel=0.01)
    assert len(re.findall(r"^async-\d arrived in [0-9.]+ s$", said[2], re.M)) == 8
    assert "nobody knows request-9" in said[3]


@real
def test_the_ten_lines_of_the_front_page():
    """README.md, as printed."""
    text = (ROOT / "README.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(program.strip().splitlines()) <= 10
    with running() as prefill, running() as decode:
        said = run([sys.executable, "-c", program, prefill.worker, decode.worker, decode.peer])
    sent, raw, error = re.match(r"(\d+) of (\d+) bytes travelled; largest error ([0-9.e-]+)$", said.strip()).groups()
    assert 0 < int(sent) <= 0.3 * int(raw) and 0 < float(error) < 3
