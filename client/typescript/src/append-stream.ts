/** One AppendSession call: requests out, acks in, and how it ended. */
import { create, type MessageInitShape } from "@bufbuild/protobuf";

import { contractError, lostError, toWaldError, WaldError } from "./errors.js";
import {
  AppendSessionRequestSchema,
  type AppendBatchRequestSchema,
  type AppendBatchResponse,
  type AppendSessionRequest,
  type AppendSessionResponse,
} from "./gen/wald/v1/wal_pb.js";
import type { CallOptions } from "./messages.js";

/** A batch in the contract's form. */
export type ProtoBatch = MessageInitShape<typeof AppendBatchRequestSchema>;

/** Makes the call. */
export type OpenSession = (
  requests: AsyncIterable<AppendSessionRequest>,
  options: Pick<CallOptions, "signal">,
) => AsyncIterable<AppendSessionResponse>;

/** One AppendSession call. */
export class AppendStream {
  /**
   * Requests that the transport has taken are `sent`; it takes them as fast as the server
   * does.
   */
  readonly #requests = new Requests();
  readonly #abort = new AbortController();
  #pushed = 0;
  #acked = 0;
  /** This side has ended the requests. The transport ends them, too, when the server ends the call first. */
  #isEndedHere = false;
  /** Undefined: in good order, with every request acked. Otherwise why it ended. */
  readonly ended: Promise<WaldError | undefined>;

  constructor(open: OpenSession, onAck: (ack: AppendBatchResponse) => void) {
    this.ended = this.#receive(open, onAck);
  }

  /** Sends a request; they are numbered from 0 in each call. */
  push(batch: ProtoBatch): void {
    this.#requests.push(create(AppendSessionRequestSchema, { requestId: BigInt(this.#pushed++), batch }));
  }

  /** No more requests. */
  end(): void {
    this.#isEndedHere = true;
    this.#requests.end();
  }

  /** Gives the call up. */
  abort(reason: unknown): void {
    this.#abort.abort(reason);
  }

  /** Number of requests that the server may have seen. */
  get sent(): number {
    return this.#requests.taken;
  }

  /** Number of requests that were acked. */
  get acked(): number {
    return this.#acked;
  }

  async #receive(
    open: OpenSession,
    onAck: (ack: AppendBatchResponse) => void,
  ): Promise<WaldError | undefined> {
    const { signal } = this.#abort;
    try {
      for await (const { requestId, ack } of open(this.#requests, { signal })) {
        if (requestId !== BigInt(this.#acked) || ack === undefined) {
          this.abort("out of order");
          return contractError("WRITE", `the ack of request ${this.#acked}`);
        }
        this.#acked++;
        onAck(ack);
      }
      return this.#acked === this.#pushed && this.#isEndedHere
        ? undefined
        : lostError("WRITE", "the server ended the session");
    } catch (thrown) {
      const error = toWaldError(thrown, "WRITE", signal);
      // Only the last request that was taken is the wrong one. Those before it are on their way.
      return error.kind === "USAGE" && this.sent > this.#acked
        ? new WaldError({ ...error, message: error.message, outcome: "UNKNOWN", cause: error })
        : error;
    } finally {
      this.#requests.end();
    }
  }
}

/** The number of the request that a failing session names; in this call, from 0. */
export function failedRequest(error: WaldError): number | undefined {
  const named = error.facts["request_id"];
  return named === undefined ? undefined : Number(named);
}

/** Requests on their way to the transport, which asks for one at a time. */
class Requests implements AsyncIterableIterator<AppendSessionRequest> {
  readonly #queue: AppendSessionRequest[] = [];
  #wake: (() => void) | undefined;
  #ended = false;
  taken = 0;

  push(request: AppendSessionRequest): void {
    this.#queue.push(request);
    this.#wake?.();
  }

  end(): void {
    this.#ended = true;
    this.#wake?.();
  }

  async next(): Promise<IteratorResult<AppendSessionRequest>> {
    for (;;) {
      const request = this.#queue.shift();
      if (request !== undefined) {
        this.taken++;
        return { done: false, value: request };
      }
      if (this.#ended) {
        return { done: true, value: undefined };
      }
      await new Promise<void>((resolve) => (this.#wake = resolve));
    }
  }

  /** The transport needs no more. */
  async return(): Promise<IteratorResult<AppendSessionRequest>> {
    this.#queue.length = 0;
    this.end();
    return { done: true, value: undefined };
  }

  /** The transport could not continue; the reader of acks gets its error. */
  async throw(): Promise<IteratorResult<AppendSessionRequest>> {
    return this.return();
  }

  [Symbol.asyncIterator](): this {
    return this;
  }
}
