/**
 * A scan underway, which outlives its connections.
 *
 * ```text
 *            open                    message                    lost
 *   (closed) ─────▶ (open) ─────────────────────────▶ (open) ──────────▶ (closed)
 *      ▲        begin at the start,     its events are queued,              │
 *      │        or at the last cursor   its cursor is kept                  │
 *      └───────────────────────── pause, longer each time ──────────────────┘
 * ```
 *
 * A message becomes one event with the cursor that resumes after it. The next connection thus
 * begins exactly after the last event that the caller gets, and so does a program that stored
 * the cursor.
 */
import { create } from "@bufbuild/protobuf";

import { cancelledError, failedFor, lostError, timeoutError, toWaldError, usageError, type WaldError } from "./errors.js";
import { GapReason as ProtoGapReason } from "./gen/wald/v1/types_pb.js";
import { ScanRequestSchema, type ScanRequest, type ScanResponse } from "./gen/wald/v1/wal_pb.js";
import {
  jsonSafe,
  protoStart,
  protoVisibility,
  storedBatch,
  type Batch,
  type JsonSafe,
  type Start,
  type Tail,
  type Visibility,
} from "./messages.js";
import { Backoff, sleep, timerMs, type RetryPolicy } from "./retry.js";
import type { TokenUse } from "./token.js";

/** The logs to scan: the log with this name, all logs with a prefix, or all. */
export type Selector = string | { prefix: string } | { all: true };

/** Begin and end of a scan. */
export interface ScanOptions extends Start {
  /** Exactly where a scan with the same selector and visibility stood. */
  cursor?: Uint8Array;
  /** Ends before this lsn; one log only. */
  untilLsn?: bigint;
  /** Ends after this number of records. Default, and 0: no bound. */
  maxRecords?: number | bigint;
  /** Which records to see. Default: those that the log's sync mode acks; of several logs, those that the server's acks. */
  visibility?: Visibility;
  /**
   * Any node of the store may answer from its copy, which is usually a second old, and at most twice its
   * `lease_ttl`. Implies the visibility REPLICATED. With `last` a follower begins at the tail of that copy, and fails if the
   * connection is lost before the first event.
   */
  anyNode?: boolean;
  /** The log must have this number; one log only. */
  logId?: bigint;
  /** Ends the scan. */
  signal?: AbortSignal;
  /** Called at every lost connection. The scan resumes automatically. */
  onInterrupted?: (error: WaldError) => void;
}

/** The reason why records are missing. */
export type GapReason = Exclude<keyof typeof ProtoGapReason, "UNSPECIFIED">;

/** Records that a scan does not deliver, named exactly. */
export interface Gap {
  log: string;
  /** The first missing lsn. */
  fromLsn: bigint | undefined;
  /** The lsn after the last missing one. Undefined: up to wherever the log ended. */
  toLsn: bigint | undefined;
  reason: GapReason;
}

/**
 * A piece of a scan, in order. Store its cursor in one step with its effects: after a restart of
 * the program nothing is applied twice, and nothing is skipped.
 */
export interface ScanEvent extends JsonSafe {
  /** Missing records, before the batches. */
  gaps: readonly Gap[];
  /** Records, in order. */
  batches: readonly Batch[];
  /** Whether everything that was there has been delivered. */
  caughtUp: boolean;
  /** Covers exactly the events up to and including this one: resumes after it. */
  cursor: Uint8Array;
  /** The tail; of a scan of one log that exists. */
  tailLsn: bigint | undefined;
  /** Every lsn below it is flushed to the device; of a scan of one log that exists. */
  durableLsn: bigint | undefined;
  /** Every lsn below it is in the bucket of a replica; of a scan of one log that exists. */
  replicatedLsn: bigint | undefined;
}

/** @internal */
export interface ScanSetup {
  selector: Selector;
  options: ScanOptions;
  follow: boolean;
  open: (
    request: ScanRequest,
    options: { signal: AbortSignal; onHeader: () => void; headers?: Record<string, string> },
  ) => AsyncIterable<ScanResponse>;
  tail: (log: string, signal: AbortSignal) => Promise<Tail>;
  policy: RetryPolicy;
  token: TokenUse;
  /** Maximum time of retries for a scan that did not begin. */
  timeoutMs: number;
  /** Maximum silence of a scan before it counts as lost. */
  silenceTimeoutMs: number;
  onClose: (scan: Follower) => void;
}

/**
 * Place at which the next connection begins: at the caller's start; after the last message; or
 * it is not known, and a new connection could repeat or skip records.
 */
type Place = "START" | "CURSOR" | "LOST";

/** The events of a scan, once or without end. Iterate over it once; leaving the loop closes it. */
export class Follower implements AsyncIterableIterator<ScanEvent> {
  readonly #setup: ScanSetup;
  readonly #request: ScanRequest;
  readonly #closing = new AbortController();
  #connection: { messages: AsyncIterator<ScanResponse>; abort: AbortController } | undefined;
  /** The event that is not taken yet. */
  #event: ScanEvent | undefined;
  #place: Place = "START";
  #remaining: bigint | undefined;
  /** Whether the server has taken the scan once. */
  #begun = false;
  #caughtUp = false;
  #ended = false;
  readonly #backoff: Backoff;
  /** Begin of the first failed attempt, or of the one under way. */
  #failingSince: number | undefined;
  #pauseMs = 0;
  #cursor: Uint8Array | undefined;
  /** One `next` at a time. */
  #turn: Promise<unknown> = Promise.resolve();
  readonly #cancel = (): void => void this.close();

  /** @internal */
  constructor(setup: ScanSetup) {
    this.#setup = setup;
    this.#backoff = new Backoff(setup.policy);
    const { selector, options, follow } = setup;
    const start = protoStart(options);
    if (options.cursor !== undefined && start.case !== undefined) {
      throw usageError("a cursor says where to begin; no lsn, timestampUs, time or last beside it");
    }
    this.#cursor = options.cursor;
    this.#remaining = options.maxRecords ? BigInt(options.maxRecords) : undefined;
    this.#request = create(ScanRequestSchema, {
      selector:
        typeof selector === "string"
          ? { case: "log", value: selector }
          : "prefix" in selector
            ? { case: "prefix", value: selector.prefix }
            : { case: "all", value: {} },
      start: options.cursor === undefined ? start : { case: "cursor", value: options.cursor },
      maxRecords: this.#remaining ?? 0n,
      follow,
      visibility: protoVisibility(options.visibility),
      anyNode: options.anyNode ?? false,
      ...(options.untilLsn !== undefined && { untilLsn: options.untilLsn }),
      ...(options.logId !== undefined && { logId: options.logId }),
    });
    options.signal?.addEventListener("abort", this.#cancel);
    if (options.signal?.aborted) {
      this.#cancel();
    }
  }

  /**
   * Resumes a scan with the same selector and visibility exactly after the last event that was
   * taken. Undefined before the first.
   */
  get cursor(): Uint8Array | undefined {
    return this.#cursor;
  }

  /** The next event. */
  next(): Promise<IteratorResult<ScanEvent>> {
    const turn = this.#turn.then(() => this.#next());
    this.#turn = turn.catch(() => {});
    return turn;
  }

  /** Closes the scan. */
  async return(): Promise<IteratorResult<ScanEvent>> {
    await this.close();
    return { done: true, value: undefined };
  }

  /** Closes the scan; a `next` underway says that it is done. */
  async close(): Promise<void> {
    this.#ended = true;
    this.#event = undefined;
    this.#closing.abort();
    this.#disconnect();
    this.#setup.options.signal?.removeEventListener("abort", this.#cancel);
    this.#setup.onClose(this);
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  async #next(): Promise<IteratorResult<ScanEvent>> {
    for (;;) {
      const event = this.#event;
      if (event !== undefined) {
        this.#event = undefined;
        this.#cursor = event.cursor;
        return { done: false, value: event };
      }
      if (this.#ended) {
        await this.close();
        return { done: true, value: undefined };
      }
      try {
        await (this.#connection === undefined ? this.#open() : this.#receive(this.#connection.messages));
      } catch (thrown) {
        this.#disconnect();
        if (!this.#closing.signal.aborted) {
          await this.#survive(toWaldError(thrown, "READ"));
        }
      }
    }
  }

  async #open(): Promise<void> {
    this.#failingSince ??= performance.now();
    await sleep(this.#pauseMs, this.#closing.signal);
    this.#pauseMs = 0;
    await this.#pinTailOffset();
    if (this.#ended) {
      return;
    }
    const abort = new AbortController();
    const { signal } = abort;
    const onHeader = (): void => this.#opened();
    const messages = this.#setup.open(this.#request, { signal, onHeader, ...this.#setup.token.headers() })[Symbol.asyncIterator]();
    this.#connection = { messages, abort };
  }

  /** The server has taken the scan. */
  #opened(): void {
    this.#begun = true;
    // From now on "the tail" is in the past, and only a cursor can name it.
    if (this.#place === "START" && this.#request.start.case === "tailOffset") {
      this.#place = "LOST";
    }
  }

  /**
   * Turns "n before the tail" of one log into an lsn, so that a connection lost before the
   * first message can be replaced without skipping records that arrived meanwhile. With `anyNode`
   * only the node knows the tail of its copy: the owner's tail may be above it.
   */
  async #pinTailOffset(): Promise<void> {
    const { selector, start, follow, anyNode } = this.#request;
    if (selector.case !== "log" || start.case !== "tailOffset" || !follow || anyNode) {
      return;
    }
    try {
      const { firstLsn, tailLsn } = await this.#setup.tail(selector.value, this.#closing.signal);
      const before = tailLsn > start.value ? tailLsn - start.value : 0n;
      this.#request.start = { case: "lsn", value: before > firstLsn ? before : firstLsn };
    } catch (error) {
      if (!failedFor(toWaldError(error, "READ"), "LOG_NOT_FOUND")) {
        throw error;
      }
      // All that will ever be in it is still to come.
      this.#request.start = { case: undefined };
    }
  }

  async #receive(messages: AsyncIterator<ScanResponse>): Promise<void> {
    const { silenceTimeoutMs } = this.#setup;
    let timer: NodeJS.Timeout | undefined;
    const silence = new Promise<never>((_, reject) => {
      const error = timeoutError("READ", `the scan was silent for ${silenceTimeoutMs} ms`);
      timer = setTimeout(() => reject(error), timerMs(silenceTimeoutMs));
    });
    const arriving = messages.next();
    let received;
    try {
      received = await Promise.race([arriving, silence]);
    } finally {
      clearTimeout(timer);
      arriving.catch(() => {});
    }
    if (received.done) {
      this.#end();
    } else {
      this.#deliver(received.value);
    }
  }

  /** Makes an event of a message, and keeps its cursor for the next connection. */
  #deliver(message: ScanResponse): void {
    const { caughtUp, cursor, tailLsn, durableLsn, replicatedLsn } = message;
    const gaps = message.gaps.map(({ log, fromLsn, toLsn, reason }) => ({
      log,
      fromLsn,
      toLsn,
      reason: ProtoGapReason[reason] as GapReason,
    }));
    const batches = message.batches.map(storedBatch);
    const count = message.batches.reduce((sum, { records }) => sum + BigInt(records.length), 0n);
    if (gaps.length > 0 || batches.length > 0 || (caughtUp && !this.#caughtUp)) {
      this.#event = jsonSafe({ gaps, batches, caughtUp, cursor, tailLsn, durableLsn, replicatedLsn });
    } else if (cursor.length > 0) {
      // A heartbeat, and everything before it was taken.
      this.#cursor = cursor;
    }
    this.#caughtUp = caughtUp || (this.#caughtUp && count === 0n);
    if (cursor.length > 0) {
      this.#place = "CURSOR";
      this.#request.start = { case: "cursor", value: cursor };
    } else if (gaps.length > 0 || batches.length > 0 || caughtUp) {
      this.#place = "LOST";
    }
    // Otherwise a heartbeat before the first piece: the next connection begins where this one began.
    if (this.#remaining !== undefined) {
      this.#remaining -= count;
      this.#request.maxRecords = this.#remaining;
      // Asked again it would be 0, which is: without bound.
      this.#ended = this.#remaining <= 0n;
    }
    this.#backoff.succeeded();
    this.#failingSince = undefined;
  }

  /** The server ended the stream in good order. */
  #end(): void {
    const bounded = this.#remaining !== undefined || this.#request.untilLsn !== undefined;
    if (this.#request.follow && !bounded) {
      throw lostError("READ", "the server ended the stream");
    }
    this.#ended = true;
  }

  /** Prepares the next connection, if there can be one. */
  async #survive(error: WaldError): Promise<void> {
    const { timeoutMs, options, token } = this.#setup;
    const pause = this.#backoff.failed(error);
    this.#failingSince ??= performance.now();
    // A follower that has begun has no end to its patience; the caller may have.
    const patient = this.#request.follow && this.#begun;
    const tired =
      !patient &&
      (this.#backoff.exhausted || performance.now() - this.#failingSince + pause >= timeoutMs);
    if (this.#place === "LOST" || tired || !token.allows("HARMLESS", error, patient)) {
      await this.close();
      throw error;
    }
    this.#pauseMs = pause;
    options.onInterrupted?.(error);
  }

  #disconnect(): void {
    this.#connection?.abort.abort(cancelledError("NOT_APPLIED", "closed"));
    this.#connection = undefined;
  }
}
