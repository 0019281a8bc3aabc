"""Daemons whose peers prove who they are: transfers go through, and /metrics says when the certificate ends."""

import re
import subprocess
import time

import numpy as np
import pytest
from moves import check, fill, make_side, move, poison, random_words, small_group, unique
from real_daemon import running

import spectrumkv as skv

TOKENS = 10
EXPIRY = "spectrumkv_certificate_expiry_timestamp_seconds"


class Ca:
    """A certificate authority in `folder`, by the openssl program."""

    def __init__(self, folder):
        self.folder = folder
        self._openssl("ecparam -name prime256v1 -genkey -noout -out ca.key")
        self._openssl("req -x509 -new -key ca.key -days 30 -subj /CN=test-ca -out ca.pem")

    def _openssl(self, words):
        return subprocess.run(["openssl", *words.split()], cwd=self.folder, check=True, text=True, capture_output=True).stdout

    def issue(self, name, days):
        """Configuration of a daemon with a certificate that ends in `days`."""
        (self.folder / f"{name}.ext").write_text("subjectAltName=DNS:spectrumkv\n")
        self._openssl(f"ecparam -name prime256v1 -genkey -noout -out {name}.key")
        self._openssl(f"req -new -key {name}.key -subj /CN=spectrumkv -out {name}.csr")
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
    with pytest.raises(RuntimeError) as refused, running(**keys):
        pass
    assert re.search("reason=TLS_FILE_(INVALID|UNREADABLE).*broken.pem", str(refused.value))
