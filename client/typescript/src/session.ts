/** Pipelined appends on one stream: sent without waiting, acked in order. */
import { AppendStream, failedRequest, type OpenSession } from "./append-stream.js";
import { cancelledError, earlierFailed, usageError, type WaldError } from "./errors.js";
import { AppendBatchRequestSchema } from "./gen/wald/v1/wal_pb.js";
import { batchAck, owned, protoBatch, type BatchAck, type BatchInput } from "./messages.js";
import { Window } from "./window.js";

/** Settings of a {@link Session}. */
export interface SessionOptions {
  /** Bytes underway before `send` waits. Default: 4 MiB. One batch may always go. */
  windowBytes?: number;
  /** Gives the session up; batches that are not acked by then have an unknown outcome. */
  signal?: AbortSignal;
}

/** A batch that is on its way. */
export interface Sent<A> {
  /** Settles when it is acked, or has failed. May be left alone: `close` tells of failures too. */
  ack: Promise<A>;
}

/** @internal */
export interface SessionSetup extends SessionOptions {
  open: OpenSession;
  onClose: (session: Session) => void;
}

interface Entry {
  bytes: number;
  resolve: (ack: BatchAck) => void;
  reject: (error: WaldError) => void;
}

/**
 * Batches are applied and acked in the order of `send`. The first failure ends the session:
 * earlier acked batches are applied, the failing batch gets its error, and later batches were
 * not applied (if the outcome of the failure is unknown, a prefix of them may be).
 *
 * Nothing is sent twice. For that, use a {@link Producer}.
 */
export class Session {
  readonly #stream: AppendStream;
  readonly #window: Window;
  readonly #entries: Entry[] = [];
  readonly #done: Promise<void>;
  /** Sends go out in the order of their calls. */
  #sending: Promise<unknown> = Promise.resolve();
  #closed = false;
  #failure: WaldError | undefined;

  /** @internal */
  constructor(setup: SessionSetup) {
    const { signal, open } = setup;
    this.#window = new Window(setup.windowBytes ?? 4 << 20);
    this.#stream = new AppendStream(open, (answer) => {
      const entry = this.#entries.shift();
      if (entry !== undefined) {
        this.#window.leave(entry.bytes);
        entry.resolve(batchAck(answer));
      }
    });
    const cancel = (): void => this.#stream.abort(signal?.reason);
    signal?.addEventListener("abort", cancel);
    this.#done = this.#stream.ended.then((error) => {
      signal?.removeEventListener("abort", cancel);
      setup.onClose(this);
      if (error !== undefined) {
        this.#fail(error);
        throw error;
      }
    });
    this.#done.catch(() => {});
    if (signal?.aborted) {
      cancel();
    }
  }

  /**
   * Sends a batch once there is room for it in the window. Then tells how to wait for its ack. The call copies the batch,
   * so the caller may use its buffers again at once.
   *
   * @throws WaldError if the session has failed; the batch was not sent. Its kind is USAGE if a value fits no field; the session goes on then.
   */
  async send(batch: BatchInput): Promise<Sent<BatchAck>> {
    if (this.#closed) {
      throw usageError("the session is closed");
    }
    const { message, bytes } = owned(AppendBatchRequestSchema, protoBatch(batch));
    const sent = this.#sending.then(async () => {
      this.#check();
      await this.#window.enter(bytes);
      if (this.#failure !== undefined) {
        this.#window.leave(bytes);
      }
      this.#check();
      const ack = new Promise<BatchAck>((resolve, reject) => this.#entries.push({ bytes, resolve, reject }));
      ack.catch(() => {});
      this.#stream.push(message);
      return { ack };
    });
    this.#sending = sent.catch(() => {});
    return sent;
  }

  /**
   * Sends no more, and waits for the acks of all that was sent.
   *
   * @throws WaldError the failure that ended the session, if one did.
   */
  async close(): Promise<void> {
    this.#closed = true;
    await this.#sending;
    this.#stream.end();
    await this.#done;
  }

  /** Ends the session now. Batches that are not acked by now have an unknown outcome. */
  abort(): void {
    this.#closed = true;
    this.#stream.abort(cancelledError("UNKNOWN", undefined));
  }

  #check(): void {
    if (this.#failure !== undefined) {
      throw earlierFailed(this.#failure, "NOT_APPLIED");
    }
  }

  #fail(error: WaldError): void {
    this.#failure = error;
    const named = failedRequest(error);
    const failed = this.#entries.splice(0);
    failed.forEach((entry, index) => {
      const request = this.#stream.acked + index;
      const sent = request < this.#stream.sent;
      this.#window.leave(entry.bytes);
      const outcome = sent && error.outcome === "UNKNOWN" ? "UNKNOWN" : "NOT_APPLIED";
      // An error that names no request is about all of them.
      const own = named === undefined || request === named;
      entry.reject(own ? error.of(outcome) : earlierFailed(error, outcome));
    });
  }
}
