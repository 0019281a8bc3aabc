"""Ways to a daemon that need no generated code or no Unix socket: server reflection, and worker.tcp_address."""

import importlib
import pathlib
import re
import socket
import types

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from moves import check, fill, make_side, move, poison, random_words, small_group, unique
from real_daemon import refused, running

import spectrumkv as skv
from spectrumkv.bearer import BearerToken, read_token
from spectrumkv.v1 import admin_service_pb2, probe_service_pb2, worker_service_pb2

HEALTH, REFLECTION = "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"
WORKER = worker_service_pb2.DESCRIPTOR.services_by_name["WorkerService"]
PROBE = probe_service_pb2.DESCRIPTOR.services_by_name["ProbeService"]
ADMIN = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"]
ON_WORKERS = {WORKER.full_name, PROBE.full_name, HEALTH, REFLECTION}


def socket_channel(path, authority=""):
    return grpc.insecure_channel(f"unix:{path}", [("grpc.default_authority", authority)] if authority else [])


class Reflected:
    """Calls by what the server tells of itself, as grpcurl makes them; knows nothing of spectrumkv.v1."""

    def __init__(self, channel):
        self.channel = channel
        self._told = ProtoReflectionDescriptorDatabase(channel)
        self.pool = descriptor_pool.DescriptorPool(self._told)

    def services(self):
        return sorted(self._told.get_services())

    def call(self, method, request=None):
        """"package.Service/Method" of JSON to JSON; unary."""
        service, name = method.split("/")
        found = self.pool.FindServiceByName(service).FindMethodByName(name)
        assert not found.client_streaming and not found.server_streaming
        message = json_format.ParseDict(request or {}, message_factory.GetMessageClass(found.input_type)())
        answer_class = message_factory.GetMessageClass(found.output_type)
        answer = self.channel.unary_unary(f"/{method}", lambda m: m.SerializeToString(), answer_class.FromString)(
            message, timeout=20
        )
        return json_format.MessageToDict(answer)


@pytest.mark.parametrize("named", ["localhost", "as it is", "escaped"])
def test_reflection_tells_everything(named, prefill):
    """Both sockets, whatever a client takes for the authority of a socket: Go's take its path."""
    for path, service in ((prefill.worker, WORKER), (prefill.worker, PROBE), (prefill.admin_socket, ADMIN)):
        authority = {"localhost": "", "as it is": path, "escaped": path.replace("/", "%2F")}[named]
        with socket_channel(path, authority) as channel:
            server = Reflected(channel)
            expected = {REFLECTION, ADMIN.full_name} if service is ADMIN else ON_WORKERS
            assert set(server.services()) == expected
            told = server.pool.FindServiceByName(service.full_name)
            assert [m.name for m in told.methods] == [m.name for m in service.methods]
            for mine, theirs in zip(service.methods, told.methods, strict=True):
                for kind in ("input_type", "output_type"):
                    fields = [[(f.name, f.number, f.type) for f in getattr(m, kind).fields] for m in (mine, theirs)]
                    assert fields[0] == fields[1], mine.full_name


def test_the_other_ports_tell_nothing(prefill):
    for address in (prefill.peer, prefill.health):
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as error:
            Reflected(channel).services()
        assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED


def _demo_lines(prefill, decode, capsys, monkeypatch):
    """The grpcurl lines that the demo prints for these daemons."""
    monkeypatch.syspath_prepend(pathlib.Path(__file__).resolve().parents[3] / "client/examples/python/demo")
    table = importlib.import_module("table")
    addresses = [types.SimpleNamespace(worker_socket=daemon.worker, admin_socket=daemon.admin_socket,
                                       metrics=daemon.metrics_address) for daemon in (prefill, decode)]  # fmt: skip
    pair = types.SimpleNamespace(
        prefill=types.SimpleNamespace(addresses=addresses[0]), decode=types.SimpleNamespace(addresses=addresses[1])
    )
    table.addresses(pair, False)
    return [line.split() for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["grpcurl"]]


def test_the_demos_grpcurl_lines_work(source, target, prefill, decode, transfer_id, capsys, monkeypatch):
    """grpcurl itself is not at hand: the same calls over the same reflection."""
    move_something(source, target, prefill, decode, transfer_id)
    lines = _demo_lines(prefill, decode, capsys, monkeypatch)
    assert len(lines) == 3
    answers = {}
    for _, plaintext, unix, path, what in lines:
        assert (plaintext, unix) == ("-plaintext", "-unix")
        with socket_channel(path, path) as channel:
            server = Reflected(channel)
            answers[what] = server.services() if what == "list" else server.call(what)
    assert set(answers["list"]) == ON_WORKERS
    status = answers["spectrumkv.v1.AdminService/GetStatus"]
    assert status["ready"] and status["epoch"] == str(prefill.epoch)
    transfers = answers["spectrumkv.v1.AdminService/ListTransfers"]["transfers"]
    assert transfer_id in [transfer["transferId"] for transfer in transfers]


def move_something(source, target, prefill, decode, transfer_id):
    rng = np.random.default_rng(11)
    group = small_group()
    kv = random_words(rng, (2, 2, 10, 2, 16), "float16")
    a = make_side(source, prefill, [group], {0: [3, 1, 2]})
    b = make_side(target, decode, [group], {0: [5, 0, 7]})
    with a.pool, b.pool:
        fill(a, [kv])
        poison(b)
        move(transfer_id, source, target, prefill, decode, a, b, 10, policy=skv.policy(allocator="RAW", budget=1.2))
        check(b, [kv])


def listening(pid):
    """TCP ports on which a process listens."""
    inodes = set()
    for entry in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.update(re.findall(r"^socket:\[(\d+)\]$", str(entry.readlink())))
        except FileNotFoundError:
            continue
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.add(int(fields[1].rsplit(":", 1)[1], 16))
    return ports


def port_of(address):
    return int(address.rsplit(":", 1)[1])


def test_tcp_is_off_by_default(prefill):
    assert prefill.worker_tcp == ""
    assert listening(prefill.process.pid) == {port_of(a) for a in (prefill.peer, prefill.health, prefill.metrics_address)}


def token_of(daemon):
    return daemon.keys["worker.tcp_token_file"]


@pytest.mark.parametrize("token", [None, "", "a-token-of-this-tesu", "a-token-of-this-tes", "a-token-of-this-test2"])
def test_tcp_without_the_token_is_refused(token, tmp_path):
    """Every method of every service, each refusal counted, and the token in no log, answer or error."""
    with running(worker__tcp_address="127.0.0.1:0") as daemon, grpc.insecure_channel(daemon.worker_tcp) as bare:
        channel = bare if token is None else grpc.intercept_channel(bare, BearerToken(token))
        calls = [f"/{WORKER.full_name}/{method.name}" for method in WORKER.methods]
        calls += [f"/{HEALTH}/Check", f"/{REFLECTION}/ServerReflectionInfo", "/nobody/Nothing"]
        before = daemon.errors("unauthenticated")
        for call in calls:
            with pytest.raises(grpc.RpcError) as error:
                list(channel.stream_stream(call)(iter([b""]), timeout=20))
            assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED, call
            assert ("NO_TOKEN" if token is None else "WRONG_TOKEN") in error.value.details()
            assert "a-token-of-this" not in str(error.value)
        assert daemon.errors("unauthenticated") == before + len(calls)
        with daemon.client() as local, daemon.admin() as admin:  # sockets need none
            with refused("NOT_FOUND", "UNKNOWN_TRANSFER"):
                local.get_transfer("nobody")
            assert "a-token-of-this" not in admin.GetConfig(admin_service_pb2.GetConfigRequest()).yaml
        assert "a-token-of-this" not in daemon.log()
        wrong = tmp_path / "wrong"
        wrong.write_text("another-token-of-somebody\n")
        with skv.Client(daemon.worker_tcp, token_file=wrong) as client, pytest.raises(skv.SpectrumKVError) as error:
            client.get_transfer("nobody")
        assert error.value.code == "UNAUTHENTICATED" and "another-token" not in repr(error.value)


@pytest.mark.parametrize("text", [None, "", "short-of-sixteen", "has a space in it, which none has", "x" * 1025, "\x01" * 20])
def test_a_token_file_that_is_none(text, tmp_path):
    path = tmp_path / "token"
    if text is not None:
        path.write_text(text[:15] if text == "short-of-sixteen" else text)
    with pytest.raises(RuntimeError, match="reason=TOKEN_FILE.*token") as error, running(
        worker__tcp_address="127.0.0.1:0", worker__tcp_token_file=path
    ):
        pass
    assert not text or text[:15] not in str(error.value), "the content is told"


def test_tcp_needs_a_token_file():
    with pytest.raises(RuntimeError, match="worker.tcp_token_file is empty"), running(
        worker__tcp_address="127.0.0.1:0", worker__tcp_token_file=""
    ):
        pass


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_workers_over_tcp(host, target, decode):
    """Everything a worker does, over TCP; the Unix socket goes on serving, but not what belongs to TCP's callers."""
    if host == "[::1]" and not _has_ipv6():
        pytest.skip("SKIPPED: this machine has no IPv6 loopback")
    with running(worker__tcp_address=f"{host}:0") as daemon:
        assert daemon.worker_tcp.startswith(f"{host}:") and port_of(daemon.worker_tcp) > 0
        assert port_of(daemon.worker_tcp) in listening(daemon.process.pid)
        with skv.Client(daemon.worker_tcp, token_file=token_of(daemon)) as source, daemon.client() as local:
            move_something(source, target, daemon, decode, unique("tcp"))
            move_something(target, source, decode, daemon, unique("tcp-back"))
            group = small_group()
            kv = random_words(np.random.default_rng(2), group.shape, "float16").view(group.numpy_dtype)
            with source.daemon_owned_pool([group], model="m") as pool:
                blocks = list(range(group.num_blocks))
                pool.put(kv, blocks)
                assert (pool.get(blocks) == kv).all()
                request = worker_service_pb2.RenewLeaseRequest(pool=pool.ref)
                with refused("PERMISSION_DENIED", "NOT_OWNER"):
                    local.worker.RenewLease(request, timeout=20)
            with local.daemon_owned_pool([group], model="m") as pool:
                pool.put(kv, blocks)
                assert (pool.get(blocks) == kv).all()
        with grpc.insecure_channel(daemon.worker_tcp) as bare:
            channel = grpc.intercept_channel(bare, BearerToken(read_token(token_of(daemon))))
            assert set(Reflected(channel).services()) == ON_WORKERS
            with pytest.raises(grpc.RpcError) as error:  # no admin, no peers
                channel.unary_unary("/spectrumkv.v1.AdminService/GetStatus")(b"", timeout=20)
            assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED
        assert daemon.stop() == 0


def _has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
        return True
    except OSError:
        return False


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:7000", "example.org:7000", "localhost", ":0"])
def test_tcp_beyond_loopback_is_refused(address):
    """It is not encrypted."""
    with pytest.raises(RuntimeError, match="worker.tcp_address"), running(worker__tcp_address=address):
        pass


def test_a_taken_port_is_refused():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RuntimeError) as error, running(worker__tcp_address=address):
            pass
        assert "LISTEN_FAILED" in str(error.value) and address in str(error.value)
