"""TLS to the server: the files, and failures as one sentence each.

gRPC passes the reason of a failed handshake on as text only. The names and days of the server's certificate are not
in it.
"""

from __future__ import annotations

import os
import re
import ssl
import time
from dataclasses import dataclass

import grpc

from wald.errors import Outcome, Retry, TlsError, TlsFailure

# The CAs of a system take about 250 KB.
_MAX_FILE_BYTES = 1 << 20
# Minimum seconds between two reads of the files.
_READ_PAUSE = 1.0
# Seconds between two connections after a TLS failure, over all calls of a client.
TLS_PAUSE = 1.0


def fault(detail: str) -> TlsError:
    """The error of a setting that cannot be used."""
    return TlsError(
        detail,
        TlsFailure.SETTINGS,
        code=grpc.StatusCode.INVALID_ARGUMENT,
        outcome=Outcome.NOT_APPLIED,
        retry=Retry.NEVER,
    )


@dataclass(frozen=True)
class TlsFiles:
    """Settings of TLS; paths of PEM files."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    server_name: str | None = None

    def __bool__(self) -> bool:
        return any((self.ca, self.cert, self.key, self.server_name))

    def read(self) -> tuple[bytes, bytes | None, bytes | None]:
        """The CAs, the certificate and the key, as the files are now. Raises TlsError."""
        if (self.cert is None) != (self.key is None):
            raise fault("a client certificate needs both its file and the file of its key")
        roots = _system_roots() if self.ca is None else _read(self.ca)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(cadata=roots.decode("ascii", "ignore"))
        except (ssl.SSLError, ValueError):
            raise fault(f"{self.ca or 'the CAs of the system'}: no certificate in PEM") from None
        if self.cert is None or self.key is None:
            return roots, None, None
        cert, key = _read(self.cert), _read(self.key)
        _check_pair(context, self.cert, self.key)
        return roots, cert, key


class Credentials:
    """The credentials of a client's channels, which follow the files."""

    def __init__(self, files: TlsFiles):
        self.files = files
        self._contents = files.read()
        self._read = time.monotonic()

    def __repr__(self) -> str:
        return f"Credentials({self.files!r})"

    def renew(self) -> bool:
        """Reads the files again, at most once a second; whether they changed. A certificate and its key are replaced
        one after the other, so a fault may last for a moment only: the earlier ones stay in force."""
        if time.monotonic() - self._read < _READ_PAUSE:
            return False
        self._read = time.monotonic()
        try:
            contents = self.files.read()
        except TlsError:
            return False
        changed, self._contents = contents != self._contents, contents
        return changed

    def of_channel(self) -> grpc.ChannelCredentials:
        roots, cert, key = self._contents
        return grpc.ssl_channel_credentials(roots, key, cert)


def _check_pair(context: ssl.SSLContext, cert: str, key: str) -> None:
    """gRPC would report a certificate without its key as a failed connection."""
    try:
        # Without the password OpenSSL would ask for one at the terminal.
        context.load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        if error.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
            raise fault(f"{key} is not the key of the certificate {cert}") from None
        if b"-----BEGIN CERTIFICATE-----" not in _read(cert):
            raise fault(f"{cert}: no certificate in PEM") from None
        raise fault(f"{key}: no private key in PEM without a password") from None
    except (OSError, ValueError):
        raise fault(f"{key}: no private key in PEM without a password") from None


def _read(path: str) -> bytes:
    return read_small(path, _MAX_FILE_BYTES, fault)


def read_small(path: str, limit: int, error) -> bytes:
    """Reads a file of at most this size; raises `error` with a sentence that has the path."""
    try:
        with open(path, "rb") as file:
            content = file.read(limit + 1)
    except OSError as failure:
        raise error(f"cannot read {path}: {failure.strerror}") from None
    if len(content) > limit:
        raise error(f"{path} is larger than {limit >> 10} KiB")
    return content


def _system_roots() -> bytes:
    """The CAs of the system in PEM, as OpenSSL finds them; `SSL_CERT_FILE` and `SSL_CERT_DIR` name others.
    gRPC would take a copy of its own."""
    places = ssl.get_default_verify_paths()
    if places.cafile:
        return _read(places.cafile)
    found = set()
    if places.capath:
        for name in os.listdir(places.capath):
            # The names that OpenSSL looks up.
            if re.fullmatch(r"[0-9a-f]{8}\.\d+", name):
                found.add(_read(os.path.join(places.capath, name)))
    if not found:
        context = ssl.create_default_context()
        found = {ssl.DER_cert_to_PEM_cert(der).encode() for der in context.get_ca_certs(binary_form=True)}
    if not found:
        raise fault("this system has no CA certificates; name the file with the CA of the server (tls_ca)")
    return b"\n".join(sorted(found))


# Texts of gRPC about a connection that failed, with the reason and its sentence. 1.76 and 1.85 are tested.
_SECURE = (
    ("certificate has expired", TlsFailure.EXPIRED, "the server's certificate is expired"),
    ("certificate is not yet valid", TlsFailure.EXPIRED, "the server's certificate is not valid yet"),
    ("Hostname Verification Check failed", TlsFailure.WRONG_NAME, "the server's certificate is not for {name}"),
    ("is not in peer certificate", TlsFailure.WRONG_NAME, "the server's certificate is not for {name}"),
    ("issuer certificate", TlsFailure.UNKNOWN_CA, "the server's certificate is not from a trusted CA (tls_ca)"),
    ("self signed certificate", TlsFailure.UNKNOWN_CA, "the server's certificate is not from a trusted CA (tls_ca)"),
    ("self-signed certificate", TlsFailure.UNKNOWN_CA, "the server's certificate is not from a trusted CA (tls_ca)"),
    ("certificate signature failure", TlsFailure.UNKNOWN_CA, "the server's certificate is not from a trusted CA (tls_ca)"),
    ("CERTIFICATE_VERIFY_FAILED", TlsFailure.CERTIFICATE, "the server's certificate is refused: {text}"),
    (
        "WRONG_VERSION_NUMBER",
        TlsFailure.SERVER_WITHOUT_TLS,
        "the server does not speak TLS; without TLS the endpoint must begin with http://",
    ),
    (
        "Cannot check peer: missing selected ALPN property",
        TlsFailure.HANDSHAKE,
        "the server does not offer HTTP/2 on this port (ALPN h2), which gRPC needs",
    ),
    ("andshake failed", TlsFailure.HANDSHAKE, "the handshake failed: {text}"),
    ("Handshaker", TlsFailure.HANDSHAKE, "the handshake failed: {text}"),
)
# In TLS 1.3 a server refuses a client's certificate after the client's handshake, and gRPC hides the server's alert.
_REFUSED_AFTERWARDS = ("Unwrap failed", "Secure read failed")
# Answers to plaintext.
_WANTS_TLS = ("Trying to connect an http1.x server (HTTP status 400)",)


def problem_of(message: str, files: TlsFiles | None, name: str) -> TlsError | None:
    """The TLS failure that gRPC's text of a failed connection is about. `files`: None = plaintext."""
    if files is None:
        if any(text in message for text in _WANTS_TLS):
            return _problem(
                TlsFailure.SERVER_WITH_TLS,
                "the server does not speak HTTP/2 in plaintext; if it speaks TLS, the endpoint must begin with https://",
            )
        return None
    for text, failure, sentence in _SECURE:
        if text in message:
            return _problem(failure, sentence.format(name=files.server_name or name, text=message))
    if any(text in message for text in _REFUSED_AFTERWARDS):
        if files.cert is None:
            return _problem(
                TlsFailure.CLIENT_CERTIFICATE_REQUIRED,
                "the server requires a client certificate, and none was sent (tls_cert, tls_key)",
            )
        return _problem(
            TlsFailure.CLIENT_CERTIFICATE_REFUSED,
            "the server refused the client certificate; the server's log has the reason",
        )
    return None


def _problem(failure: TlsFailure, sentence: str) -> TlsError:
    return TlsError(
        f"no TLS connection: {sentence}",
        failure,
        code=grpc.StatusCode.UNAVAILABLE,
        outcome=Outcome.NOT_APPLIED,
        retry=Retry.SAFE,
        retry_after=TLS_PAUSE,
    )
