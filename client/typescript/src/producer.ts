/**
 * Appends to one log that are neither lost nor doubled, whatever happens to connections and
 * to the server.
 *
 * ```text
 *             first batch                    lost, or refused for now
 *   (no call) ────────────▶ (call) ─────────────────────────────────▶ (no call)
 *       ▲       everything unacked is sent         │        pause, longer each time
 *       │       again, in order, with the          │ refused for good, or no ack for too long
 *       │       sequences it had                   ▼
 *       └────────────────────────────────── (failed: everything unacked)
 * ```
 *
 * The server recognises a batch by the producer's id, epoch and sequence, and answers a repeat
 * with the original's ack. A batch may therefore be sent again, whether or not it was applied.
 */
import { randomUUID } from "node:crypto";

import { AppendStream, failedRequest, type OpenSession, type ProtoBatch } from "./append-stream.js";
import { cancelledError, earlierFailed, SilentStream, timeoutError, usageError, type WaldError } from "./errors.js";
import { AppendBatchRequestSchema } from "./gen/wald/v1/wal_pb.js";
import {
  jsonSafe,
  missing,
  owned,
  protoCondition,
  protoDurability,
  protoRecord,
  type Durability,
  type JsonSafe,
  type RecordInit,
  type RecordInput,
} from "./messages.js";
import { Backoff, timerMs, type RetryPolicy } from "./retry.js";
import type { TokenUse } from "./token.js";
import type { Sent } from "./session.js";
import { Window } from "./window.js";

/** Settings of a {@link Producer}. */
export interface ProducerOptions {
  /**
   * Name of the source. Default: drawn at random, which is exactly-once for as long as this
   * object lives; `close` makes the server forget it. For restarts of the program take a {@link DurableProducer}.
   */
  id?: string;
  /**
   * Incarnation of the source; a higher one shuts out the lower ones, counts from 0 again and
   * recognises no batch of theirs. Default: 0, the first; with a random id, the lowest that the log takes.
   */
  epoch?: bigint;
  /**
   * Sequence of the first batch. Default: 0. {@link DurableProducer} keeps it over restarts of the program. A program
   * that keeps it itself gives the sequence after the last batch whose ack it has stored, and sends the same records as
   * before. The server recognises only the last 1,024 batches (PRODUCER_EXPIRED).
   */
  firstSequence?: bigint;
  /** The log must have this number, or LOG_REPLACED. Default: the one that it has when the producer is opened. */
  logId?: bigint;
  /** The writer epoch that batches carry unless they name one; required once the log was fenced. */
  writerEpoch?: bigint;
  /** Durability that batches must reach before the ack. Default: set by the log's sync mode. */
  durability?: Durability;
  /** Bytes underway before `send` waits. Default: 8 MiB. */
  windowBytes?: number;
  /** Batches underway before the next ones wait for acks. Default: 512; at most 1,024, because the server knows no more of them. */
  windowBatches?: number;
  /**
   * Maximum time without an ack before everything unacked fails. Default: 60 s. A session that brings no ack for half of it is
   * given up, and its batches are sent again on another one.
   */
  retryTimeoutMs?: number;
  /** Waits so long for more records to go in the same batch. Default: not at all, each `send` is a batch. */
  lingerMs?: number;
  /** Records in such a batch at most. Default: 1,000. */
  maxBatchRecords?: number;
  /** Bytes of such a batch at most. Default: 1 MiB. */
  maxBatchBytes?: number;
  /** Gives the producer up; batches that are not acked by then have an unknown outcome. */
  signal?: AbortSignal;
}

/** Conditions of one batch, in addition to the producer's own. */
export interface ProduceOptions {
  /** The lsn that its first record must get. */
  expectedLsn?: bigint;
  /** Equals the log's writer epoch. Default: the producer's. */
  writerEpoch?: bigint;
}

/** Records were appended, once. */
export interface ProducerAck extends JsonSafe {
  /** The lsn of the first record. */
  firstLsn: bigint;
  /** The lsn after the last record. */
  nextLsn: bigint;
  /** The sequence of the batch that they were in. */
  sequence: bigint;
  /** The server had the batch already. */
  deduplicated: boolean;
  /** Every lsn of the log below it is flushed to the device. */
  durableLsn: bigint | undefined;
  /** Every lsn of the log below it is in the bucket of a replica; undefined without a replica. */
  replicatedLsn: bigint | undefined;
}

/** The records of one `send`. */
interface Part {
  records: readonly RecordInit[];
  bytes: number;
  resolve: (ack: ProducerAck) => void;
  reject: (error: WaldError) => void;
}

/** One batch that is not acked. */
interface Entry {
  sequence: bigint;
  batch: ProtoBatch;
  parts: Part[];
  /** A call that carried it ended without reporting its outcome. */
  unknown: boolean;
}

/** Number of newest batches of a producer whose repeats the server recognises. */
const RECOGNISED_BATCHES = 1_024;

/** Time that `close` waits for the server to end the session, in milliseconds. */
const SESSION_END_MS = 1_000;

/** Defaults of a producer. */
export const PRODUCER_DEFAULTS = {
  windowBytes: 8 << 20,
  windowBatches: 512,
  retryTimeoutMs: 60_000,
  lingerMs: 0,
  maxBatchRecords: 1_000,
  maxBatchBytes: 1 << 20,
} as const;

/** @internal */
export interface ProducerSetup extends ProducerOptions {
  log: string;
  logId: bigint;
  /** Makes the server forget the id, if it was drawn at random. */
  forget?: ((id: string) => Promise<void>) | undefined;
  open: OpenSession;
  policy: RetryPolicy;
  token: TokenUse;
  onClose: (producer: Producer) => void;
}

/**
 * An exactly-once source of appends to one log. It is bound to the log that exists when it is
 * opened: if that is deleted, it fails, and never writes to a new log of the same name.
 *
 * After a restart, the program does not know the outcome of batches without an ack. {@link DurableProducer} does.
 */
export class Producer {
  /** The log's name. */
  readonly log: string;
  /** The log's number. */
  readonly logId: bigint;
  /** Name of the source. */
  readonly id: string;
  /** Incarnation of the source. */
  readonly epoch: bigint;
  readonly #setup: ProducerSetup;
  readonly #window: Window;
  #nextSequence: bigint;
  /** Batches that are not acked, in order of their sequences. */
  readonly #entries: Entry[] = [];
  /** Number of batches that were given to the stream. */
  #underway = 0;
  /** Records that linger for more. */
  #lingering: Part[] = [];
  #lingeringRecords = 0;
  #lingeringBytes = 0;
  #lingerTimer: NodeJS.Timeout | undefined;
  /** Sends go out in the order of their calls. */
  #sending: Promise<unknown> = Promise.resolve();
  #stream: AppendStream | undefined;
  #pauseTimer: NodeJS.Timeout | undefined;
  /** Runs while a batch is not acked; each ack restarts it. */
  #patience: NodeJS.Timeout | undefined;
  /** Runs while a batch on the stream is not acked; each ack, and each stream, restarts it. */
  #silence: NodeJS.Timeout | undefined;
  readonly #backoff: Backoff;
  #lastFailure: WaldError | undefined;
  #fatal: WaldError | undefined;
  #closed = false;
  /** Callers of `flush`, and the sequence of the first batch that each does not wait for. */
  #flushes: { until: bigint; wake: () => void }[] = [];
  readonly #cancel = (): void => this.#fail(cancelledError("UNKNOWN", this.#setup.signal?.reason));

  /** @internal */
  constructor(setup: ProducerSetup) {
    const { windowBatches = PRODUCER_DEFAULTS.windowBatches } = setup;
    if (!(windowBatches >= 1 && windowBatches <= RECOGNISED_BATCHES)) {
      throw usageError(`${windowBatches} batches in flight: between 1 and ${RECOGNISED_BATCHES} can be`);
    }
    this.log = setup.log;
    this.logId = setup.logId;
    this.id = setup.id ?? randomUUID();
    this.epoch = setup.epoch ?? 0n;
    this.#setup = setup;
    this.#backoff = new Backoff(setup.policy);
    this.#nextSequence = setup.firstSequence ?? 0n;
    this.#window = new Window(setup.windowBytes ?? PRODUCER_DEFAULTS.windowBytes);
    // Every batch has these settings. If one fits no field, no batch can be sent.
    owned(AppendBatchRequestSchema, this.#request([], {}, this.#nextSequence).batch);
    setup.signal?.addEventListener("abort", this.#cancel);
    if (setup.signal?.aborted) {
      this.#cancel();
    }
  }

  /** The sequence of the next batch. */
  get nextSequence(): bigint {
    return this.#nextSequence;
  }

  /**
   * Appends records as one batch, and waits for the ack.
   *
   * @throws WaldError if it cannot be appended, or no ack came within `retryTimeoutMs`. The
   * producer has failed then, and its later batches too: open a new one.
   */
  async append(records: RecordInput | readonly RecordInput[], options: ProduceOptions = {}): Promise<ProducerAck> {
    const { ack } = await this.send(records, options);
    return ack;
  }

  /**
   * Sends records as one batch once there is room for it in the window, and tells how to wait for the ack. The call copies
   * the records, so the caller may use its buffers again at once.
   *
   * @throws WaldError if the producer has failed; the batch was not sent. Its kind is USAGE if a value fits no field; the producer goes on then.
   */
  async send(
    records: RecordInput | readonly RecordInput[],
    options: ProduceOptions = {},
  ): Promise<Sent<ProducerAck>> {
    const list = Array.isArray(records) ? (records as readonly RecordInput[]) : [records as RecordInput];
    const { batch } = this.#request(list.map(protoRecord), options, this.#nextSequence);
    const { message, bytes } = owned(AppendBatchRequestSchema, batch);
    return this.sendProto(message.batches[0]?.records ?? [], bytes, { ...options });
  }

  /** @internal Sends records in the contract's form, which take about this number of bytes. */
  async sendProto(
    records: readonly RecordInit[],
    bytes: number,
    options: ProduceOptions = {},
  ): Promise<Sent<ProducerAck>> {
    if (this.#closed) {
      throw usageError("the producer is closed");
    }
    const sent = this.#sending.then(async () => {
      this.#check();
      await this.#window.enter(bytes);
      if (this.#fatal !== undefined) {
        this.#window.leave(bytes);
      }
      this.#check();
      const ack = new Promise<ProducerAck>((resolve, reject) => {
        this.#accept({ records, bytes, resolve, reject }, options);
      });
      ack.catch(() => {});
      return { ack };
    });
    this.#sending = sent.catch(() => {});
    return sent;
  }

  /**
   * Waits until everything sent so far is acked. Batches that are sent later may still be on their way then.
   *
   * @throws WaldError if the producer has failed.
   */
  async flush(): Promise<void> {
    await this.#sending;
    this.#emit();
    const until = this.#nextSequence;
    if (this.#firstUnacked < until) {
      await new Promise<void>((wake) => this.#flushes.push({ until, wake }));
    }
    if (this.#fatal !== undefined) {
      throw this.#fatal;
    }
  }

  /** Takes no more, and waits until everything sent is acked. The server forgets an id that was drawn at random. */
  async close(): Promise<void> {
    const wasOpen = !this.#closed;
    this.#closed = true;
    try {
      await this.flush();
    } finally {
      const stream = this.#stream;
      if (stream !== undefined) {
        // There is nothing underway, so that it ends at once.
        stream.end();
        const timer = setTimeout(() => stream.abort("the server does not end the session"), SESSION_END_MS);
        await stream.ended;
        clearTimeout(timer);
      }
      this.#forget();
    }
    if (wasOpen && this.#nextSequence > 0n) {
      // If it fails, the server forgets the id once it has been idle for long enough.
      await this.#setup.forget?.(this.id).catch(() => {});
    }
  }

  /** @internal Fails everything that is not acked with this error, unless the producer has failed already. */
  giveUp(error: WaldError): void {
    this.#fail(error);
  }

  #check(): void {
    if (this.#fatal !== undefined) {
      throw earlierFailed(this.#fatal, "NOT_APPLIED");
    }
  }

  #accept(part: Part, options: ProduceOptions): void {
    const {
      lingerMs = PRODUCER_DEFAULTS.lingerMs,
      maxBatchRecords = PRODUCER_DEFAULTS.maxBatchRecords,
      maxBatchBytes = PRODUCER_DEFAULTS.maxBatchBytes,
    } = this.#setup;
    const conditional = options.expectedLsn !== undefined || options.writerEpoch !== undefined;
    const full =
      this.#lingeringRecords + part.records.length > maxBatchRecords ||
      this.#lingeringBytes + part.bytes > maxBatchBytes;
    if (full || conditional) {
      this.#emit();
    }
    this.#lingering.push(part);
    this.#lingeringRecords += part.records.length;
    this.#lingeringBytes += part.bytes;
    if (lingerMs === 0 || conditional) {
      this.#emit(options);
    } else {
      this.#lingerTimer ??= setTimeout(() => this.#emit(), timerMs(lingerMs));
    }
  }

  /** Makes a batch of the lingering records, and sends it. */
  #emit(options: ProduceOptions = {}): void {
    clearTimeout(this.#lingerTimer);
    this.#lingerTimer = undefined;
    const parts = this.#lingering;
    if (parts.length === 0) {
      return;
    }
    this.#lingering = [];
    this.#lingeringRecords = 0;
    this.#lingeringBytes = 0;
    const records = parts.flatMap((part) => part.records);
    this.#entries.push({ ...this.#request(records, options, this.#nextSequence++), parts, unknown: false });
    this.#patience ??= this.#wait();
    if (this.#stream === undefined && this.#pauseTimer === undefined) {
      this.#connect();
    } else {
      this.#pump();
      this.#silence ??= this.#listen();
    }
  }

  /** The request of one batch, and its sequence. */
  #request(records: readonly RecordInit[], options: ProduceOptions, sequence: bigint): Pick<Entry, "sequence" | "batch"> {
    const { durability } = this.#setup;
    const writerEpoch = options.writerEpoch ?? this.#setup.writerEpoch;
    const condition = protoCondition({
      logId: this.logId,
      producer: { id: this.id, epoch: this.epoch, sequence },
      ...(options.expectedLsn !== undefined && { expectedLsn: options.expectedLsn }),
      ...(writerEpoch !== undefined && { writerEpoch }),
    });
    const batches = [{ log: this.log, records: [...records], condition }];
    return { sequence, batch: { batches, durability: protoDurability(durability) } };
  }

  /** Gives batches to the stream, as many as may be underway. */
  #pump(): void {
    const { windowBatches = PRODUCER_DEFAULTS.windowBatches } = this.#setup;
    for (; this.#underway < windowBatches; this.#underway++) {
      const next = this.#entries[this.#underway];
      if (this.#stream === undefined || next === undefined) {
        break;
      }
      this.#stream.push(next.batch);
    }
  }

  /** Sends everything that is not acked, in order. */
  #connect(): void {
    const stream = new AppendStream(this.#setup.open, (answer) => {
      const append = answer.appends[0] ?? missing("WRITE", "AppendBatchResponse.appends");
      let lsn = append.firstLsn ?? missing("WRITE", "LogAppend.first_lsn");
      const entry = this.#entries.shift();
      if (entry === undefined) {
        return;
      }
      this.#underway--;
      this.#backoff.succeeded();
      this.#lastFailure = undefined;
      clearTimeout(this.#patience);
      this.#patience = this.#entries.length > 0 ? this.#wait() : undefined;
      clearTimeout(this.#silence);
      this.#silence = this.#listen();
      const { sequence, parts } = entry;
      const { deduplicated, durableLsn, replicatedLsn } = append;
      for (const part of parts) {
        const firstLsn = lsn;
        lsn += BigInt(part.records.length);
        this.#window.leave(part.bytes);
        part.resolve(jsonSafe({ firstLsn, nextLsn: lsn, sequence, deduplicated, durableLsn, replicatedLsn }));
      }
      this.#pump();
      this.#wakeFlushes();
    });
    this.#stream = stream;
    this.#underway = 0;
    this.#pump();
    this.#silence = this.#listen();
    void stream.ended.then((error) => this.#ended(stream, error));
  }

  #ended(stream: AppendStream, error: WaldError | undefined): void {
    if (this.#stream !== stream) {
      return;
    }
    this.#stream = undefined;
    clearTimeout(this.#silence);
    this.#silence = undefined;
    if (error === undefined || this.#entries.length === 0) {
      return;
    }
    if (!this.#setup.token.allows("GUARDED", error, true)) {
      this.#fail(error, stream);
      return;
    }
    this.#note(error, stream);
    this.#lastFailure = error;
    this.#pauseTimer = setTimeout(() => {
      this.#pauseTimer = undefined;
      this.#connect();
    }, timerMs(this.#backoff.failed(error)));
  }

  /** Keeps in mind which batches may have been applied without an ack. */
  #note(error: WaldError, stream: AppendStream | undefined): void {
    if (stream === undefined || error.outcome !== "UNKNOWN") {
      return;
    }
    const acked = stream.acked;
    this.#entries.forEach((entry, index) => (entry.unknown ||= acked + index < stream.sent));
  }

  #wait(): NodeJS.Timeout {
    const { retryTimeoutMs = PRODUCER_DEFAULTS.retryTimeoutMs } = this.#setup;
    return setTimeout(() => {
      const why = this.#lastFailure === undefined ? "" : `: ${this.#lastFailure.message}`;
      this.#fail(timeoutError("WRITE", `no ack within ${retryTimeoutMs} ms${why}`));
    }, timerMs(retryTimeoutMs));
  }

  /**
   * Gives the stream up after half of the patience without an ack: a proxy may have lost the server behind it. Another stream
   * then needs time, too. Not much less than half: batches that are sent again count against the rate of a tenant again.
   */
  #listen(): NodeJS.Timeout | undefined {
    const stream = this.#stream;
    if (stream === undefined || this.#entries.length === 0) {
      return undefined;
    }
    const { retryTimeoutMs = PRODUCER_DEFAULTS.retryTimeoutMs } = this.#setup;
    const silentMs = retryTimeoutMs / 2;
    return setTimeout(() => stream.abort(new SilentStream(`no ack within ${silentMs} ms`)), timerMs(silentMs));
  }

  /** Fails everything that is not acked: a later batch cannot be applied without the ones before it. */
  #fail(error: WaldError, ended?: AppendStream): void {
    if (this.#fatal !== undefined) {
      return;
    }
    const stream = ended ?? this.#stream;
    this.#fatal = error;
    this.#note(error, stream);
    clearTimeout(this.#patience);
    clearTimeout(this.#silence);
    clearTimeout(this.#pauseTimer);
    clearTimeout(this.#lingerTimer);
    this.#stream = undefined;
    stream?.abort(error);
    const named = stream && failedRequest(error);
    this.#entries.splice(0).forEach(({ parts, unknown }, index) => {
      const outcome = unknown ? "UNKNOWN" : "NOT_APPLIED";
      // An error that names no request is about all of them.
      const own = named === undefined || index === named - (stream?.acked ?? 0);
      this.#reject(parts, own ? error.of(outcome) : earlierFailed(error, outcome));
    });
    this.#reject(this.#lingering.splice(0), earlierFailed(error, "NOT_APPLIED"));
    this.#wakeFlushes();
    this.#forget();
  }

  #forget(): void {
    this.#setup.signal?.removeEventListener("abort", this.#cancel);
    this.#setup.onClose(this);
  }

  #reject(parts: Part[], error: WaldError): void {
    for (const part of parts) {
      this.#window.leave(part.bytes);
      part.reject(error);
    }
  }

  /** The sequence of the first batch that is not acked. */
  get #firstUnacked(): bigint {
    return this.#entries[0]?.sequence ?? this.#nextSequence;
  }

  #wakeFlushes(): void {
    // The first of these callers waits for the fewest batches.
    for (let first; (first = this.#flushes[0]) !== undefined && first.until <= this.#firstUnacked; ) {
      this.#flushes.shift();
      first.wake();
    }
  }
}
