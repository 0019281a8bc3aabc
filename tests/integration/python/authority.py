"""A certificate authority of a test's own."""

import subprocess


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
