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

    def grpcurl(self, *arguments, **options):
        return run(grpcurl(), "-cacert", self.pem, *arguments, **options)

    def context(self, *alpn):
        """Settings of a client that trusts the CA and offers these protocols."""
        context = ssl.create_default_context(cafile=str(self.pem))
        if alpn:
            context.set_alpn_protocols(alpn)
        return context


def files(pem, key):
    """The arguments that turn TLS on."""
    return ["--tls-cert", pem, "--tls-key", key]


class Secured(Daemon):
    """A daemon that speaks TLS on its gRPC port. The CA makes its certificate."""

    def __init__(self, authority, directory, *arguments, **options):
        # Cheap for clients, which share the processors with the daemon.
        pair = authority.issue(Path(f"{directory}-tls"), "server", newkey=("ec", "-pkeyopt", "ec_paramgen_curve:P-256"))
        super().__init__(directory, *files(*pair), *arguments, **options)
        self.authority = authority
        self.endpoint = f"https://{self.grpc}"

    def walctl(self, *arguments, **options):
        environment = clean_environment(WALD_ENDPOINT=self.endpoint, WALD_TLS_CA=str(self.authority.pem))
        return run(WALCTL, *arguments, env=environment, **options)

    def grpcurl(self, *arguments, **options):
        return self.authority.grpcurl(*arguments, **options)


def not_after(pem):
    """The expiry that openssl shows, in seconds since 1970."""
    text = openssl("x509", "-in", pem, "-noout", "-enddate", check=True).stdout.decode().strip()
    when = datetime.datetime.strptime(text, "notAfter=%b %d %H:%M:%S %Y GMT")
    return when.replace(tzinfo=datetime.timezone.utc).timestamp()
