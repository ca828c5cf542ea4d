/**
 * The servers of a client, and the one place that knows the current one.
 *
 * ```text
 *              MOVED with an owner; an answer of the
 *              owner through another server, and a
 *              connection to the owner
 *            ┌────────────────────────────────────────▶ the owner, in the list or not
 *  (current) ┤
 *            └────────────────────────────────────────▶ the next of the list, in a ring;
 *              MOVED without an owner; no connection;   from outside, the first
 *              starting or stopping; UNAVAILABLE
 *              without a reason of Wald
 * ```
 *
 * An attempt goes to the server that is current when the attempt begins. Only a failure of the current server makes
 * another one current: attempts at an earlier server may fail late.
 */
import { ConnectError, type Interceptor, type Transport } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";

import { Connection, type ConnectionSettings } from "./connection.js";
import { authorityOfOwner } from "./endpoint.js";
import { noteAttempt, toWaldError, type WaldError } from "./errors.js";
import { TlsProblem } from "./tls.js";

/** Answers stay below 1 MiB unless one record alone is larger; the server's limit on records can be raised, so leave room. */
export const MAX_ANSWER_BYTES = 64 << 20;

/** Reasons of a server that cannot serve now, while another one may: one without its bucket may have lost the store. */
const AWAY: readonly (string | undefined)[] = ["MOVED", "STARTING", "DRAINING", "BUCKET_DOWN"];

/** The owner of the store, in the headers of an answer that came through another server. */
export const OWNER_HEADER = "wald-owner";

/** Time between two attempts to reach such an owner, if the first one fails. */
const APPROACH_PAUSE_MS = 60_000;

/** One server. */
export interface Node {
  readonly authority: string;
  readonly connection: Connection;
  readonly transport: Transport;
}

/** Settings of the connections to all servers. */
export interface NodesSettings extends Omit<ConnectionSettings, "onDialed"> {
  interceptors: Interceptor[];
  /** Returns the reason why a server must not get the calls of this client; undefined: it may. */
  refusal: (authority: string) => string | undefined;
}

/** A transport whose calls go to the current server. It keeps one connection to each server of the list, and one more. */
export class Nodes implements Transport {
  readonly #settings: NodesSettings;
  readonly #list: Node[];
  #current: Node;
  /** The last owner outside of the list. */
  #guest: Node | undefined;
  /** Earlier connections, until their calls are done. */
  readonly #leaving = new Set<Connection>();
  #tlsProblem: TlsProblem | undefined;
  /** An owner that this client tries to reach. */
  #approached: Node | undefined;
  /** Time from which on the next attempt may begin. */
  #nextApproach = 0;

  constructor([first, ...others]: readonly [string, ...string[]], settings: NodesSettings) {
    this.#settings = settings;
    this.#current = this.#node(first);
    this.#list = [this.#current, ...others.map((authority) => this.#node(authority))];
  }

  /** The current server, such as `http://127.0.0.1:6925`. */
  get current(): string {
    return this.#current.authority;
  }

  /** The server of the attempt that begins now. */
  get server(): Node {
    return this.#current;
  }

  /** The last TLS failure, unless a server has answered since. */
  get tlsProblem(): TlsProblem | undefined {
    return this.#tlsProblem;
  }

  readonly unary: Transport["unary"] = async (...call) => {
    const node = this.#current;
    try {
      const response = await node.transport.unary(...call);
      this.approach(node, response.header.get(OWNER_HEADER));
      return response;
    } catch (thrown) {
      throw this.failed(node, thrown, call[1]);
    }
  };

  readonly stream: Transport["stream"] = async (...call) => {
    const node = this.#current;
    try {
      const response = await node.transport.stream(...call);
      this.approach(node, response.header.get(OWNER_HEADER));
      return { ...response, message: this.#messages(node, response.message, call[1]) };
    } catch (thrown) {
      throw this.failed(node, thrown, call[1]);
    }
  };

  /** Connects to the first server of the list that can be reached. Throws the failure of the last one. */
  async connect(): Promise<void> {
    for (let left = this.#list.length; ; left--) {
      const node = this.#current;
      try {
        return await node.connection.connect();
      } catch (thrown) {
        const error = this.failed(node, thrown);
        if (left === 1) {
          throw error;
        }
      }
    }
  }

  /** Ends the connections once their calls are done. */
  async close(): Promise<void> {
    this.#approached?.connection.destroy();
    const kept = [...this.#list, ...(this.#guest === undefined ? [] : [this.#guest])].map(({ connection }) => connection);
    await Promise.all([...kept, ...this.#leaving].map((connection) => connection.close()));
  }

  async *#messages<M>(node: Node, messages: AsyncIterable<M>, signal?: AbortSignal): AsyncGenerator<M> {
    try {
      yield* messages;
    } catch (thrown) {
      throw this.failed(node, thrown, signal);
    }
  }

  /** Draws the conclusions of a failed attempt, and notes them for {@link toWaldError}. */
  failed(node: Node, thrown: unknown, signal?: AbortSignal): ConnectError {
    const error = ConnectError.from(thrown);
    const failure = toWaldError(error, "READ", signal);
    const named = this.#ownerOf(failure, node);
    const refusal = named && this.#settings.refusal(named);
    const owner = refusal === undefined ? named : undefined;
    if (failure.reason === undefined ? failure.code === "UNAVAILABLE" : AWAY.includes(failure.reason)) {
      this.#leave(node, owner);
    }
    noteAttempt(error, { server: node.authority, followed: owner !== undefined, refusal });
    return error;
  }

  /**
   * Takes note of an answer. If it came from an owner that this server only forwards to and names, later calls go to the owner
   * itself, once there is a connection to it. Until then they stay: the owner may be out of this client's reach, behind a
   * balancer or a tunnel.
   */
  approach(through: Node, named: string | null): void {
    const now = performance.now();
    if (named === null || through !== this.#current || now < this.#nextApproach) {
      return;
    }
    this.#nextApproach = now + APPROACH_PAUSE_MS;
    const authority = this.#otherOwner(named, through);
    if (authority === undefined || this.#settings.refusal(authority) !== undefined) {
      return;
    }
    const owner = (this.#approached = this.#node(authority));
    owner.connection
      .connect(true)
      .then(
        () => {
          this.#nextApproach = 0;
          return through === this.#current;
        },
        () => false,
      )
      .then((reached) => {
        this.#approached = undefined;
        if (reached) {
          this.#current = this.#keep(owner);
        } else {
          owner.connection.destroy();
        }
      });
  }

  /** The owner that an error of a server names, if it is another one. */
  #ownerOf({ reason, facts }: WaldError, node: Node): string | undefined {
    return reason === "MOVED" ? this.#otherOwner(facts["owner"] ?? "", node) : undefined;
  }

  /** The authority of an owner, `HOST:PORT`, if it is another one than this server. */
  #otherOwner(named: string, node: Node): string | undefined {
    const owner = authorityOfOwner(named, node.authority);
    return owner === node.authority ? undefined : owner;
  }

  /** Makes the owner current, or else the next server of the list. */
  #leave(node: Node, owner?: string): void {
    if (node !== this.#current) {
      return;
    }
    const next = this.#list[(this.#list.indexOf(node) + 1) % this.#list.length];
    this.#current = owner === undefined ? (next ?? node) : this.#find(owner);
  }

  #find(authority: string): Node {
    const kept = [...this.#list, this.#guest].find((node) => node?.authority === authority);
    return kept ?? this.#keep(this.#node(authority));
  }

  /** Keeps a server instead of the earlier one of this authority in the list, or of the last one outside of it. */
  #keep(node: Node): Node {
    const place = this.#list.findIndex(({ authority }) => authority === node.authority);
    const left = (place < 0 ? this.#guest : this.#list[place])?.connection;
    if (place < 0) {
      this.#guest = node;
    } else {
      this.#list[place] = node;
    }
    if (left !== undefined) {
      this.#leaving.add(left);
      void left.close().finally(() => this.#leaving.delete(left));
    }
    return node;
  }

  #node(authority: string): Node {
    const { interceptors, ...settings } = this.#settings;
    const connection = new Connection(authority, {
      ...settings,
      onDialed: (failure) => {
        if (failure === undefined) {
          this.#tlsProblem = undefined;
          return;
        }
        if (failure instanceof TlsProblem && node !== this.#approached) {
          this.#tlsProblem = failure;
        }
        // The deadlines of all calls that waited for the connection may have passed.
        this.#leave(node);
      },
    });
    const transport = createGrpcTransport({
      baseUrl: authority,
      sessionManager: connection,
      acceptCompression: [],
      readMaxBytes: MAX_ANSWER_BYTES,
      interceptors,
    });
    const node: Node = { authority, connection, transport };
    return node;
  }
}
