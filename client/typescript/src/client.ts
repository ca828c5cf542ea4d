/** A client of one store: the calls, each in a few lines. */
import type { MessageInitShape } from "@bufbuild/protobuf";
import { durationFromMs } from "@bufbuild/protobuf/wkt";
import { createClient, type Client as Stub, type Interceptor, type Transport } from "@connectrpc/connect";

import { DurableFollower, type DurableFollowerOptions } from "./durable-follower.js";
import { DurableProducer, type DurableProducerOptions } from "./durable-producer.js";
import { authoritiesOf, DEFAULT_ENDPOINT } from "./endpoint.js";
import { failedFor, tlsError, tokenError, toWaldError, usageError, type Access, type WaldError } from "./errors.js";
import { CursorService, type Cursor } from "./gen/wald/v1/cursor_pb.js";
import { LogService, type Log, type LogConfigSchema, type LogProducer } from "./gen/wald/v1/log_pb.js";
import { OpsService } from "./gen/wald/v1/ops_pb.js";
import { SyncTarget } from "./gen/wald/v1/types_pb.js";
import { WalService } from "./gen/wald/v1/wal_pb.js";
import {
  batchAck,
  batchGuards,
  durability,
  guards,
  jsonSafe,
  missing,
  protoBatch,
  protoCondition,
  protoDurability,
  protoRecord,
  protoStart,
  protoVisibility,
  storedBatch,
  type Ack,
  type BatchAck,
  type BatchInput,
  type CallOptions,
  type Condition,
  type CursorMove,
  type Durability,
  type JsonSafe,
  type Page,
  type RecordInput,
  type Start,
  type Tail,
  type Visibility,
} from "./messages.js";
import { Nodes } from "./nodes.js";
import { Producer, type ProducerOptions } from "./producer.js";
import { call, DEFAULT_RETRY, DEFAULT_TIMEOUT_MS, type Attempt, type Repeat, type RetryPolicy } from "./retry.js";
import { Follower, type ScanOptions, type Selector } from "./scan.js";
import { Session, type SessionOptions } from "./session.js";
import { SharedAppends, type Appends } from "./shared-appends.js";
import { TlsFiles, TlsProblem, type TlsOptions } from "./tls.js";
import { carrying, isLoopback, TokenSource, TokenUse, type TokenOptions } from "./token.js";

/** Settings of a {@link Client}. TLS is for endpoints that begin with `https://`. */
export interface ClientOptions extends TlsOptions, TokenOptions {
  /** Time to make a connection. Default: 5 s. */
  connectTimeoutMs?: number;
  /** Time between two checks that the server is alive, also when idle. Default: 10 s. */
  keepaliveIntervalMs?: number;
  /** Maximum time for its answer before the connection is given up. Default: 5 s. */
  keepaliveTimeoutMs?: number;
  /** Deadline of calls that name none, over all their attempts. Default: 10 s. Scans have none. */
  timeoutMs?: number;
  /**
   * Maximum silence of a scan before it counts as lost. Default: 60 s; the server sends a
   * heartbeat after 15 s.
   */
  silenceTimeoutMs?: number;
  /** Policy for repeating calls. */
  retry?: Partial<RetryPolicy>;
  /** Headers of every call. */
  headers?: Readonly<Record<string, string>>;
  /** Interceptors of connect, which see every call. */
  interceptors?: Interceptor[];
  /**
   * Whether `append` and `appendBatch` share one stream to the server, which is much faster. Default: true. Set false for proxies
   * that do not pass streams on, and for automatic instrumentation that must see each append as a call. With `interceptors` or
   * a `transport` each append is a call anyway.
   */
  shareAppends?: boolean;
  /** A transport of one's own. The endpoint and the settings of connections, TLS and interceptors do not count then. */
  transport?: Transport;
}

/** Conditions and options of an append. */
export interface AppendOptions extends Condition, CallOptions {
  /**
   * Durability that the record must reach before the answer. Default: set by the log's sync
   * mode.
   */
  durability?: Durability;
}

/** Range and options of a read. Without a start: from the first record kept. */
export interface ReadOptions extends Start, CallOptions {
  /** Maximum number of records. Default: 100. */
  maxRecords?: number;
  /** Maximum bytes of records. Default: as many as keep the answer below 1 MiB. */
  maxBytes?: number;
  /** Waits so long for a first record if there is none. Comes on top of the deadline. */
  waitMs?: number;
  /** Which records to see. Default: those that the log's sync mode acks. */
  visibility?: Visibility;
  /**
   * Any node of the store may answer from its copy, which is usually a second old, and at most twice its
   * `lease_ttl`. Implies the visibility REPLICATED.
   */
  anyNode?: boolean;
  /** The log must have this number. */
  logId?: bigint;
}

/** The generated stubs, for calls that the client does not wrap. Nothing is repeated there. */
export interface Stubs {
  readonly wal: Stub<typeof WalService>;
  readonly logs: Stub<typeof LogService>;
  readonly cursors: Stub<typeof CursorService>;
  readonly ops: Stub<typeof OpsService>;
}

/** A log's configuration, in the contract's form. */
export type LogConfigInput = MessageInitShape<typeof LogConfigSchema>;

/**
 * A client of one Wald store. It talks to one server at a time, on one connection, which is made again when it breaks.
 *
 * **The client repeats automatically**, within the retry policy and the deadline of the call:
 * reads, after any passing failure; appends, when the server or the transport reports that
 * nothing was applied; appends with an expected lsn or a producer, also when the connection
 * broke underway, because they cannot be applied twice. A plain append whose connection broke
 * is *not* repeated: its error's `outcome` is UNKNOWN.
 *
 * **A server that does not own the store names the owner** (MOVED), and the client turns to that one. A server that
 * cannot be reached, starts or stops is left for the next one of the endpoint. Sessions, producers and followers that
 * begin, or begin again, use the current server. A transport of one's own is never left.
 */
export class Client {
  /** The generated stubs. Nothing is repeated there, and connect raises its own errors. */
  readonly stubs: Stubs;
  /** Undefined: a transport of one's own. */
  readonly #nodes: Nodes | undefined;
  readonly #token: TokenSource | undefined;
  /** Undefined: each append is a call. */
  readonly #shared: SharedAppends | undefined;
  readonly #appends: Appends;
  readonly #wal: Stub<typeof WalService>;
  readonly #logs: Stub<typeof LogService>;
  readonly #cursors: Stub<typeof CursorService>;
  readonly #timeoutMs: number;
  readonly #silenceTimeoutMs: number;
  readonly #policy: RetryPolicy;
  /** Followers, sessions and producers that are open. */
  readonly #open = new Set<{ close(): Promise<void> }>();
  /** Calls underway, also those that pause before their next attempt. */
  readonly #calls = new Set<Promise<unknown>>();

  private constructor(endpoint: string, options: ClientOptions) {
    const authorities = authoritiesOf(endpoint);
    const files = tlsFiles(authorities[0], options);
    this.#token = tokenSource(authorities, options);
    let inner = options.transport;
    if (inner === undefined) {
      inner = this.#nodes = new Nodes(authorities, {
        connectTimeoutMs: options.connectTimeoutMs ?? 5_000,
        keepaliveIntervalMs: options.keepaliveIntervalMs ?? 10_000,
        keepaliveTimeoutMs: options.keepaliveTimeoutMs ?? 5_000,
        tls: files,
        interceptors: options.interceptors ?? [],
        refusal: (authority) => (this.#token === undefined ? undefined : exposing(authority, options)),
      });
    }
    const { headers } = options;
    const transport = carrying(inner, () => ({ ...headers, ...new TokenUse(this.#token).headers().headers }));
    this.stubs = {
      wal: createClient(WalService, transport),
      logs: createClient(LogService, transport),
      cursors: createClient(CursorService, transport),
      ops: createClient(OpsService, transport),
    };
    this.#wal = this.stubs.wal;
    const shares = (options.shareAppends ?? true) && (options.interceptors ?? []).length === 0;
    if (shares && this.#nodes !== undefined) {
      this.#shared = new SharedAppends(this.#nodes, this.#wal, headers ?? {});
    }
    this.#appends = this.#shared ?? this.#wal;
    this.#logs = this.stubs.logs;
    this.#cursors = this.stubs.cursors;
    this.#timeoutMs = options.timeoutMs ?? DEFAULT_TIMEOUT_MS;
    this.#silenceTimeoutMs = options.silenceTimeoutMs ?? 60_000;
    this.#policy = { ...DEFAULT_RETRY, ...options.retry };
  }

  /**
   * Connects to a server, such as `localhost:6925` or `https://wald.internal`; or to the first that can be reached of
   * several servers of one store, such as `https://a,https://b`.
   *
   * @throws WaldError of kind USAGE, TLS, TOKEN, or NOT_SENT if there is no server.
   */
  static async connect(endpoint: string = DEFAULT_ENDPOINT, options: ClientOptions = {}): Promise<Client> {
    const client = Client.lazy(endpoint, options);
    try {
      await client.#nodes?.connect();
    } catch (thrown) {
      throw toWaldError(thrown, "READ");
    }
    return client;
  }

  /**
   * Connects to the server, or to one of the servers, that the environment names: `WALD_ENDPOINT` (default:
   * {@link DEFAULT_ENDPOINT}), `WALD_TLS_CA`, `WALD_TLS_CERT`, `WALD_TLS_KEY`, `WALD_TLS_SERVER_NAME`, and `WALD_TOKEN_FILE` or else
   * `WALD_TOKEN`. An empty variable counts as absent, and options come before the environment.
   *
   * @throws WaldError as {@link connect}.
   */
  static fromEnv(options: ClientOptions = {}): Promise<Client> {
    return Client.connect(process.env["WALD_ENDPOINT"] || undefined, withEnvironment(options));
  }

  /** A client of the server that the environment names, as {@link fromEnv}, that connects with its first call. */
  static lazyFromEnv(options: ClientOptions = {}): Client {
    return Client.lazy(process.env["WALD_ENDPOINT"] || undefined, withEnvironment(options));
  }

  /** A client that connects with its first call; endpoints as for {@link connect}. Files of TLS and of the token are read now. */
  static lazy(endpoint: string = DEFAULT_ENDPOINT, options: ClientOptions = {}): Client {
    return new Client(endpoint, options);
  }

  /**
   * Ends followers, waits for sessions, producers and calls underway, and closes all
   * connections. A failure meanwhile is reported by the call that it concerns.
   */
  async close(): Promise<void> {
    await Promise.allSettled([...this.#open].map((each) => each.close()));
    // A call between two attempts has no stream that the connections would wait for.
    await Promise.allSettled(this.#calls);
    this.#shared?.close();
    await this.#nodes?.close();
  }

  /** The current server, such as `http://127.0.0.1:6925`; undefined with a transport of one's own. */
  get endpoint(): string | undefined {
    return this.#nodes?.current;
  }

  /** The last failure of TLS, unless a server has answered since. Calls repeat such failures silently within their deadline. */
  get tlsFailure(): WaldError | undefined {
    const problem = this.#nodes?.tlsProblem;
    return problem === undefined ? undefined : tlsError(problem);
  }

  /** Appends one record. */
  async append(log: string, record: RecordInput, options: AppendOptions = {}): Promise<Ack> {
    const request = {
      log,
      record: protoRecord(record),
      condition: protoCondition(options),
      durability: protoDurability(options.durability),
    };
    const repeat = guards(options) ? "GUARDED" : "HARMFUL";
    const answer = await this.#write(repeat, options, (attempt) => this.#appends.append(request, attempt));
    return jsonSafe({
      lsn: answer.lsn ?? missing("WRITE", "AppendResponse.lsn"),
      timestampUs: answer.timestampUs,
      durableLsn: answer.durableLsn,
      replicatedLsn: answer.replicatedLsn,
      durability: durability(answer.durability),
      deduplicated: answer.deduplicated,
      position: answer.position,
      recoveryEpoch: answer.recoveryEpoch,
      logId: answer.logId,
    });
  }

  /** Appends to one or more logs, all or nothing; may move cursors in the same step. */
  async appendBatch(batch: BatchInput, options: CallOptions = {}): Promise<BatchAck> {
    const request = protoBatch(batch);
    const repeat = batchGuards(batch) ? "GUARDED" : "HARMFUL";
    return batchAck(await this.#write(repeat, options, (attempt) => this.#appends.appendBatch(request, attempt)));
  }

  /** Opens a stream of pipelined appends. */
  session(options: SessionOptions = {}): Session {
    return this.#opened(
      new Session({
        ...options,
        open: (requests, attempt) => this.#wal.appendSession(requests, attempt),
        onClose: (session) => this.#open.delete(session),
      }),
    );
  }

  /**
   * Opens an exactly-once producer of a log. Creates the log if there is none, to learn its
   * number: the producer never appends to another log of the same name.
   *
   * It is exactly-once until the program ends; {@link durableProducer} also is over restarts of the program.
   */
  async producer(log: string, options: ProducerOptions & CallOptions = {}): Promise<Producer> {
    return this.#opened(await this.#producer(log, options, true, (producer) => this.#open.delete(producer)));
  }

  /**
   * Opens an exactly-once producer of a log whose state is in a file or a database: the producer of that state continues,
   * and sends its batches without a known ack again. If there is no state yet, a new producer begins, as {@link producer}.
   *
   * @throws WaldError as {@link producer}; of kind STATE if the state cannot be read or saved, belongs to another log, or is not
   * the state of a producer.
   */
  durableProducer(log: string, options: DurableProducerOptions & CallOptions): Promise<DurableProducer> {
    return DurableProducer.open({
      log,
      options,
      produce: (settings, onClose) => this.#producer(log, settings, false, onClose),
      onOpen: (producer) => this.#open.add(producer),
      onClose: (producer) => this.#open.delete(producer),
    });
  }

  /** Reads a page of one log. */
  async read(log: string, options: ReadOptions = {}): Promise<Page> {
    const { waitMs = 0, timeoutMs = this.#timeoutMs } = options;
    const request = {
      log,
      start: protoStart(options),
      maxRecords: options.maxRecords ?? 0,
      maxBytes: options.maxBytes ?? 0,
      visibility: protoVisibility(options.visibility),
      anyNode: options.anyNode ?? false,
      ...(waitMs > 0 && { wait: durationFromMs(waitMs) }),
      ...logIdOf(options),
    };
    const patient = { ...options, timeoutMs: timeoutMs + waitMs };
    const answer = await this.#read(patient, (attempt) => this.#wal.read(request, attempt));
    return jsonSafe({
      records: answer.batch === undefined ? [] : storedBatch(answer.batch).records,
      nextLsn: answer.nextLsn ?? missing("READ", "ReadResponse.next_lsn"),
      tailLsn: answer.tailLsn ?? missing("READ", "ReadResponse.tail_lsn"),
      durableLsn: answer.durableLsn,
      replicatedLsn: answer.replicatedLsn,
      firstLsn: answer.firstLsn,
      recoveryEpoch: answer.recoveryEpoch,
    });
  }

  /** Scans the records that exist now. */
  scan(selector: Selector, options: ScanOptions = {}): Follower {
    return this.#scan(selector, options, false);
  }

  /**
   * Scans existing records, and then records that are appended later, without end. Resumes by
   * its cursor after a lost connection: no record comes twice, none is skipped.
   */
  follow(selector: Selector, options: ScanOptions = {}): Follower {
    return this.#scan(selector, options, true);
  }

  /**
   * Follows logs with effects and cursor in a file or a database. Begins behind the cursor of the state, or, if there is
   * no state yet, as {@link follow}.
   *
   * @throws WaldError of kind STATE if the state cannot be read, or is not the state of a follower.
   */
  durableFollower(selector: Selector, options: DurableFollowerOptions): Promise<DurableFollower> {
    return DurableFollower.open(options, (settings) => this.follow(selector, settings));
  }

  /**
   * The tail of a log; with `recoveryEpoch` of an earlier answer, also the end of that epoch's
   * survivors.
   */
  async tail(
    log: string,
    options: CallOptions & { visibility?: Visibility; recoveryEpoch?: bigint; logId?: bigint } = {},
  ): Promise<Tail> {
    const { recoveryEpoch } = options;
    const request = {
      log,
      visibility: protoVisibility(options.visibility),
      ...(recoveryEpoch !== undefined && { recoveryEpoch }),
      ...logIdOf(options),
    };
    const answer = await this.#read(options, (attempt) => this.#wal.getTail(request, attempt));
    return jsonSafe({
      firstLsn: answer.firstLsn ?? missing("READ", "GetTailResponse.first_lsn"),
      tailLsn: answer.tailLsn ?? missing("READ", "GetTailResponse.tail_lsn"),
      durableLsn: answer.durableLsn ?? missing("READ", "GetTailResponse.durable_lsn"),
      replicatedLsn: answer.replicatedLsn,
      writerEpoch: answer.writerEpoch ?? 0n,
      recoveryEpoch: answer.recoveryEpoch,
      logId: answer.logId,
      survivedPosition: answer.survivedPosition,
    });
  }

  /** Shuts out older writers, durably, and tells the tail that none of them can pass. */
  async fence(
    log: string,
    options: CallOptions & { writerEpoch?: bigint; logId?: bigint } = {},
  ): Promise<{ tailLsn: bigint; writerEpoch: bigint; logId: bigint } & JsonSafe> {
    const { writerEpoch } = options;
    const request = { log, ...(writerEpoch !== undefined && { writerEpoch }), ...logIdOf(options) };
    // A repeat raises the epoch twice; the caller still holds the newest. But without its
    // number, the log could have been deleted and created again in between.
    const unguarded = options.logId === undefined ? "HARMFUL" : "HARMLESS";
    const repeat = writerEpoch === undefined ? unguarded : "GUARDED";
    const answer = await this.#write(repeat, options, (attempt) => this.#wal.fence(request, attempt));
    return jsonSafe({
      tailLsn: answer.tailLsn ?? missing("WRITE", "FenceResponse.tail_lsn"),
      writerEpoch: answer.writerEpoch ?? missing("WRITE", "FenceResponse.writer_epoch"),
      logId: answer.logId,
    });
  }

  /** Forgets the records below an lsn, durably, and tells the first lsn kept. */
  async trim(log: string, beforeLsn: bigint, options: CallOptions & { logId?: bigint } = {}): Promise<bigint> {
    const request = { log, beforeLsn, ...logIdOf(options) };
    // Without its number, the log could have been deleted and created again in between.
    const repeat = options.logId === undefined ? "HARMFUL" : "HARMLESS";
    const answer = await this.#write(repeat, options, (attempt) => this.#wal.trim(request, attempt));
    return answer.firstLsn ?? missing("WRITE", "TrimResponse.first_lsn");
  }

  /** A barrier: everything accepted before it, in one log or in all, is flushed to the device (or handed to the OS). */
  async sync(options: CallOptions & { log?: string; target?: "OS" | "DEVICE" } = {}): Promise<void> {
    const request = { log: options.log ?? "", target: SyncTarget[options.target ?? "UNSPECIFIED"] };
    await this.#call("HARMLESS", "WRITE", options, (attempt) => this.#wal.sync(request, attempt));
  }

  /** Makes a log. */
  async createLog(log: string, config?: LogConfigInput, options: CallOptions = {}): Promise<Log> {
    const request = { log, ...(config && { config }) };
    const answer = await this.#write("HARMFUL", options, (attempt) => this.#logs.createLog(request, attempt));
    return answer.log ?? missing("WRITE", "CreateLogResponse.log");
  }

  /** One log: its configuration and where it stands. */
  async getLog(log: string, options: CallOptions = {}): Promise<Log> {
    const answer = await this.#read(options, (attempt) => this.#logs.getLog({ log }, attempt));
    return answer.log ?? missing("READ", "GetLogResponse.log");
  }

  /** Logs by name, in byte order. */
  async *listLogs(options: CallOptions & { prefix?: string } = {}): AsyncGenerator<Log, void> {
    const { prefix = "" } = options;
    let pageToken = "";
    do {
      const request = { prefix, pageToken };
      const page = await this.#read(options, (attempt) => this.#logs.listLogs(request, attempt));
      yield* page.logs;
      pageToken = page.nextPageToken;
    } while (pageToken !== "");
  }

  /**
   * Changes the configuration of a log, durably: the fields that `paths` name, such as `syncMode` or
   * `retention.maxAge`, in the contract's spelling or this; none: all that are set in `config`.
   */
  async updateLog(
    log: string,
    config: LogConfigInput,
    options: CallOptions & { paths?: readonly string[] } = {},
  ): Promise<Log> {
    const paths = (options.paths ?? []).map((path) => path.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`));
    const request = { log, config, updateMask: { paths } };
    const answer = await this.#call("HARMLESS", "WRITE", options, (attempt) => this.#logs.updateLog(request, attempt));
    return answer.log ?? missing("WRITE", "UpdateLogResponse.log");
  }

  /** The producers of a log, by id. */
  async *listProducers(
    log: string,
    options: CallOptions & { logId?: bigint; pageSize?: number } = {},
  ): AsyncGenerator<LogProducer, void> {
    const { pageSize = 0 } = options;
    let pageToken = "";
    do {
      const request = { log, pageSize, pageToken, ...logIdOf(options) };
      const page = await this.#read(options, (attempt) => this.#logs.listProducers(request, attempt));
      yield* page.producers;
      pageToken = page.nextPageToken;
    } while (pageToken !== "");
  }

  /**
   * Forgets a producer, durably, which makes room for another one. Its epoch is over: later batches of
   * this epoch are refused with PRODUCER_EXPIRED, and are never appended twice.
   */
  async forgetProducer(log: string, id: string, options: CallOptions & { logId?: bigint } = {}): Promise<void> {
    const request = { log, producerId: id, ...logIdOf(options) };
    await this.#write("HARMFUL", options, (attempt) => this.#logs.forgetProducer(request, attempt));
  }

  /** Deletes a log, durably, with all its records, cursors and producers. */
  async deleteLog(log: string, options: CallOptions & { logId?: bigint } = {}): Promise<void> {
    const request = { log, ...logIdOf(options) };
    await this.#write("HARMFUL", options, (attempt) => this.#logs.deleteLog(request, attempt));
  }

  /**
   * Deletes a log and destroys its key, so that no copy of its records can be read: in backups, archives and snapshots, too. The
   * server needs encryption with a key for each log; without one, it answers NO_OWN_KEY and deletes nothing.
   */
  async shredLog(log: string, options: CallOptions & { logId?: bigint } = {}): Promise<void> {
    const request = { log, shred: true, ...logIdOf(options) };
    await this.#write("HARMFUL", options, (attempt) => this.#logs.deleteLog(request, attempt));
  }

  /** Moves a cursor, or makes it, durably. */
  async commitCursor(move: CursorMove, options: CallOptions = {}): Promise<Cursor> {
    const { expectedLsn, lsn } = move;
    // Without a condition, a repeat could undo the commit of another consumer in between.
    const repeat = expectedLsn !== undefined && expectedLsn !== lsn ? "GUARDED" : "HARMFUL";
    const request = { commit: move };
    const answer = await this.#write(repeat, options, (attempt) =>
      this.#cursors.commitCursor(request, attempt),
    );
    return answer.cursor ?? missing("WRITE", "CommitCursorResponse.cursor");
  }

  /** Returns the position of a cursor. */
  async getCursor(log: string, cursor: string, options: CallOptions & { logId?: bigint } = {}): Promise<Cursor> {
    const request = { log, cursor, ...logIdOf(options) };
    const answer = await this.#read(options, (attempt) => this.#cursors.getCursor(request, attempt));
    return answer.cursor ?? missing("READ", "GetCursorResponse.cursor");
  }

  /** The cursors of a log, by name. */
  async *listCursors(
    log: string,
    options: CallOptions & { logId?: bigint } = {},
  ): AsyncGenerator<Cursor, void> {
    let pageToken = "";
    do {
      const request = { log, pageToken, ...logIdOf(options) };
      const page = await this.#read(options, (attempt) => this.#cursors.listCursors(request, attempt));
      yield* page.cursors;
      pageToken = page.nextPageToken;
    } while (pageToken !== "");
  }

  /** Forgets a cursor, durably. */
  async deleteCursor(log: string, cursor: string, options: CallOptions & { logId?: bigint } = {}): Promise<void> {
    const request = { log, cursor, ...logIdOf(options) };
    await this.#write("HARMFUL", options, (attempt) => this.#cursors.deleteCursor(request, attempt));
  }

  /** Makes the log or finds it, whichever it takes. */
  async #logToProduceTo(log: string, options: CallOptions): Promise<Log> {
    const getLog = (): Promise<Log> => this.getLog(log, options);
    try {
      return await getLog();
    } catch (error) {
      if (!failedFor(error, "LOG_NOT_FOUND")) {
        throw error;
      }
    }
    // The result does not matter: the log exists then, or it does not.
    const request = { log };
    try {
      const answer = await this.#call("HARMLESS", "WRITE", options, (attempt) =>
        this.#logs.createLog(request, attempt),
      );
      return answer.log ?? missing("WRITE", "CreateLogResponse.log");
    } catch (error) {
      if (!failedFor(error, "LOG_EXISTS")) {
        throw error;
      }
    }
    return getLog();
  }

  /** A producer that is not counted as open yet. `forgets`: the server forgets an id that was drawn at random. */
  async #producer(
    log: string,
    options: ProducerOptions & CallOptions,
    forgets: boolean,
    onClose: (producer: Producer) => void,
  ): Promise<Producer> {
    const { timeoutMs, ...others } = options;
    const drawn = options.id === undefined;
    const asking = {
      timeoutMs: timeoutMs ?? this.#timeoutMs,
      ...(options.signal && { signal: options.signal }),
    };
    // Nothing to learn if all is known.
    const found = drawn || options.logId === undefined ? await this.#logToProduceTo(log, asking) : undefined;
    const logId = options.logId ?? found?.logId ?? missing("READ", "Log.log_id");
    const token = new TokenUse(this.#token);
    return new Producer({
      ...others,
      ...(drawn && { epoch: options.epoch ?? found?.firstProducerEpoch ?? 0n }),
      log,
      logId,
      forget: drawn && forgets ? (id) => this.forgetProducer(log, id, { timeoutMs: 1_000, logId }) : undefined,
      open: (requests, attempt) => this.#wal.appendSession(requests, { ...attempt, ...token.headers() }),
      policy: this.#policy,
      token,
      onClose,
    });
  }

  #scan(selector: Selector, options: ScanOptions, follow: boolean): Follower {
    const pinned = {
      ...(options.visibility && { visibility: options.visibility }),
      ...logIdOf(options),
    };
    return this.#opened(
      new Follower({
        selector,
        options,
        follow,
        open: (request, attempt) => this.#wal.scan(request, attempt),
        tail: (log, signal) => this.tail(log, { ...pinned, signal }),
        policy: this.#policy,
        token: new TokenUse(this.#token),
        timeoutMs: this.#timeoutMs,
        silenceTimeoutMs: this.#silenceTimeoutMs,
        onClose: (follower) => this.#open.delete(follower),
      }),
    );
  }

  #opened<T extends { close(): Promise<void> }>(opened: T): T {
    this.#open.add(opened);
    return opened;
  }

  #read<A>(options: CallOptions, send: (attempt: Attempt) => Promise<A>): Promise<A> {
    return this.#call("HARMLESS", "READ", options, send);
  }

  #write<A>(repeat: Repeat, options: CallOptions, send: (attempt: Attempt) => Promise<A>): Promise<A> {
    return this.#call(repeat, "WRITE", options, send);
  }

  #call<A>(
    repeat: Repeat,
    access: Access,
    { timeoutMs = this.#timeoutMs, signal }: CallOptions,
    send: (attempt: Attempt) => Promise<A>,
  ): Promise<A> {
    const token = new TokenUse(this.#token);
    const answer = call({ policy: this.#policy, repeat, access, timeoutMs, signal, token }, send);
    const forget = (): void => void this.#calls.delete(answer);
    this.#calls.add(answer);
    answer.then(forget, forget);
    return answer;
  }
}

/** The settings of the environment, and options that come before them. */
function withEnvironment(options: ClientOptions): ClientOptions {
  const from = (name: string): string | undefined => process.env[name] || undefined;
  const found: { [Name in keyof ClientOptions]: ClientOptions[Name] | undefined } = {
    tlsCa: from("WALD_TLS_CA"),
    tlsCert: from("WALD_TLS_CERT"),
    tlsKey: from("WALD_TLS_KEY"),
    serverName: from("WALD_TLS_SERVER_NAME"),
  };
  if (options.token === undefined && options.tokenFile === undefined) {
    found.tokenFile = from("WALD_TOKEN_FILE");
    found.token = found.tokenFile === undefined ? from("WALD_TOKEN") : undefined;
  }
  const given = Object.fromEntries(Object.entries(found).filter(([, value]) => value !== undefined));
  return { ...given, ...options };
}

function logIdOf({ logId }: { logId?: bigint }): { logId?: bigint } {
  return logId === undefined ? {} : { logId };
}

/** The settings of TLS; undefined: plaintext, or a transport of one's own. */
function tlsFiles(authority: string, options: ClientOptions): TlsFiles | undefined {
  const { tlsCa, tlsCert, tlsKey, serverName } = options;
  const given = [tlsCa, tlsCert, tlsKey, serverName].some((setting) => setting !== undefined);
  const { protocol } = new URL(authority);
  if (given && options.transport !== undefined) {
    throw usageError("a transport of one's own excludes settings of TLS");
  }
  if (given && protocol !== "https:") {
    throw usageError("with settings of TLS the endpoint must begin with https://");
  }
  if (protocol !== "https:" || options.transport !== undefined) {
    return undefined;
  }
  try {
    return new TlsFiles(options);
  } catch (thrown) {
    throw thrown instanceof TlsProblem ? tlsError(thrown) : thrown;
  }
}

/** The token; it must not cross plaintext to another machine. */
function tokenSource(authorities: readonly string[], options: ClientOptions): TokenSource | undefined {
  if (options.token === undefined && options.tokenFile === undefined) {
    return undefined;
  }
  if (options.transport !== undefined && !options.allowInsecureToken) {
    throw tokenError("whether a transport of one's own is encrypted is not known: set allowInsecureToken if it is");
  }
  for (const authority of authorities) {
    const refusal = exposing(authority, options);
    if (refusal !== undefined) {
      throw tokenError(refusal);
    }
  }
  return new TokenSource(options);
}

/** Returns the reason why a server must not get a token; undefined: it may. */
function exposing(authority: string, { allowInsecureToken }: ClientOptions): string | undefined {
  const { protocol, hostname, host } = new URL(authority);
  return protocol === "https:" || isLoopback(hostname) || allowInsecureToken
    ? undefined
    : `a token must not cross plaintext to ${host}: use https://, or allowInsecureToken`;
}
