"""The C++ client as it is installed: what is in it, and a project outside that uses it."""

import os
import pathlib
import re

import pytest
from conftest import EXAMPLES, build, no_pools, run

BUILD = pathlib.Path(os.environ.get("SPECTRUMKV_BUILD", ""))


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The tree of `cmake --install`, the client's part alone."""
    prefix = tmp_path_factory.mktemp("installed")
    build(["cmake", "--install", BUILD, "--component", "client", "--prefix", prefix])
    return prefix


@pytest.fixture(scope="module")
def program(installed, tmp_path_factory):
    """The example, built by a project that knows the installed tree and nothing else."""
    folder = tmp_path_factory.mktemp("outside")
    build(["cp", "-r", EXAMPLES / "cpp", folder / "source"])
    # Neither the checkout nor gRPC's package is to be found: the package must not need them.
    build(["cmake", "-S", folder / "source", "-B", folder / "build", f"-DCMAKE_PREFIX_PATH={installed}",
           "-DCMAKE_DISABLE_FIND_PACKAGE_gRPC=ON", "-DCMAKE_DISABLE_FIND_PACKAGE_Protobuf=ON",
           "-DCMAKE_CXX_STANDARD=17", "-DCMAKE_CXX_STANDARD_REQUIRED=ON", "-DCMAKE_CXX_EXTENSIONS=OFF",
           "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror"])  # fmt: skip
    build(["cmake", "--build", folder / "build"])
    return folder / "build" / "round_trip"


def library(installed):
    return (installed / next(iter(installed.glob("lib*/**/libspectrumkv.so")))).resolve()


def test_nothing_but_the_client_is_installed(installed):
    files = sorted(str(path.relative_to(installed)) for path in installed.rglob("*") if not path.is_dir())
    headers = [name for name in files if name.startswith("include/")]
    assert headers == [f"include/spectrumkv/{name}.h" for name in ("cache", "client", "status", "transfer")]
    rest = [name for name in files if name not in headers]
    assert all(re.search(r"/libspectrumkv\.so[.0-9]*$|/cmake/spectrumkv/spectrumkv-config[a-z-]*\.cmake$", name)
               for name in rest), rest  # fmt: skip
    targets = "".join(path.read_text() for path in installed.rglob("*.cmake"))
    assert str(BUILD) not in targets and "gRPC" not in targets


def test_headers_bring_the_standard_library_alone(installed):
    done = run([os.environ.get("CXX", "c++"), "-std=c++17", "-Wall", "-Wextra", "-Werror", "-M", "-x", "c++",
                f"-I{installed}/include", f"{installed}/include/spectrumkv/client.h"])  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = done.stdout.replace("\\\n", " ").split()
    assert f"{installed}/include/spectrumkv/transfer.h" in seen
    assert not [name for name in seen if re.search(r"grpc|google|absl|/client/|/proto/", name.replace(str(installed), ""))]


def test_only_the_public_names_are_exported(installed):
    done = run(["nm", "-D", "--defined-only", "-C", library(installed)])
    assert done.returncode == 0, done.stderr
    names = [line.split(maxsplit=2)[2] for line in done.stdout.splitlines()]
    assert any(name.startswith("spectrumkv::Client::Send(") for name in names)
    foreign = [name for name in names if re.search(r"spectrumkv::(v1|client)::|grpc::|google::|absl::", name)]
    assert foreign == []


def test_no_server_code_is_in_it(installed):
    needed = run(["readelf", "-d", library(installed)]).stdout
    assert "libgrpc++" in needed
    assert not re.search(r"yaml|prometheus|libcu", needed)
    symbols = run(["nm", "-C", library(installed)]).stdout
    assert "spectrumkv::client::Pool::Renew" in symbols, "stripped: this test proves nothing"
    ours = set(re.findall(r"\bspectrumkv::(?:\(anonymous namespace\)::)?(\w+)", symbols))
    server = {"PoolRegistry", "TransferManagerImpl", "SlotPool", "Planner", "PeerServer", "StreamCore"} & ours
    assert not server


def test_the_outside_project_moves_a_cache(program, daemons):
    prefill, decode = daemons
    for budget in ("1.1", "0.3", "auto:0.5"):
        done = run([program, prefill.worker, decode.worker, decode.peer, budget])
        assert done.returncode == 0, done.stderr + prefill.log() + decode.log()
        assert "layers ready: 4" in done.stdout and "committed: 819200 KV bytes" in done.stdout
        error = float(re.search(r"relative error: (\d\.\d+)", done.stdout)[1])
        assert error == 0 if budget == "1.1" else error < 0.2
    assert no_pools(prefill) and no_pools(decode)


def test_errors_reach_the_outside_project_whole(program, daemons, tmp_path):
    prefill, decode = daemons
    done = run([program, tmp_path / "nobody.sock", decode.worker, decode.peer])
    assert done.returncode == 1
    assert done.stderr.startswith(f"round_trip: UNAVAILABLE: no daemon answers at {tmp_path}/nobody.sock")
    done = run([program, prefill.worker, decode.worker, decode.peer, "-1"])
    assert done.returncode == 1 and done.stderr.startswith("round_trip: INVALID_ARGUMENT INVALID_BUDGET: "), done.stderr
    assert re.search(r"\(.*=.*\)", done.stderr), "the offending value is told"
