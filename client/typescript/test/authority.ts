/** A CA for tests, made by the openssl command. */
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const DAY_MS = 86_400_000;

/** The paths of a certificate and of its key. */
export interface Issued {
  tlsCert: string;
  tlsKey: string;
}

/** A CA in a directory of its own, and the certificates for localhost that it issues. */
export class Authority {
  readonly #directory = mkdtempSync(join(tmpdir(), "wald-ca-"));
  readonly ca = this.path("ca.pem");
  readonly #key = this.path("ca.key");

  constructor(name: string) {
    openssl("req", "-x509", ...NEW_KEY, "-keyout", this.#key, "-out", this.ca, "-days", "2", "-subj", `/CN=${name}`);
  }

  path(name: string): string {
    return join(this.#directory, name);
  }

  /** Issues a certificate; another one under the same name replaces it. Expired: for two days. */
  issue(name: string, { expired = false, names = "DNS:localhost,IP:127.0.0.1" } = {}): Issued {
    const [tlsCert, tlsKey, request] = [this.path(`${name}.pem`), this.path(`${name}.key`), this.path(`${name}.csr`)];
    openssl("req", "-new", ...NEW_KEY, "-keyout", tlsKey, "-out", request, "-subj", `/CN=${name}`, "-addext", `subjectAltName=${names}`);
    writeFileSync(this.path("index"), "");
    writeFileSync(
      this.path("ca.cnf"),
      `[ca]\ndefault_ca=a\n[a]\ndatabase=${this.path("index")}\nnew_certs_dir=${this.#directory}\nrand_serial=yes\n` +
        "default_md=sha256\npolicy=p\ncopy_extensions=copyall\n[p]\ncommonName=supplied\n",
    );
    const at = (days: number): string =>
      new Date(Date.now() + days * DAY_MS).toISOString().replace(/[-:T]/g, "").replace(/\.\d+/, "");
    const [begin, end] = expired ? [at(-3), at(-2)] : [at(-1), at(1)];
    openssl(
      ...["ca", "-batch", "-config", this.path("ca.cnf"), "-cert", this.ca, "-keyfile", this.#key, "-in", request],
      ...["-out", tlsCert, "-notext", "-startdate", begin, "-enddate", end],
    );
    return { tlsCert, tlsKey };
  }

  /** The settings of a server with a certificate. */
  server({ tlsCert, tlsKey }: Issued): { cert: Buffer; key: Buffer; ca: Buffer } {
    return { cert: readFileSync(tlsCert), key: readFileSync(tlsKey), ca: readFileSync(this.ca) };
  }

  remove(): void {
    rmSync(this.#directory, { recursive: true });
  }
}

const NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"];

function openssl(...args: string[]): void {
  execFileSync("openssl", args, { stdio: "pipe" });
}
