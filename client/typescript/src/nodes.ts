/**
 * The servers of a client, and the one place that knows the current one.
 *
 * ```text
 *              MOVED with an owner
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
const MAX_ANSWER_BYTES = 64 << 20;

/** Reasons of a server that cannot serve now, while another one may. */
const AWAY: readonly (string | undefined)[] = ["MOVED", "STARTING", "DRAINING"];

/** One server. */
interface Node {
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
  readonly #list: readonly Node[];
  #current: Node;
  /** The last owner outside of the list. */
  #guest: Node | undefined;
  /** Connections to earlier owners outside of the list, until their calls are done. */
  readonly #leaving = new Set<Connection>();
  #tlsProblem: TlsProblem | undefined;

  constructor([first, ...others]: readonly [string, ...string[]], settings: NodesSettings) {
    this.#settings = settings;
    this.#current = this.#node(first);
    this.#list = [this.#current, ...others.map((authority) => this.#node(authority))];
  }

  /** The current server, such as `http://127.0.0.1:6925`. */
  get current(): string {
    return this.#current.authority;
  }

  /** The last TLS failure, unless a server has answered since. */
  get tlsProblem(): TlsProblem | undefined {
    return this.#tlsProblem;
  }

  readonly unary: Transport["unary"] = async (...call) => {
    const node = this.#current;
    try {
      return await node.transport.unary(...call);
    } catch (thrown) {
      throw this.#failed(node, thrown, call[1]);
    }
  };

  readonly stream: Transport["stream"] = async (...call) => {
    const node = this.#current;
    try {
      const response = await node.transport.stream(...call);
      return { ...response, message: this.#messages(node, response.message, call[1]) };
    } catch (thrown) {
      throw this.#failed(node, thrown, call[1]);
    }
  };

  /** Connects to the first server of the list that can be reached. Throws the failure of the last one. */
  async connect(): Promise<void> {
    for (let left = this.#list.length; ; left--) {
      const node = this.#current;
      try {
        return await node.connection.connect();
      } catch (thrown) {
        const error = this.#failed(node, thrown);
        if (left === 1) {
          throw error;
        }
      }
    }
  }

  /** Ends the connections once their calls are done. */
  async close(): Promise<void> {
    const kept = [...this.#list, ...(this.#guest === undefined ? [] : [this.#guest])].map(({ connection }) => connection);
    await Promise.all([...kept, ...this.#leaving].map((connection) => connection.close()));
  }

  async *#messages<M>(node: Node, messages: AsyncIterable<M>, signal?: AbortSignal): AsyncGenerator<M> {
    try {
      yield* messages;
    } catch (thrown) {
      throw this.#failed(node, thrown, signal);
    }
  }

  /** Draws the conclusions of a failed attempt, and notes them for {@link toWaldError}. */
  #failed(node: Node, thrown: unknown, signal?: AbortSignal): ConnectError {
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

  /** The owner that a server names, if it is another one. */
  #ownerOf({ reason, facts }: WaldError, node: Node): string | undefined {
    const owner = reason === "MOVED" ? authorityOfOwner(facts["owner"] ?? "", node.authority) : undefined;
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
    if (kept !== undefined) {
      return kept;
    }
    const left = this.#guest?.connection;
    if (left !== undefined) {
      this.#leaving.add(left);
      void left.close().finally(() => this.#leaving.delete(left));
    }
    return (this.#guest = this.#node(authority));
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
        if (failure instanceof TlsProblem) {
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
