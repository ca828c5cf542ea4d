"""Certificates for checks, made by the openssl command."""

import datetime
import ssl

from common import *


def openssl(*arguments, **options):
    return run("openssl", *arguments, **options)


class Authority:
    """A CA in a directory, and the certificates that it issues."""

    def __init__(self, directory):
        self.directory = Path(directory)
        self.pem = self.directory / "ca.pem"
        self.key = self.directory / "ca.key"
        openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", self.key, "-out", self.pem, "-days", "400",
                "-subj", "/CN=Wald check CA", check=True)

    def issue(self, where, name, days=30, begin=None, san="DNS:localhost,IP:127.0.0.1"):
        """Writes NAME.pem and NAME.key, for localhost unless `san` has other names, into a directory. `begin`: the
        first day, as YYMMDD."""
        where.mkdir(parents=True, exist_ok=True)
        pem, key, request = where / f"{name}.pem", where / f"{name}.key", where / f"{name}.csr"
        openssl("req", "-new", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", request, "-subj", f"/CN={name}",
                "-addext", f"subjectAltName={san}", check=True)
        if begin is None:
            openssl("x509", "-req", "-in", request, "-CA", self.pem, "-CAkey", self.key, "-days", days,
                    "-copy_extensions", "copyall", "-out", pem, check=True)
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
        return openssl("ca", "-batch", "-config", self.directory / "ca.cnf", "-cert", self.pem, "-keyfile", self.key, *arguments, check=True)

    def sign_past(self, request, pem, begin):
        """Signs a certificate that was valid for one day."""
        self._ca("-in", request, "-out", pem, "-notext", "-startdate", f"{begin}000000Z", "-enddate", f"{begin}235959Z")

    def crl(self):
        """A list without revocations, in PEM."""
        return self._ca("-gencrl", "-crldays", "30").stdout

    def grpcurl(self, *arguments):
        return run(grpcurl(), "-cacert", self.pem, *arguments)

    def context(self, *alpn):
        """Settings of a client that trusts the CA and offers these protocols."""
        context = ssl.create_default_context(cafile=str(self.pem))
        if alpn:
            context.set_alpn_protocols(alpn)
        return context


def files(pem, key):
    """The arguments that turn TLS on."""
    return ["--tls-cert", pem, "--tls-key", key]


def not_after(pem):
    """The expiry that openssl shows, in seconds since 1970."""
    text = openssl("x509", "-in", pem, "-noout", "-enddate", check=True).stdout.decode().strip()
    when = datetime.datetime.strptime(text, "notAfter=%b %d %H:%M:%S %Y GMT")
    return when.replace(tzinfo=datetime.timezone.utc).timestamp()
