"""Certificates for checks, made by the openssl command."""

import datetime
import ssl

from common import *

sys.path.insert(0, str(ROOT / "client" / "conformance"))
import authority


def openssl(*arguments, **options):
    return run("openssl", *arguments, **options)


class Authority(authority.Authority):
    """A CA in a directory, with clients that trust it."""

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
