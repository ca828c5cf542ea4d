package dev.wald;

/** Why there is no TLS connection. */
public enum TlsFailure {
  /** A file or another setting of the client cannot be used. */
  SETTINGS,
  /** The server's certificate is from a CA that the client does not trust. */
  UNKNOWN_CA,
  /** The server's certificate is for other names. */
  WRONG_NAME,
  /** The server's certificate is expired, or not valid yet. */
  EXPIRED,
  /** The server's certificate is refused for another reason. */
  CERTIFICATE,
  /** The endpoint begins with https, and the server does not speak TLS. */
  SERVER_WITHOUT_TLS,
  /** The endpoint does not begin with https, and the server speaks TLS. */
  SERVER_WITH_TLS,
  /** The server requires a certificate of the client, which sent none. */
  CLIENT_CERTIFICATE_REQUIRED,
  /** The server refused the certificate of the client. */
  CLIENT_CERTIFICATE_REFUSED,
  /** The handshake failed for another reason. */
  HANDSHAKE
}
