"""Daemons whose peers prove who they are: transfers go through, and /metrics says when the certificate ends."""

import contextlib
import re
import socket
import subprocess
import time
from concurrent import futures

import grpc
import numpy as np
import pytest
from hostile import CONTROL, DATA, Stream
from moves import check, fill, make_side, move, poison, random_words, small_group, unique
from real_daemon import running

import spectrumkv as skv
from spectrumkv.v1 import peer_service_pb2

TOKENS = 10
EXPIRY = "spectrumkv_certificate_expiry_timestamp_seconds"


ERRORS = 'spectrumkv_errors_total{{stage="queue",code="{}"}}'


class Ca:
    """A certificate authority in `folder`, by the openssl program."""

    def __init__(self, folder):
        self.folder = folder
        self._openssl("ecparam -name prime256v1 -genkey -noout -out ca.key")
        self._openssl("req -x509 -new -key ca.key -days 30 -subj /CN=test-ca -out ca.pem")

    def _openssl(self, words):
        return subprocess.run(["openssl", *words.split()], cwd=self.folder, check=True, text=True, capture_output=True).stdout

    def issue(self, name, days, identity="spectrumkv"):
        """Configuration of a daemon with a certificate for `identity` that ends in `days`."""
        (self.folder / f"{name}.ext").write_text(f"subjectAltName=DNS:{identity}\n")
        self._openssl(f"ecparam -name prime256v1 -genkey -noout -out {name}.key")
        self._openssl(f"req -new -key {name}.key -subj /CN={identity} -out {name}.csr")
        self._openssl(f"x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days {days} "
                      f"-extfile {name}.ext -out {name}.pem")  # fmt: skip
        return {
            "peer__security": "mtls",
            "peer__tls__certificate_file": self.folder / f"{name}.pem",
            "peer__tls__private_key_file": self.folder / f"{name}.key",
            "peer__tls__ca_file": self.folder / "ca.pem",
        }

    def end_of(self, file):
        """Seconds since 1970, as openssl says it."""
        told = self._openssl(f"x509 -in {file} -noout -enddate").strip().removeprefix("notAfter=")
        return int(subprocess.run(["date", "-d", told, "+%s"], check=True, text=True, capture_output=True).stdout)


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
