"""A CA for tests, made by the openssl command."""

import subprocess
from pathlib import Path


def openssl(*arguments):
    """The output of the command."""
    done = subprocess.run(["openssl", *map(str, arguments)], stdin=subprocess.DEVNULL, capture_output=True)
    if done.returncode != 0:
        raise RuntimeError(f"openssl {arguments[0]}: {done.stderr.decode(errors='replace')[-1000:]}")
    return done.stdout


class Authority:
    """A CA in a directory, and the certificates that it issues."""

    def __init__(self, directory, name="Wald check CA"):
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.pem = self.directory / "ca.pem"
        self.key = self.directory / "ca.key"
        openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", self.key, "-out", self.pem, "-days", "400",
                "-subj", f"/CN={name}")

    def issue(self, where, name, days=30, begin=None, san="DNS:localhost,IP:127.0.0.1", newkey=("rsa:2048",)):
        """Writes NAME.pem and NAME.key, for localhost unless `san` has other names, into a directory. `begin`: the
        first day, as YYMMDD. `newkey`: the kind of key, as openssl has it."""
        where = Path(where)
        where.mkdir(parents=True, exist_ok=True)
        pem, key, request = where / f"{name}.pem", where / f"{name}.key", where / f"{name}.csr"
        openssl("req", "-new", "-newkey", *newkey, "-nodes", "-keyout", key, "-out", request, "-subj", f"/CN={name}",
                "-addext", f"subjectAltName={san}")
        if begin is None:
            openssl("x509", "-req", "-in", request, "-CA", self.pem, "-CAkey", self.key, "-days", days,
                    "-copy_extensions", "copyall", "-out", pem)
        else:
            self.sign_past(request, pem, begin)
        request.unlink()
        key.chmod(0o600)
        return pem, key

    def _ca(self, *arguments):
        """Runs `openssl ca` with an empty list of certificates."""
        (self.directory / "index").write_text("")
        (self.directory / "number").write_text("01\n")
        (self.directory / "ca.cnf").write_text(
            f"[ca]\ndefault_ca=a\n[a]\ndatabase={self.directory}/index\nnew_certs_dir={self.directory}\nrand_serial=yes\n"
            f"crlnumber={self.directory}/number\ncrl_extensions=e\ndefault_md=sha256\npolicy=p\ncopy_extensions=copyall\n"
            "[p]\ncommonName=supplied\n[e]\nauthorityKeyIdentifier=keyid\n")
        return openssl("ca", "-batch", "-config", self.directory / "ca.cnf", "-cert", self.pem, "-keyfile", self.key, *arguments)

    def sign_past(self, request, pem, begin):
        """Signs a certificate that was valid for one day."""
        self._ca("-in", request, "-out", pem, "-notext", "-startdate", f"{begin}000000Z", "-enddate", f"{begin}235959Z")

    def crl(self):
        """A list without revocations, in PEM."""
        return self._ca("-gencrl", "-crldays", "30")
