package dev.wald;

import io.grpc.Status;
import java.nio.channels.ClosedChannelException;
import java.security.cert.CertificateException;
import java.time.Duration;
import java.util.List;

/** A failure of TLS with its sentence. The exceptions of a handshake carry it. */
final class TlsProblem extends CertificateException {
  private static final long serialVersionUID = 1L;

  /** Minimum time between two handshakes after one that failed. */
  static final Duration PAUSE = Duration.ofSeconds(1);

  /** Alerts about the client's certificate (RFC 8446, section 6), as the JDK names them, and their meaning. */
  private static final List<String[]> REFUSALS = List.of(
      new String[] {"certificate_expired", "it is expired or not valid yet"},
      new String[] {"certificate_revoked", "it is revoked"},
      new String[] {"unknown_ca", "the server does not trust its CA"},
      new String[] {"unsupported_certificate", "it is not for clients"},
      new String[] {"bad_certificate", "the server's log has the reason"},
      new String[] {"certificate_unknown", "the server's log has the reason"},
      new String[] {"access_denied", "the server's log has the reason"});

  final TlsFailure failure;

  TlsProblem(TlsFailure failure, String detail) {
    super(detail);
    this.failure = failure;
  }

  static TlsProblem settings(String detail) {
    return new TlsProblem(TlsFailure.SETTINGS, detail);
  }

  /** The failure of a call that the problem stopped. */
  Failure asFailure() {
    boolean settings = failure == TlsFailure.SETTINGS;
    Failure explained = new Failure(FailureKind.TLS, settings ? Status.Code.INVALID_ARGUMENT : Status.Code.UNAVAILABLE,
        "no TLS connection: " + getMessage(), Outcome.NOT_APPLIED, settings ? Retry.NEVER : Retry.SAFE);
    explained.retryAfter = settings ? Duration.ZERO : PAUSE;
    explained.tls = failure;
    explained.cause = this;
    return explained;
  }

  /** Reads the reason why there is no connection. Null: it has nothing to do with TLS. */
  static TlsProblem of(Throwable reason, boolean overTls) {
    // The JDK and gRPC put exceptions of their own around it.
    for (Throwable cause = reason; cause != null; cause = cause.getCause()) {
      if (cause instanceof TlsProblem problem) {
        return problem;
      }
    }
    boolean handshake = false;
    for (Throwable cause = reason; cause != null; cause = cause.getCause()) {
      String said = cause.getMessage() == null ? "" : cause.getMessage();
      if (!overTls) {
        // The first frame of HTTP/2 is missing. The hexadecimal digits are an alert of TLS, or the letters HTTP of an error of HTTP/1.1.
        if (said.contains("First received frame was not SETTINGS") || said.contains("Unexpected HTTP/1.x request")) {
          return new TlsProblem(TlsFailure.SERVER_WITH_TLS,
              "the server does not speak HTTP/2 in plaintext; if it speaks TLS, the endpoint must begin with https://");
        }
        continue;
      }
      TlsProblem alert = alert(said);
      if (alert != null) {
        return alert;
      }
      if (cause.getClass().getSimpleName().equals("NotSslRecordException") || said.contains("Unsupported or unrecognized SSL message")) {
        return new TlsProblem(TlsFailure.SERVER_WITHOUT_TLS,
            "the server does not speak TLS; without TLS the endpoint must not begin with https://");
      }
      if (said.contains("ALPN") || said.contains("no_application_protocol")) {
        return new TlsProblem(TlsFailure.HANDSHAKE, "the server does not offer HTTP/2 on this port (ALPN h2), which gRPC needs");
      }
      handshake |= cause instanceof javax.net.ssl.SSLHandshakeException;
      boolean closed = cause instanceof ClosedChannelException || said.contains("Connection closed while SSL/TLS handshake");
      if (closed && handshake || said.contains("Connection closed while SSL/TLS handshake")) {
        return new TlsProblem(TlsFailure.HANDSHAKE, "the server closed the connection during the handshake; if it does not speak TLS,"
            + " the endpoint must not begin with https://");
      }
      if (cause instanceof javax.net.ssl.SSLException && !said.isEmpty()) {
        return new TlsProblem(TlsFailure.HANDSHAKE, "the handshake failed: " + said);
      }
    }
    return null;
  }

  /** Reads the server's alert about the client's certificate. Null: there is none. */
  private static TlsProblem alert(String said) {
    if (!said.contains("Received fatal alert")) {
      return null;
    }
    if (said.contains("certificate_required")) {
      return new TlsProblem(TlsFailure.CLIENT_CERTIFICATE_REQUIRED,
          "the server requires a client certificate, and none was sent (tlsCertificate)");
    }
    for (String[] refusal : REFUSALS) {
      if (said.contains(refusal[0])) {
        return new TlsProblem(TlsFailure.CLIENT_CERTIFICATE_REFUSED, "the server refused the client certificate: " + refusal[1]);
      }
    }
    return null;
  }

  @Override
  public String toString() {
    return "TLS " + failure + ": " + getMessage();
  }
}
