/** The token of a client, and a transport whose calls carry it. */
import { isIPv4 } from "node:net";

import type { Transport } from "@connectrpc/connect";

import { failedFor, tokenError, type WaldError } from "./errors.js";
import { mayRepeat, type Repeat } from "./retry.js";
import { readSmall } from "./tls.js";

/** Maximum size of a token file. */
const MAX_BYTES = 16 << 10;
/** Minimum time between two reads of the file. */
const READ_PAUSE_MS = 1_000;

/** Settings of the token. */
export interface TokenOptions {
  /** The token that every call carries. */
  token?: string;
  /**
   * File with the token that every call carries; white space around the token does not count. The client reads
   * the file again at most once a second, and once when the server refuses the token. Then it repeats a call if
   * the file has another token.
   */
  tokenFile?: string;
  /** Lets the token cross a connection without TLS to another machine. Default: without TLS only to loopback. */
  allowInsecureToken?: boolean;
}

/** A fixed token, or that of a file. Private fields, so that no inspection shows it. */
export class TokenSource {
  readonly #path: string | undefined;
  #token: string;
  #readAt = performance.now();

  constructor({ token, tokenFile }: TokenOptions) {
    if (token !== undefined && tokenFile !== undefined) {
      throw tokenError("token and tokenFile exclude each other");
    }
    this.#path = tokenFile;
    this.#token = tokenFile === undefined ? clean(token ?? "", "the token") : readToken(tokenFile);
  }

  get followsAFile(): boolean {
    return this.#path !== undefined;
  }

  /** The token of the next call. */
  current(): string {
    if (performance.now() - this.#readAt >= READ_PAUSE_MS) {
      this.#readAgain();
    }
    return this.#token;
  }

  /** Whether there is another token than the refused one. */
  changed(refused: string): boolean {
    if (this.#token === refused) {
      this.#readAgain();
    }
    return this.#token !== refused;
  }

  #readAgain(): void {
    this.#readAt = performance.now();
    if (this.#path === undefined) {
      return;
    }
    try {
      this.#token = readToken(this.#path);
    } catch {
      // It may be replaced now: the earlier one stays in force.
    }
  }
}

function readToken(path: string): string {
  return clean(readSmall(path, MAX_BYTES, tokenError).toString("utf8"), path);
}

/** The token without the white space around it. A header has only visible ASCII. */
function clean(text: string, place: string): string {
  const token = text.trim();
  if (token === "") {
    throw tokenError(`${place} is empty, and must have a token`);
  }
  if (/[^!-~]/.test(token)) {
    throw tokenError(`${place} has characters that a token cannot have, such as white space inside`);
  }
  return token;
}

/** Whether a host is this machine. */
export function isLoopback(host: string): boolean {
  const bare = host.toLowerCase();
  return bare === "localhost" || bare === "[::1]" || (isIPv4(bare) && bare.startsWith("127."));
}

/** The token of one call, scan, session or producer, over all its attempts. */
export class TokenUse {
  readonly #source: TokenSource | undefined;
  #used: string | undefined;

  constructor(source: TokenSource | undefined) {
    this.#source = source;
  }

  /** The headers of the attempt that begins now. */
  headers(): { headers?: Record<string, string> } {
    this.#used = this.#source?.current();
    return this.#used === undefined ? {} : { headers: { authorization: `Bearer ${this.#used}` } };
  }

  /**
   * Whether to send a request again after this error. A server that refused the token applied nothing: the
   * request is sent again once there is another token. `waits`: producers and followers also wait until an
   * expired one is replaced in its file.
   */
  allows(repeat: Repeat, error: WaldError, waits = false): boolean {
    const expired = failedFor(error, "CREDENTIAL_EXPIRED");
    if (!expired && !failedFor(error, "BAD_CREDENTIAL")) {
      return mayRepeat(repeat, error);
    }
    if (this.#source === undefined || this.#used === undefined) {
      return false;
    }
    return this.#source.changed(this.#used) || (waits && expired && this.#source.followsAFile);
  }
}

/** A transport whose calls carry more headers; a call's own come first. */
export function carrying(inner: Transport, more: () => Record<string, string>): Transport {
  const added = (given: ConstructorParameters<typeof Headers>[0]): Headers => {
    const headers = new Headers(given);
    for (const [name, value] of Object.entries(more())) {
      if (!headers.has(name)) {
        headers.set(name, value);
      }
    }
    return headers;
  };
  return {
    unary: (method, signal, timeoutMs, header, ...rest) => inner.unary(method, signal, timeoutMs, added(header), ...rest),
    stream: (method, signal, timeoutMs, header, ...rest) => inner.stream(method, signal, timeoutMs, added(header), ...rest),
  };
}
