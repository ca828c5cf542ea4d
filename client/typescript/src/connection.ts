/**
 * The HTTP/2 connection that all calls of a client share, made again when it breaks.
 *
 * connect-node has a manager of its own. This one also tells calls that never went out from
 * those that broke underway, bounds the time to connect, pings whether calls are underway or
 * not, opens the connection's window for scans, and reads the files of TLS for each connection.
 */
import * as http2 from "node:http2";
import { Duplex } from "node:stream";
import * as tls from "node:tls";

import { Code, ConnectError } from "@connectrpc/connect";
import type { GrpcTransportOptions } from "@connectrpc/connect-node";

import { ClosedError, NotSent, TLS_PAUSE_MS } from "./errors.js";
import { timerMs } from "./retry.js";
import { alertProblem, handshakeProblem, TlsProblem, wantsTls, withoutHttp2, type TlsFiles } from "./tls.js";

/**
 * A scan's messages are up to 1 MiB: a few must be underway for full speed. Streams that nobody reads do not hold up
 * the others: Node gives the window of the connection back when bytes arrive, and that of a stream when they are read.
 */
const STREAM_WINDOW_BYTES = 4 << 20;
const CONNECTION_WINDOW_BYTES = 16 << 20;

/**
 * Maximum memory of Node for one connection before it breaks streams off (default: 10). Callers
 * bound their requests, so this limit only has to be out of their way.
 */
const SESSION_MEGABYTES = 1_000;

/** Bun and Deno have the API of Node over HTTP/2 of their own. */
const IS_BUN = process.versions["bun"] !== undefined;
const IS_NODE = !IS_BUN && process.versions["deno"] === undefined;

/** Settings of a connection. */
export interface ConnectionSettings {
  connectTimeoutMs: number;
  keepaliveIntervalMs: number;
  keepaliveTimeoutMs: number;
  /** Undefined: plaintext. */
  tls?: TlsFiles | undefined;
  /** Called once an attempt to connect has ended: with its failure, or undefined once the server has answered. */
  onDialed: (failure: Error | undefined) => void;
}

/** A connection to one server. */
export class Connection implements NonNullable<GrpcTransportOptions["sessionManager"]> {
  readonly authority: string;
  readonly #settings: ConnectionSettings;
  /** The session of new calls; undefined: the next call connects. */
  #session: Promise<http2.ClientHttp2Session> | undefined;
  /** All sessions, also those that only finish their calls. */
  readonly #alive = new Map<http2.ClientHttp2Session, Promise<void>>();
  #closed = false;
  /** The last TLS failure; undefined once the server has answered. */
  #problem: { at: number; problem: TlsProblem } | undefined;

  constructor(authority: string, settings: ConnectionSettings) {
    // The origin of a URL has no port that is its scheme's default, and connect-node compares it with this one.
    this.authority = new URL(authority).origin;
    this.#settings = settings;
  }

  /** Connects, if there is no connection. `background`: the process may end meanwhile. */
  async connect(background = false): Promise<void> {
    try {
      await this.#ready(background);
    } catch (error) {
      throw notSent(error);
    }
  }

  /** Begins a call. Whatever it throws, the server has seen nothing of the call. */
  async request(
    method: string,
    path: string,
    headers: http2.OutgoingHttpHeaders,
    options: Omit<http2.ClientSessionRequestOptions, "signal">,
  ): Promise<http2.ClientHttp2Stream> {
    try {
      const session = await this.#ready();
      const stream = session.request({ ...headers, ":method": method, ":path": path }, options);
      // A process may end while a connection is idle, not while a call is underway.
      session.ref();
      count(session, +1);
      let answered = false;
      stream.once("response", () => (answered = true));
      stream.once("end", () => {
        // connect-node leaves the requests open if the server ends the call before they do.
        if (!stream.writableEnded) {
          stream.close(http2.constants.NGHTTP2_NO_ERROR);
        }
      });
      stream.once("close", () => {
        if (count(session, -1) === 0 && !this.#closed) {
          session.unref();
        }
        if (!answered && stream.rstCode === http2.constants.NGHTTP2_NO_ERROR) {
          // Node calls this no error, and nobody would ever hear of the call again.
          stream.emit("error", new Error("the stream ended without an answer"));
        }
      });
      return stream;
    } catch (error) {
      throw notSent(error);
    }
  }

  /** As {@link request}, but the process may end while the call is open. */
  async open(path: string, headers: http2.OutgoingHttpHeaders): Promise<http2.ClientHttp2Stream> {
    try {
      const session = await this.#ready();
      return session.request({ ...headers, ":method": "POST", ":path": path });
    } catch (error) {
      throw notSent(error);
    }
  }

  /** Bytes that arrive count for nothing here: pings tell whether the server lives. */
  notifyResponseByteRead(): void {}

  /** Ends the connection once its calls are done. */
  async close(): Promise<void> {
    this.#closed = true;
    const ends = [...this.#alive].map(([session, gone]) => {
      session.ref();
      return Promise.race([gone, new Promise<void>((resolve) => session.close(resolve))]);
    });
    await Promise.all(ends);
  }

  /** Ends the connection now, and its calls. */
  destroy(): void {
    this.#closed = true;
    for (const session of this.#alive.keys()) {
      session.destroy();
    }
  }

  /** The connection, made if there is none that takes calls. */
  async #ready(background = false): Promise<http2.ClientHttp2Session> {
    for (;;) {
      if (this.#closed) {
        throw new ClosedError();
      }
      const last = this.#problem;
      if (this.#session === undefined && last !== undefined && performance.now() - last.at < TLS_PAUSE_MS) {
        throw last.problem;
      }
      const current = (this.#session ??= this.#dial(background));
      const session = await current;
      if (!session.closed && !session.destroyed) {
        return session;
      }
      if (this.#session === current) {
        this.#session = undefined;
      }
    }
  }

  #dial(background: boolean): Promise<http2.ClientHttp2Session> {
    const { connectTimeoutMs, onDialed, tls: files } = this.#settings;
    const { hostname, port } = new URL(this.authority);
    const host = hostname.replace(/^\[|\]$/g, "");
    const dialing = new Promise<http2.ClientHttp2Session>((resolve, reject) => {
      let socket: tls.TLSSocket | undefined;
      let peer: tls.PeerCertificate | undefined;
      let secured = false;
      if (files !== undefined) {
        socket = tls.connect({ ...files.current(host), host, port: Number(port || 443) });
        socket.setNoDelay(true);
        // Node forgets the certificate once it has refused it.
        const kept = socket;
        socket.prependListener("secure", () => (peer = kept.getPeerCertificate()));
        socket.once("secureConnect", () => {
          secured = true;
          if (kept.alpnProtocol !== "h2") {
            lost(withoutHttp2());
          }
        });
      }
      const session = http2.connect(this.authority, {
        settings: { initialWindowSize: STREAM_WINDOW_BYTES, enablePush: false },
        maxSessionMemory: SESSION_MEGABYTES,
        ...(socket !== undefined && { createConnection: () => (IS_NODE ? bytesOf(socket) : socket) }),
      });
      let answered = false;
      /** The TLS failure that ended the connection, if one did. */
      const problemOf = (error: Error): TlsProblem | undefined => {
        if (answered || error instanceof TlsProblem) {
          return error instanceof TlsProblem ? error : undefined;
        }
        if (files === undefined) {
          return "code" in error && error.code === "ERR_HTTP2_ERROR" ? wantsTls() : undefined;
        }
        if (secured) {
          return alertProblem(error, files);
        }
        // No connection, or one that ended for a reason of this side.
        const elsewhere = "syscall" in error && ["connect", "getaddrinfo"].includes(String(error.syscall));
        return elsewhere || !("code" in error) ? undefined : handshakeProblem(error, files, host, peer);
      };
      const failed = (error: Error): void => {
        forget();
        const problem = problemOf(error);
        if (problem !== undefined) {
          this.#problem = { at: performance.now(), problem };
        }
        reject(problem ?? error);
      };
      const forget = (): void => {
        if (this.#session === dialing) {
          this.#session = undefined;
        }
      };
      let stopPings = (): void => {};
      let tellGone = (): void => {};
      const ended = (error: Error): void => {
        clearTimeout(timer);
        stopPings();
        tellGone();
        this.#alive.delete(session);
        failed(error);
      };
      // A session whose last bytes do not go out stays without any event, and its calls without an end.
      const lost = (error: Error): void => {
        session.destroy(error);
        socket?.destroy();
        ended(error);
      };
      const late = (): void => lost(new Error(`no connection within ${connectTimeoutMs} ms`));
      const timer = setTimeout(late, timerMs(connectTimeoutMs));
      if (background) {
        timer.unref();
        session.unref();
      }
      socket?.on("error", lost);
      socket?.on("close", () => lost(new Error("the connection was closed")));
      this.#alive.set(session, new Promise((resolve) => (tellGone = resolve)));
      session.on("connect", () => {
        if (session.destroyed) {
          // Broken before this event came: its error rejects.
          return;
        }
        // With a larger window of the connection, a scan in Bun 1.4.5 stops after some MiB and never ends.
        if (!IS_BUN) {
          session.setLocalWindowSize(CONNECTION_WINDOW_BYTES);
        }
      });
      // Only the server's first frame says that it takes calls: in TLS 1.3 it refuses a client's certificate after
      // the client's handshake.
      session.once("remoteSettings", () => {
        answered = true;
        clearTimeout(timer);
        this.#problem = undefined;
        session.unref();
        stopPings = this.#keepAlive(session, lost);
        resolve(session);
      });
      // The server takes no more calls; calls underway continue.
      session.on("goaway", forget);
      session.on("error", failed);
      session.on("close", () => ended(new Error("the connection was closed")));
    });
    dialing.then(() => onDialed(undefined), onDialed);
    return dialing;
  }

  /** Sends pings until the returned function is called: without them a client would never notice that the network is gone. */
  #keepAlive(session: http2.ClientHttp2Session, lost: (error: Error) => void): () => void {
    const { keepaliveIntervalMs, keepaliveTimeoutMs } = this.#settings;
    let pending: NodeJS.Timeout | undefined;
    const interval = setInterval(() => {
      if (session.destroyed || pending !== undefined) {
        return;
      }
      const late = (): void => lost(new Error(`no answer to a ping within ${keepaliveTimeoutMs} ms`));
      pending = setTimeout(late, timerMs(keepaliveTimeoutMs)).unref();
      session.ping(() => {
        clearTimeout(pending);
        pending = undefined;
      });
    }, timerMs(keepaliveIntervalMs)).unref();
    return () => {
      clearInterval(interval);
      clearTimeout(pending);
    };
  }
}

/**
 * The bytes inside a TLS socket. Given the socket itself, Node's HTTP/2 takes its handle over, and reads nothing while it
 * writes. If the connection then breaks, Node 20 sometimes reports neither the end of the write nor the break: the session
 * stays open, and its calls get no answer. Bun and Deno get the socket: their HTTP/2 fails over other streams.
 */
function bytesOf(socket: tls.TLSSocket): Duplex {
  const bytes = new Duplex({
    read: () => socket.resume(),
    write: (chunk: Uint8Array, _, done) => void socket.write(chunk, done),
    final: (done) => void socket.end(done),
    destroy: (error, done) => {
      socket.destroy();
      done(error);
    },
  });
  socket.on("data", (chunk: Uint8Array) => {
    if (!bytes.push(chunk)) {
      socket.pause();
    }
  });
  socket.on("end", () => bytes.push(null));
  socket.on("close", () => bytes.destroy());
  return bytes;
}

const streams = new WeakMap<http2.ClientHttp2Session, number>();

/** Counts the calls underway on a session. */
function count(session: http2.ClientHttp2Session, change: number): number {
  const now = (streams.get(session) ?? 0) + change;
  streams.set(session, now);
  return now;
}

function notSent(error: unknown): ConnectError {
  if (error instanceof TlsProblem || error instanceof ClosedError) {
    return new ConnectError(error.message, Code.Unavailable, undefined, undefined, error);
  }
  const detail = error instanceof Error ? error.message || String(error) : String(error);
  return new ConnectError(detail, Code.Unavailable, undefined, undefined, new NotSent(detail));
}
