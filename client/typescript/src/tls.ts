/** TLS to the server: the files, and failures as one sentence each. */
import { X509Certificate } from "node:crypto";
import { readFileSync } from "node:fs";
import { isIP } from "node:net";
import * as tls from "node:tls";

/**
 * Why there is no TLS connection.
 *
 * - `SETTINGS`: a file or another setting of the client cannot be used.
 * - `UNKNOWN_CA`: the server's certificate is from a CA that the client does not trust.
 * - `WRONG_NAME`: the server's certificate is for other names.
 * - `EXPIRED`: the server's certificate is expired, or not valid yet.
 * - `CERTIFICATE`: the server's certificate is refused for another reason.
 * - `SERVER_WITHOUT_TLS`: the endpoint begins with `https://`, and the server does not speak TLS.
 * - `SERVER_WITH_TLS`: the endpoint does not begin with `https://`, and the server speaks TLS.
 * - `CLIENT_CERTIFICATE_REQUIRED`: the server requires a certificate of the client, which sent none.
 * - `CLIENT_CERTIFICATE_REFUSED`: the server refused the certificate of the client.
 * - `HANDSHAKE`: the handshake failed for another reason.
 */
export type TlsFailure =
  | "SETTINGS"
  | "UNKNOWN_CA"
  | "WRONG_NAME"
  | "EXPIRED"
  | "CERTIFICATE"
  | "SERVER_WITHOUT_TLS"
  | "SERVER_WITH_TLS"
  | "CLIENT_CERTIFICATE_REQUIRED"
  | "CLIENT_CERTIFICATE_REFUSED"
  | "HANDSHAKE";

/** A failure and its sentence. */
export class TlsProblem extends Error {
  override readonly name = "TlsProblem";

  constructor(
    readonly failure: TlsFailure,
    message: string,
  ) {
    super(message);
  }
}

/** Settings of TLS; paths of PEM files. */
export interface TlsOptions {
  /** File with the CAs to trust instead of the system's. */
  tlsCa?: string;
  /** File with the client's certificate, followed by its issuers. */
  tlsCert?: string;
  /** File with the key of the client's certificate. */
  tlsKey?: string;
  /** Name or address that the server's certificate must have, instead of the host of each endpoint. */
  serverName?: string;
}

/** Maximum size of a file. The CAs of a system take about 250 KB. */
const MAX_FILE_BYTES = 1 << 20;

/** Files with the CAs of a system; a Linux or a BSD has one of them. */
const SYSTEM_CAS = [
  "/etc/ssl/certs/ca-certificates.crt",
  "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
  "/etc/pki/tls/certs/ca-bundle.crt",
  "/etc/ssl/ca-bundle.pem",
  "/etc/ssl/cert.pem",
];

function fault(message: string): TlsProblem {
  return new TlsProblem("SETTINGS", message);
}

/** Reads a file of at most this size. `fail` makes the error of a sentence that has the path. */
export function readSmall(path: string, limit: number, fail: (sentence: string) => Error): Buffer {
  let content: Buffer;
  try {
    content = readFileSync(path);
  } catch (error) {
    throw fail(`cannot read ${path}: ${error instanceof Error && "code" in error ? error.code : error}`);
  }
  if (content.length > limit) {
    throw fail(`${path} is larger than ${limit >> 10} KiB`);
  }
  return content;
}

interface Contents {
  ca: Buffer | string[] | undefined;
  cert: Buffer | undefined;
  key: Buffer | undefined;
}

/** The settings in force, which follow the files. */
export class TlsFiles {
  readonly #options: TlsOptions;
  #contents: Contents;

  constructor(options: TlsOptions) {
    this.#options = options;
    this.#contents = this.#read();
  }

  /** The name that the certificate of a server at this host must have. */
  nameAt(host: string): string {
    return this.#options.serverName ?? host;
  }

  /** Whether the client sends a certificate. */
  get identified(): boolean {
    return this.#options.tlsCert !== undefined;
  }

  /**
   * The settings of the next connection to a host. A certificate and its key are replaced one after the other, so a fault
   * may last for a moment only: the earlier settings stay in force.
   */
  current(host: string): tls.ConnectionOptions {
    try {
      this.#contents = this.#read();
    } catch {
      // The earlier ones.
    }
    const { ca, cert, key } = this.#contents;
    const name = this.nameAt(host);
    return {
      ...(ca !== undefined && { ca }),
      ...(cert !== undefined && { cert }),
      ...(key !== undefined && { key }),
      ...(isIP(name) === 0 && { servername: name }),
      checkServerIdentity: (_, certificate) => tls.checkServerIdentity(name, certificate),
      ALPNProtocols: ["h2"],
      minVersion: "TLSv1.2",
    };
  }

  #read(): Contents {
    const { tlsCa, tlsCert, tlsKey } = this.#options;
    if ((tlsCert === undefined) !== (tlsKey === undefined)) {
      throw fault("a client certificate needs both its file and the file of its key");
    }
    const contents = {
      ca: tlsCa === undefined ? systemCas() : readPem(tlsCa),
      cert: tlsCert === undefined ? undefined : readPem(tlsCert),
      key: tlsKey === undefined ? undefined : read(tlsKey),
    };
    if (tlsCert !== undefined && tlsKey !== undefined) {
      checkPair(contents, tlsCert, tlsKey);
    }
    return contents;
  }
}

function read(path: string): Buffer {
  return readSmall(path, MAX_FILE_BYTES, fault);
}

/** Reads certificates. Node would take a file without any for an empty list. */
function readPem(path: string): Buffer {
  const content = read(path);
  const blocks = content.toString("latin1").match(/-----BEGIN CERTIFICATE-----[^-]*-----END CERTIFICATE-----/g);
  if (blocks === null) {
    throw fault(`${path}: no certificate in PEM`);
  }
  try {
    blocks.forEach((block) => new X509Certificate(block));
  } catch {
    throw fault(`${path}: damaged certificate in PEM`);
  }
  return content;
}

function checkPair({ cert, key }: Contents, certPath: string, keyPath: string): void {
  try {
    tls.createSecureContext({ cert, key });
  } catch (error) {
    const code = error instanceof Error && "code" in error ? String(error.code) : "";
    throw fault(
      code.includes("MISMATCH")
        ? `${keyPath} is not the key of the certificate ${certPath}`
        : `${keyPath}: no private key in PEM without a password`,
    );
  }
}

/** The CAs of the system. Undefined: Node's own, on a system whose CAs Node cannot read. */
function systemCas(): Buffer | string[] | undefined {
  const named = process.env["SSL_CERT_FILE"];
  if (named) {
    return readPem(named);
  }
  // Since Node 22.15.
  const found = (tls as { getCACertificates?: (type: string) => string[] }).getCACertificates?.("system");
  if (found !== undefined && found.length > 0) {
    return found;
  }
  for (const path of SYSTEM_CAS) {
    try {
      return readPem(path);
    } catch {
      // Another one.
    }
  }
  return undefined;
}

/** Reads the failure of a handshake. `peer`: the server's certificate, as far as it came. */
export function handshakeProblem(error: Error, files: TlsFiles, host: string, peer?: tls.PeerCertificate): TlsProblem {
  const code = "code" in error ? String(error.code) : "";
  switch (code) {
    case "ERR_TLS_CERT_ALTNAME_INVALID":
      return new TlsProblem("WRONG_NAME", `the server's certificate is for ${namesOf(peer)}, not for ${files.nameAt(host)}`);
    case "CERT_HAS_EXPIRED":
      return new TlsProblem("EXPIRED", `the server's certificate expired${day(" on ", peer?.valid_to)}`);
    case "CERT_NOT_YET_VALID":
      return new TlsProblem("EXPIRED", `the server's certificate is not valid${day(" before ", peer?.valid_from) || " yet"}`);
    case "UNABLE_TO_GET_ISSUER_CERT":
    case "UNABLE_TO_GET_ISSUER_CERT_LOCALLY":
    case "UNABLE_TO_VERIFY_LEAF_SIGNATURE":
    case "SELF_SIGNED_CERT_IN_CHAIN":
    case "DEPTH_ZERO_SELF_SIGNED_CERT":
    case "CERT_SIGNATURE_FAILURE":
      return new TlsProblem("UNKNOWN_CA", "the server's certificate is not from a trusted CA (tlsCa)");
    case "ERR_SSL_WRONG_VERSION_NUMBER":
    case "ERR_SSL_PACKET_LENGTH_TOO_LONG":
    case "ERR_SSL_HTTP_REQUEST":
    case "EPROTO":
      return new TlsProblem("SERVER_WITHOUT_TLS", "the server does not speak TLS; without TLS the endpoint must begin with http://");
    case "ERR_SSL_TLSV1_ALERT_NO_APPLICATION_PROTOCOL":
      return withoutHttp2();
    case "ECONNRESET":
      return new TlsProblem(
        "HANDSHAKE",
        "the server closed the connection during the handshake; if it does not speak TLS, the endpoint must begin with http://",
      );
  }
  const refused = alertProblem(error, files);
  if (refused !== undefined) {
    return refused;
  }
  if (/^(CERT_|CRL_|INVALID_|HOSTNAME_|PATH_|ERROR_IN_CERT)/.test(code)) {
    return new TlsProblem("CERTIFICATE", `the server's certificate is refused: ${error.message}`);
  }
  return new TlsProblem("HANDSHAKE", `the handshake failed: ${error.message}`);
}

/** The server did not agree on HTTP/2. */
export function withoutHttp2(): TlsProblem {
  return new TlsProblem("HANDSHAKE", "the server does not offer HTTP/2 on this port (ALPN h2), which gRPC needs");
}

/** The server answered plaintext with other bytes than HTTP/2. */
export function wantsTls(): TlsProblem {
  return new TlsProblem(
    "SERVER_WITH_TLS",
    "the server does not speak HTTP/2 in plaintext; if it speaks TLS, the endpoint must begin with https://",
  );
}

/** Reads the server's alert about the client's certificate, which TLS 1.3 sends after the client's handshake. */
export function alertProblem(error: Error, files: TlsFiles): TlsProblem | undefined {
  const alert = /ALERT_(\w+)/.exec("code" in error ? String(error.code) : "")?.[1];
  const why: Record<string, string> = {
    CERTIFICATE_EXPIRED: "it is expired or not valid yet",
    CERTIFICATE_REVOKED: "it is revoked",
    UNKNOWN_CA: "the server does not trust its CA",
    UNSUPPORTED_CERTIFICATE: "it is not for clients",
    BAD_CERTIFICATE: "the server's log has the reason",
    CERTIFICATE_UNKNOWN: "the server's log has the reason",
    ACCESS_DENIED: "the server's log has the reason",
    DECRYPT_ERROR: "the server's log has the reason",
  };
  if (alert === "CERTIFICATE_REQUIRED" || (alert === "HANDSHAKE_FAILURE" && !files.identified)) {
    return new TlsProblem(
      "CLIENT_CERTIFICATE_REQUIRED",
      "the server requires a client certificate, and none was sent (tlsCert, tlsKey)",
    );
  }
  if (alert === undefined || !files.identified || why[alert] === undefined) {
    return undefined;
  }
  return new TlsProblem("CLIENT_CERTIFICATE_REFUSED", `the server refused the client certificate: ${why[alert]}`);
}

/** The names of a certificate, without their kinds and without characters that act on terminals. */
function namesOf(peer: tls.PeerCertificate | undefined): string {
  const names = (peer?.subjectaltname ?? "").replace(/(DNS|IP Address|URI|email):/g, "");
  return names === "" ? "other names" : names.replace(/[^ -~]/g, "?");
}

/** A time of a certificate as a day in UTC. */
function day(before: string, time: string | undefined): string {
  const at = time === undefined ? NaN : Date.parse(time);
  return Number.isNaN(at) ? "" : before + new Date(at).toISOString().slice(0, 10);
}
