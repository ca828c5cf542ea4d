"""A CA for tests, made by the openssl command."""

import datetime
import subprocess


def openssl(*arguments):
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


class Authority:
    """A CA in a directory, and the certificates for localhost that it issues."""

    def __init__(self, directory):
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.pem, self._key = directory / "ca.pem", directory / "ca.key"
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        self._new_key = key
        openssl("req", "-x509", *key, "-keyout", self._key, "-out", self.pem, "-days", 2, "-subj", f"/CN={directory.name}")

    def issue(self, name, *, expired=False, names="DNS:localhost,IP:127.0.0.1"):
        """The paths of a certificate and of its key; written again under the same name, they are replaced."""
        pem, key, request = (self.directory / f"{name}.{kind}" for kind in ("pem", "key", "csr"))
        asked = ("-subj", f"/CN={name}", "-addext", f"subjectAltName={names}")
        openssl("req", "-new", *self._new_key, "-keyout", key, "-out", request, *asked)
        now = datetime.datetime.now(datetime.timezone.utc)
        begin, end = (now - datetime.timedelta(days=days) for days in ((3, 2) if expired else (1, -1)))
        (self.directory / "index").write_text("")
        (self.directory / "ca.cnf").write_text(
            f"[ca]\ndefault_ca=a\n[a]\ndatabase={self.directory}/index\nnew_certs_dir={self.directory}\nrand_serial=yes\n"
            "default_md=sha256\npolicy=p\ncopy_extensions=copyall\n[p]\ncommonName=supplied\n"
        )
        openssl(
            "ca", "-batch", "-config", self.directory / "ca.cnf", "-cert", self.pem, "-keyfile", self._key, "-in", request,
            "-out", pem, "-notext", "-startdate", f"{begin:%Y%m%d%H%M%SZ}", "-enddate", f"{end:%Y%m%d%H%M%SZ}",
        )  # fmt: skip
        return str(pem), str(key)
