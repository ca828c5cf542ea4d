/** Rules for repeating calls. */
import { cancelledError, failedFor, timeoutError, toWaldError, type Access, type WaldError } from "./errors.js";
import type { TokenUse } from "./token.js";

/** Number and pace of repeats of a call, within its deadline. */
export interface RetryPolicy {
  /**
   * Attempts in all, the first included. Default: 16, whose pauses are longer than the
   * default deadline, so that the deadline decides. 1 repeats nothing. A scan has no deadline; it gives up as well when it has failed for as long as the client's timeout. A
   * follower that was open once, and a producer, count nothing.
   */
  maxAttempts: number;
  /** Pause before the first repetition; doubles each time, with jitter down to half of it. Default: 50 ms. */
  firstPauseMs: number;
  /** Longest pause. Default: 2 s. A pause that the server asks for is kept even if longer. */
  maxPauseMs: number;
}

/** Deadline of calls that name none. */
export const DEFAULT_TIMEOUT_MS = 10_000;

/** Default retry policy. */
export const DEFAULT_RETRY: RetryPolicy = { maxAttempts: 16, firstPauseMs: 50, maxPauseMs: 2_000 };

/**
 * Effect of a request that is applied twice: none (reads, and writes that name the final state,
 * not a change); impossible (a condition holds at most once); duplicate records.
 */
export type Repeat = "HARMLESS" | "GUARDED" | "HARMFUL";

/** Whether to send the same request again after this error. */
export function mayRepeat(repeat: Repeat, error: WaldError): boolean {
  // A quota does not pass without a change: its reason is reported at once.
  if (failedFor(error, "QUOTA")) {
    return false;
  }
  return error.retry === "SAFE" || (error.retry === "SAFE_WITH_CONDITION" && repeat !== "HARMFUL");
}

/** The time to wait after a number of failures in a row. */
export function pauseMs(policy: RetryPolicy, failures: number, error: WaldError): number {
  const full = Math.min(policy.firstPauseMs * 2 ** Math.min(failures - 1, 30), policy.maxPauseMs);
  return Math.max(full * (0.5 + Math.random() / 2), error.retryAfterMs ?? 0);
}

/** The failures in a row of one call, scan or producer, and the pauses after them. */
export class Backoff {
  readonly #policy: RetryPolicy;
  #failures = 0;
  #paused = true;

  constructor(policy: RetryPolicy) {
    this.#policy = policy;
  }

  /** Whether the policy allows no attempt after those that failed. */
  get exhausted(): boolean {
    return this.#failures >= this.#policy.maxAttempts;
  }

  /**
   * Counts a failure, and returns the time to wait after it. An owner that the server named is asked at once, but
   * only once between two pauses: two servers may name each other.
   */
  failed(error: WaldError): number {
    this.#failures++;
    this.#paused = !(this.#paused && error.followed);
    return this.#paused ? pauseMs(this.#policy, this.#failures, error) : 0;
  }

  /** An attempt has succeeded. */
  succeeded(): void {
    this.#failures = 0;
    this.#paused = true;
  }
}

/** The time for a timer of Node. Node takes less than 2^31 ms, and makes 1 ms of more, also of Infinity. */
export function timerMs(ms: number): number {
  return Math.min(ms, 2 ** 31 - 1);
}

/** Longest deadline of one attempt, 27 hours: the header of gRPC has 8 digits. */
const MAX_ATTEMPT_MS = 99_999_999;

/** Waits; ends early, and well, when the signal is aborted. */
export function sleep(ms: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    if (signal?.aborted) {
      resolve();
      return;
    }
    const done = (): void => {
      clearTimeout(timer);
      signal?.removeEventListener("abort", done);
      resolve();
    };
    const timer = setTimeout(done, timerMs(ms));
    signal?.addEventListener("abort", done);
  });
}

/** Rules of one call and its repeats. */
export interface Plan {
  policy: RetryPolicy;
  repeat: Repeat;
  access: Access;
  /** Deadline over all attempts. */
  timeoutMs: number;
  /** Gives the call up. */
  signal?: AbortSignal | undefined;
  /** The token of the call. */
  token?: TokenUse;
}

/** Limits and headers of one attempt. */
export interface Attempt {
  timeoutMs: number;
  signal?: AbortSignal;
  headers?: Record<string, string>;
}

/** Makes a call, and repeats it as far as that is safe and the deadline reaches. */
export async function call<A>(plan: Plan, send: (attempt: Attempt) => Promise<A>): Promise<A> {
  const { policy, repeat, access, timeoutMs, signal, token } = plan;
  const deadline = performance.now() + timeoutMs;
  const backoff = new Backoff(policy);
  let unknown = false;
  for (;;) {
    if (signal?.aborted) {
      throw cancelledError(unknown ? "UNKNOWN" : "NOT_APPLIED", signal.reason);
    }
    const left = deadline - performance.now();
    let error: WaldError;
    try {
      // The server must not write a request that no caller waits for any more.
      const timeoutMs = Math.min(Math.max(1, Math.ceil(left)), MAX_ATTEMPT_MS);
      return await send({ timeoutMs, ...(signal && { signal }), ...token?.headers() });
    } catch (thrown) {
      error = toWaldError(thrown, access, signal);
    }
    if (error.kind === "TIMEOUT") {
      error = timeoutError(access, `no answer within ${timeoutMs} ms`, error.server).of(error.outcome);
    }
    const pause = backoff.failed(error);
    const last =
      !(token?.allows(repeat, error) ?? mayRepeat(repeat, error)) ||
      backoff.exhausted ||
      performance.now() + pause >= deadline;
    if (last) {
      throw unknown && error.outcome !== "UNKNOWN" ? error.afterUnknown() : error;
    }
    unknown ||= error.outcome === "UNKNOWN";
    await sleep(pause, signal);
  }
}
