"""Daemons whose peers prove who they are: transfers go through, and /metrics says when the certificate ends."""

import base64
import contextlib
import re
import socket
import subprocess
import threading
import time
from concurrent import futures

import grpc
import numpy as np
import pytest
from authority import Ca
from hostile import CONTROL, DATA, Stream
from moves import check, fill, make_side, move, poison, random_words, small_group, unique
from real_daemon import PROGRAM, running

import spectrumkv as skv
from spectrumkv.v1 import admin_service_pb2, peer_service_pb2

TOKENS = 10
EXPIRY = "spectrumkv_certificate_expiry_timestamp_seconds"


ERRORS = 'spectrumkv_errors_total{{stage="queue",code="{}"}}'


@pytest.fixture(scope="module")
def ca(tmp_path_factory):
    return Ca(tmp_path_factory.mktemp("ca"))


def test_a_transfer_and_the_end_of_the_certificate(ca):
    rng = np.random.default_rng(3)
    group = small_group()
    kv = random_words(rng, (2, 2, TOKENS, 2, 16), "float16")
    with running(**ca.issue("here", 20)) as here, running(**ca.issue("there", 3)) as there:
        for daemon, name, days in ((here, "here", 20), (there, "there", 3)):
            told = daemon.metrics()[EXPIRY]
            assert told == ca.end_of(f"{name}.pem")
            assert abs(told - time.time() - days * 86400) < 600
        with here.client() as source, there.client() as target:
            a = make_side(source, here, [group], {0: [3, 1, 2]})
            b = make_side(target, there, [group], {0: [5, 0, 7]})
            with a.pool, b.pool:
                fill(a, [kv])
                poison(b)
                move(unique("mtls"), source, target, here, there, a, b, TOKENS,
                     policy=skv.policy(allocator="RAW", budget=1.1))  # fmt: skip
                check(b, [kv])


def test_the_earliest_of_a_chain(ca):
    keys = ca.issue("leaf", 29)
    ca.issue("early", 1)
    chain = ca.folder / "chain.pem"
    chain.write_text((ca.folder / "leaf.pem").read_text() + (ca.folder / "early.pem").read_text())
    with running(**{**keys, "peer__tls__certificate_file": chain}) as daemon:
        assert daemon.metrics()[EXPIRY] == ca.end_of("early.pem")


def test_plain_has_none(decode):
    assert decode.metrics()[EXPIRY] == 0


@pytest.mark.parametrize("text", ["", "no PEM", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_a_file_without_certificate_is_named(text, ca):
    keys = ca.issue("broken", 3)
    (ca.folder / "broken.pem").write_text(text)
    with pytest.raises(RuntimeError) as failed, running(**keys):
        pass
    assert re.search("reason=TLS_FILE_(INVALID|UNREADABLE).*broken.pem", str(failed.value))


def test_a_certificate_that_no_peer_would_take_is_named_at_start(ca):
    with pytest.raises(RuntimeError) as failed, running(**ca.issue("stray", 3, identity="prefill-0.example")):
        pass
    assert re.search("reason=PEER_IDENTITY.*stray.pem is not for spectrumkv", str(failed.value))


def credentials(keys):
    """(private key, certificate) of a peer that is no daemon, and the authorities it trusts."""
    read = [keys[f"peer__tls__{name}_file"].read_bytes() for name in ("private_key", "certificate", "ca")]
    return [tuple(read[:2])], read[2]


@contextlib.contextmanager
def acceptor(keys):
    """A TLS server, or one without where keys is None; its address. No daemon: those check their own certificate."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    if keys is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        pairs, trusted = credentials(keys)
        port = server.add_secure_port(
            "127.0.0.1:0", grpc.ssl_server_credentials(pairs, root_certificates=trusted, require_client_auth=True)
        )
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.mark.parametrize("pull", [False, True])
@pytest.mark.parametrize("who", ["another name", "another authority", "expired", "no TLS"])
def test_a_peer_that_is_not_the_expected_one_ends_the_transfer_at_once(who, pull, ca, tmp_path):
    """Its cause is in the transfer's error and in a metric, long before deadline and progress timeout."""
    strange = {
        "another name": lambda: (ca.issue("other", 3, identity="prefill-0.example"), "PERMISSION_DENIED", "PEER_IDENTITY"),
        "another authority": lambda: (Ca(tmp_path).issue("foreign", 3), "UNAUTHENTICATED", "PEER_HANDSHAKE"),
        "expired": lambda: (ca.issue("expired", 0), "UNAUTHENTICATED", "PEER_HANDSHAKE"),
        "no TLS": lambda: (None, "UNAUTHENTICATED", "PEER_SECURITY_MISMATCH"),
    }
    keys, code, reason = strange[who]()
    with acceptor(keys) as peer, running(**ca.issue("dialler", 3)) as daemon, daemon.client() as client:
        side = make_side(client, daemon, [small_group()], {0: [3, 1, 2]})
        with side.pool:
            start = time.monotonic()
            dial = client.fetch if pull else client.send
            dial("t", peer=peer, pool=side.pool, blocks=side.blocks, token_count=TOKENS, deadline_ms=30000)
            with pytest.raises(skv.TransferFailed, match=peer) as end:
                client.wait("t", timeout_s=30)
            assert (end.value.code, end.value.reason) == (code, reason)
            assert time.monotonic() - start < 3
            assert daemon.metrics()[ERRORS.format(code.lower())] == 1


@pytest.mark.parametrize("pull", [False, True])
def test_a_peer_with_tls_is_told_from_one_that_is_not_there(pull, ca, prefill, source):
    """A daemon without TLS dials one with it."""
    errors = ERRORS.format("unauthenticated")
    before = prefill.metrics()[errors]
    with running(**ca.issue("secured", 3)) as secured:
        side = make_side(source, prefill, [small_group()], {0: [3, 1, 2]})
        with side.pool:
            start = time.monotonic()
            name = unique("mismatch")
            dial = source.fetch if pull else source.send
            dial(name, peer=secured.peer, pool=side.pool, blocks=side.blocks, token_count=TOKENS, deadline_ms=30000)
            with pytest.raises(skv.TransferFailed, match="peer.security must be the same on both sides") as end:
                source.wait(name, timeout_s=30)
            assert (end.value.code, end.value.reason) == ("UNAUTHENTICATED", "PEER_SECURITY_MISMATCH")
            assert time.monotonic() - start < 3
            assert prefill.metrics()[errors] == before + 1


RELOADS = 'spectrumkv_certificate_reloads_total{{result="{}"}}'
HANDSHAKES = "spectrumkv_handshake_failures_total"


class Identity:
    """The files of one daemon, swapped as an operator swaps them: each by a rename."""

    def __init__(self, folder, ca, name, days=20):
        self.folder = folder
        self.put(**self.made_by(ca, name, days))

    @staticmethod
    def made_by(ca, name, days):
        keys = ca.issue(name, days)
        return {kind: keys[f"peer__tls__{file}_file"].read_text() for kind, file in
                (("cert", "certificate"), ("key", "private_key"), ("ca", "ca"))}  # fmt: skip

    def put(self, **texts):
        for kind, text in texts.items():
            (self.folder / f"{kind}.tmp").write_text(text)
            (self.folder / f"{kind}.tmp").rename(self.folder / f"{kind}.pem")

    def keys(self):
        return {"peer__security": "mtls", "peer__tls__reload_interval_ms": 100,
                "peer__tls__certificate_file": self.folder / "cert.pem",
                "peer__tls__private_key_file": self.folder / "key.pem",
                "peer__tls__ca_file": self.folder / "ca.pem"}  # fmt: skip


def stranger_is_refused(daemon, ca, name):
    """How a dialler with a certificate of `ca` is answered by the daemon; it trusts whatever the daemon shows."""
    pairs, _ = credentials(ca.issue(name, 3))
    trusted = daemon.keys["peer.tls.ca_file"]
    options = [("grpc.ssl_target_name_override", "spectrumkv"), ("grpc.enable_http_proxy", 0)]
    channel_credentials = grpc.ssl_channel_credentials(open(trusted, "rb").read(), *pairs[0])
    with grpc.secure_channel(daemon.peer, channel_credentials, options=options) as channel:
        return Stream(channel, CONTROL, peer_service_pb2.ControlResponse).ended()


def test_authorities_and_certificates_are_swapped_under_load(ca, tmp_path):
    """No transfer fails; then the old authority's certificates are worth nothing, and the gauge tells the new end."""
    for name in ("old", "new", "here", "there"):
        (tmp_path / name).mkdir()
    new_ca = Ca(tmp_path / "new")
    files = {name: Identity(tmp_path / name, ca, f"swap-{name}") for name in ("here", "there")}
    rng = np.random.default_rng(3)
    group = small_group()
    kv = random_words(rng, (2, 2, TOKENS, 2, 16), "float16")
    over, moved, failed = threading.Event(), [], []
    with running(**files["here"].keys()) as here, running(**files["there"].keys()) as there:
        daemons = {"here": here, "there": there}
        with here.client() as source, there.client() as target:
            a = make_side(source, here, [group], {0: [3, 1, 2]})
            b = make_side(target, there, [group], {0: [5, 0, 7]})
            with a.pool, b.pool:
                fill(a, [kv])

                def load():
                    while not over.is_set():
                        try:
                            move(unique("swap"), source, target, here, there, a, b, TOKENS,
                                 policy=skv.policy(allocator="RAW", budget=1.1))  # fmt: skip
                            moved.append(1)
                        except Exception as error:  # noqa: BLE001: whatever it is, it must not be
                            failed.append(error)
                            return

                def step(reloads, **texts):
                    for name, daemon in daemons.items():
                        files[name].put(**{kind: text[name] for kind, text in texts.items()})
                        until(lambda daemon=daemon: daemon.metrics()[RELOADS.format("ok")] >= reloads)
                    time.sleep(2)  # what gRPC serves follows within a second
                    before = len(moved)
                    until(lambda: failed or len(moved) > before + 5)

                worker = threading.Thread(target=load)
                worker.start()
                try:
                    fresh = {name: Identity.made_by(new_ca, f"fresh-{name}", 5) for name in daemons}
                    both = (ca.folder / "ca.pem").read_text() + (new_ca.folder / "ca.pem").read_text()
                    step(1, ca=dict.fromkeys(daemons, both))
                    step(2, key={n: fresh[n]["key"] for n in daemons}, cert={n: fresh[n]["cert"] for n in daemons})
                    for name, daemon in daemons.items():
                        assert daemon.metrics()[EXPIRY] == new_ca.end_of(f"fresh-{name}.pem")
                    step(3, ca=dict.fromkeys(daemons, (new_ca.folder / "ca.pem").read_text()))
                finally:
                    over.set()
                    worker.join(60)
                assert failed == [] and len(moved) > 15
                poison(b)
                move(unique("after"), source, target, here, there, a, b, TOKENS,
                     policy=skv.policy(allocator="RAW", budget=1.1))  # fmt: skip
                check(b, [kv])
        before = there.metrics()[HANDSHAKES]
        assert stranger_is_refused(there, ca, "late").code == "UNAVAILABLE"
        until(lambda: there.metrics()[HANDSHAKES] > before)
        for daemon in daemons.values():
            assert daemon.metrics()['spectrumkv_transfers_total{role="sender",outcome="failed"}'] == 0


def test_files_that_do_not_fit_are_not_used(ca, tmp_path):
    """Told once and counted; the daemon goes on with what it has, and takes the next change that is good."""
    files = Identity(tmp_path, ca, "kept")
    with running(**files.keys()) as daemon:
        end = daemon.metrics()[EXPIRY]
        stray = Identity.made_by(ca, "stray-kept", 7)
        for number, (bad, reason) in enumerate([
            (dict(cert=stray["cert"]), "TLS_FILE_INVALID"),  # not of this key
            (dict(cert="no certificate"), "TLS_FILE_INVALID"),
            (dict(ca=""), "TLS_FILE_UNREADABLE"),
        ]):  # fmt: skip
            good = {kind: (tmp_path / f"{kind}.pem").read_text() for kind in bad}
            files.put(**bad)
            until(lambda number=number: daemon.metrics()[RELOADS.format("failed")] == number + 1)
            time.sleep(0.3)  # several looks
            assert daemon.metrics()[RELOADS.format("failed")] == number + 1, "counted once for each change"
            assert reason in daemon.log() and "PRIVATE KEY" not in daemon.log()
            assert daemon.metrics()[EXPIRY] == end
            files.put(**good)
        assert daemon.metrics()[RELOADS.format("ok")] == 0
        files.put(**{kind: stray[kind] for kind in ("cert", "key")})
        until(lambda: daemon.metrics()[RELOADS.format("ok")] == 1)
        assert daemon.metrics()[EXPIRY] == ca.end_of("stray-kept.pem") != end


@pytest.mark.parametrize("who", ["no certificate", "another authority", "expired"])
def test_a_dialler_that_does_not_come_through_the_handshake_is_counted(who, ca, tmp_path):
    with running(**ca.issue("guard", 3)) as daemon:
        before = daemon.metrics()[HANDSHAKES]
        if who == "no certificate":
            trusted = (ca.folder / "ca.pem").read_bytes()
            options = [("grpc.ssl_target_name_override", "spectrumkv"), ("grpc.enable_http_proxy", 0)]
            with grpc.secure_channel(daemon.peer, grpc.ssl_channel_credentials(trusted), options=options) as channel:
                error = Stream(channel, CONTROL, peer_service_pb2.ControlResponse).ended()
        elif who == "expired":
            keys = ca.issue("stale", 0)
            error = dialled_with(daemon, keys)
        else:
            (tmp_path / "foreign").mkdir()
            error = stranger_is_refused(daemon, Ca(tmp_path / "foreign"), "foreign")
        assert error.code == "UNAVAILABLE", error
        until(lambda: daemon.metrics()[HANDSHAKES] > before)


def dialled_with(daemon, keys):
    pairs, trusted = credentials(keys)
    options = [("grpc.ssl_target_name_override", "spectrumkv"), ("grpc.enable_http_proxy", 0)]
    with grpc.secure_channel(daemon.peer, grpc.ssl_channel_credentials(trusted, *pairs[0]), options=options) as channel:
        return Stream(channel, CONTROL, peer_service_pb2.ControlResponse).ended()


def until(what, timeout_s=30):
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


def test_a_dialler_of_another_name_is_told_and_counted(ca):
    keys = ca.issue("stranger", 3, identity="prefill-0.example")
    pairs, trusted = credentials(keys)
    options = [("grpc.ssl_target_name_override", "spectrumkv"), ("grpc.enable_http_proxy", 0)]
    with running(**ca.issue("acceptor", 3)) as daemon:
        with grpc.secure_channel(
            daemon.peer, grpc.ssl_channel_credentials(trusted, *pairs[0]), options=options
        ) as channel:  # fmt: skip
            for method, answer in ((CONTROL, peer_service_pb2.ControlResponse), (DATA, peer_service_pb2.DataResponse)):
                error = Stream(channel, method, answer).ended()
                assert (error.code, error.reason) == ("PERMISSION_DENIED", "PEER_IDENTITY"), error
                assert "prefill-0.example" in str(error)
        assert daemon.metrics()[ERRORS.format("permission_denied")] == 2


def test_a_deadline_says_why_there_was_no_link(ca):
    """Where the deadline comes before the peer counts as unreachable, the cause is still told."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        peer = f"127.0.0.1:{closed.getsockname()[1]}"
    with running(**ca.issue("alone", 3)) as daemon, daemon.client() as client:
        side = make_side(client, daemon, [small_group()], {0: [3, 1, 2]})
        with side.pool:
            client.send("t", peer=peer, pool=side.pool, blocks=side.blocks, token_count=TOKENS, deadline_ms=700)
            with pytest.raises(skv.SpectrumKVError, match="deadline of 700 ms; the link had broken: .*refused") as end:
                client.wait("t", timeout_s=30)
            assert end.value.code == "DEADLINE_EXCEEDED"


def in_every_form(secret):
    """A secret as it is, in hexadecimal digits of both cases, and in base64."""
    data = secret if isinstance(secret, bytes) else secret.encode()
    return [data.decode(), data.hex(), data.hex().upper(), base64.b64encode(data).decode().rstrip("=")[:-1]]


def printed_config(daemon):
    """What the program says of the daemon's configuration."""
    flags = [part for name, value in daemon.keys.items() for part in ("--set", f"{name}={value}")]
    done = subprocess.run([PROGRAM, "--print-config", *flags], capture_output=True, text=True, timeout=60, check=True)
    assert "private_key_file" in done.stdout and "tcp_token_file" in done.stdout
    return done.stdout + done.stderr


def refused_starts(keys, extra, key_file, token_file):
    """What daemons say that were given one secret's file in the place of another, or the key in the place of its file."""
    swaps = {
        "peer__tls__certificate_file": key_file, "peer__tls__ca_file": key_file, "worker__tcp_token_file": key_file,
        "peer__tls__private_key_file": token_file,
    }  # fmt: skip
    for name, value in (*swaps.items(), ("peer__tls__private_key_file", key_file.read_text())):
        with pytest.raises(RuntimeError) as failed, running(**{**keys, **extra, name: value}):
            pass
        yield str(failed.value)


def test_no_secret_is_told(ca, tmp_path):
    """Keys, tokens and words of a cache are in no log, metric, configuration, list or error, at any log level."""
    worker_token, right, wrong = "a-worker-token-of-this-test", b"right-token-0123", b"wrong-token-0123"
    (tmp_path / "token").write_text(worker_token)
    extra = {"log__level": "debug", "worker__tcp_address": "127.0.0.1:0", "worker__tcp_token_file": tmp_path / "token"}
    keys = {name: ca.issue(name, 3) for name in ("secret-here", "secret-there")}
    group = small_group()
    kv = np.full((2, 2, TOKENS, 2, 16), 0x5A5A, "<u2")  # "ZZZZ..." wherever it would be written
    told, logs, pool_ids = [], [], []
    with running(**keys["secret-here"], **extra) as here, running(**keys["secret-there"], **extra) as there:
        with skv.Client(here.worker_tcp, token_file=tmp_path / "token") as source, there.client() as target:
            a = make_side(source, here, [group], {0: [3, 1, 2]})
            b = make_side(target, there, [group], {0: [5, 0, 7]})
            with a.pool, b.pool:
                pool_ids += [a.pool.pool_id, b.pool.pool_id]
                fill(a, [kv])
                for name, token in (("good", right), ("bad", wrong)):
                    target.expect(name, pool=b.pool, blocks=b.blocks, token_count=TOKENS, token=right)
                    source.send(name, peer=there.peer, pool=a.pool, blocks=a.blocks, token_count=TOKENS, token=token,
                                policy=skv.policy(allocator="RAW", budget=1.1))  # fmt: skip
                    try:
                        told.append(str(source.wait(name, timeout_s=30)))
                    except skv.TransferFailed as failed:
                        told += [str(failed), repr(failed), str(failed.report)]
                    told += [str(side.get_transfer(name)) for side in (source, target)]
                target.cancel("bad")
        for daemon in (here, there):
            with daemon.admin() as admin:
                told += [str(call(request)) for call, request in (
                    (admin.GetConfig, admin_service_pb2.GetConfigRequest()),
                    (admin.ListTransfers, admin_service_pb2.ListTransfersRequest()),
                    (admin.ListPeers, admin_service_pb2.ListPeersRequest()),
                    (admin.GetStatus, admin_service_pb2.GetStatusRequest()))]  # fmt: skip
            logs.append(daemon.scrape())
            told.append(printed_config(daemon))
            daemon.stop()
            logs.append((daemon.folder / "log").read_text())
    everything = "\n".join(told + logs)
    assert "TOKEN_MISMATCH" in everything and "peer.tls" not in everything and "private_key_file" in everything
    key_file = keys["secret-here"]["peer__tls__private_key_file"]
    everything += "\n".join(refused_starts(keys["secret-here"], extra, key_file, tmp_path / "token"))
    assert "TLS_FILE" in everything and "TOKEN_FILE" in everything
    secrets = [form for secret in (worker_token, right, wrong) for form in in_every_form(secret)]
    secrets += ["PRIVATE KEY", "ZZZZZZZZ", "5a5a5a5a5a", "5A5A5A5A5A"]
    for files in keys.values():
        secrets += files["peer__tls__private_key_file"].read_text().splitlines()[1:-1]
    for secret in secrets:
        assert secret not in everything, "a secret is told"
    for pool_id in pool_ids:  # the right to use a pool
        assert len(pool_id) >= 32 and pool_id not in "\n".join(logs), "whoever reads the log may use the pool"
