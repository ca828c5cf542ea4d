/**
 * The HTTP/2 connection that all calls of a client share, made again when it breaks.
 *
 * connect-node has a manager of its own. This one also tells calls that never went out from
 * those that broke underway, bounds the time to connect, pings whether calls are underway or
 * not, and opens the connection's window for scans.
 */
import * as http2 from "node:http2";

import { Code, ConnectError } from "@connectrpc/connect";
import type { GrpcTransportOptions } from "@connectrpc/connect-node";

import { NotSent } from "./errors.js";

/**
 * A scan's messages are up to 1 MiB: a few must be underway for full speed, and one slow
 * stream must not hold up the others of the connection.
 */
const STREAM_WINDOW_BYTES = 4 << 20;
const CONNECTION_WINDOW_BYTES = 16 << 20;

/**
 * Maximum memory of Node for one connection before it breaks streams off (default: 10). Callers
 * bound their requests, so this limit only has to be out of their way.
 */
const SESSION_MEGABYTES = 1_000;

/** Settings of a connection. */
export interface ConnectionSettings {
  connectTimeoutMs: number;
  keepaliveIntervalMs: number;
  keepaliveTimeoutMs: number;
}

/** A connection to one server. */
export class Connection implements NonNullable<GrpcTransportOptions["sessionManager"]> {
  readonly authority: string;
  readonly #settings: ConnectionSettings;
  /** The session of new calls; undefined: the next call connects. */
  #session: Promise<http2.ClientHttp2Session> | undefined;
  /** All sessions, also those that only finish their calls. */
  readonly #alive = new Set<http2.ClientHttp2Session>();
  #closed = false;

  constructor(authority: string, settings: ConnectionSettings) {
    this.authority = authority;
    this.#settings = settings;
  }

  /** Connects, if there is no connection. */
  async connect(): Promise<void> {
    try {
      await this.#ready();
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

  /** Bytes that arrive count for nothing here: pings tell whether the server lives. */
  notifyResponseByteRead(): void {}

  /** Ends the connection once its calls are done. */
  async close(): Promise<void> {
    this.#closed = true;
    const ends = [...this.#alive].map((session) => {
      session.ref();
      return new Promise<void>((resolve) => session.close(resolve));
    });
    await Promise.all(ends);
  }

  /** The connection, made if there is none that takes calls. */
  async #ready(): Promise<http2.ClientHttp2Session> {
    for (;;) {
      if (this.#closed) {
        throw new Error("the client is closed");
      }
      const current = (this.#session ??= this.#dial());
      const session = await current;
      if (!session.closed && !session.destroyed) {
        return session;
      }
      if (this.#session === current) {
        this.#session = undefined;
      }
    }
  }

  #dial(): Promise<http2.ClientHttp2Session> {
    const { connectTimeoutMs } = this.#settings;
    const dialing = new Promise<http2.ClientHttp2Session>((resolve, reject) => {
      const session = http2.connect(this.authority, {
        settings: { initialWindowSize: STREAM_WINDOW_BYTES, enablePush: false },
        maxSessionMemory: SESSION_MEGABYTES,
      });
      const forget = (): void => {
        if (this.#session === dialing) {
          this.#session = undefined;
        }
      };
      const timer = setTimeout(() => {
        session.destroy(new Error(`no connection within ${connectTimeoutMs} ms`));
      }, connectTimeoutMs);
      this.#alive.add(session);
      session.on("connect", () => {
        clearTimeout(timer);
        if (session.destroyed) {
          // Broken before this event came: its error rejects.
          return;
        }
        session.setLocalWindowSize(CONNECTION_WINDOW_BYTES);
        session.unref();
        this.#keepAlive(session);
        resolve(session);
      });
      // The server takes no more calls; calls underway continue.
      session.on("goaway", forget);
      session.on("error", (error) => {
        forget();
        reject(error);
      });
      session.on("close", () => {
        clearTimeout(timer);
        this.#alive.delete(session);
        forget();
        reject(new Error("the connection was closed"));
      });
    });
    return dialing;
  }

  /** Without it a client would never notice that the network is gone. */
  #keepAlive(session: http2.ClientHttp2Session): void {
    const { keepaliveIntervalMs, keepaliveTimeoutMs } = this.#settings;
    let pending: NodeJS.Timeout | undefined;
    const interval = setInterval(() => {
      if (session.destroyed || pending !== undefined) {
        return;
      }
      pending = setTimeout(() => {
        session.destroy(new Error(`no answer to a ping within ${keepaliveTimeoutMs} ms`));
      }, keepaliveTimeoutMs).unref();
      session.ping(() => {
        clearTimeout(pending);
        pending = undefined;
      });
    }, keepaliveIntervalMs).unref();
    session.once("close", () => {
      clearInterval(interval);
      clearTimeout(pending);
    });
  }
}

const streams = new WeakMap<http2.ClientHttp2Session, number>();

/** Counts the calls underway on a session. */
function count(session: http2.ClientHttp2Session, change: number): number {
  const now = (streams.get(session) ?? 0) + change;
  streams.set(session, now);
  return now;
}

function notSent(error: unknown): ConnectError {
  const detail = error instanceof Error ? error.message || String(error) : String(error);
  return new ConnectError(detail, Code.Unavailable, undefined, undefined, new NotSent(detail));
}
