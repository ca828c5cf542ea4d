/**
 * Errors: the outcome for the data, the reason, and whether a repeat is safe.
 *
 * Errors have three sources. An answer of Wald carries ErrorInfo, and its facts are believed. A
 * status without it comes from a proxy, and does not report the server's work. Other failures
 * never left this process.
 */
import { fromBinary, type DescMessage, type MessageShape } from "@bufbuild/protobuf";
import { durationMs } from "@bufbuild/protobuf/wkt";
import { Code, ConnectError } from "@connectrpc/connect";

import type { Reason } from "./gen/wald/v1/errors_pb.js";
import { ErrorInfoSchema, PreconditionFailureSchema, RetryInfoSchema, StatusSchema } from "./gen/details_pb.js";
import type { Gap } from "./scan.js";
import { TlsProblem, type TlsFailure } from "./tls.js";

const DOMAIN = "wald.dev";

/** The reasons that this version of the client knows. */
export type ReasonName = Exclude<keyof typeof Reason, "UNSPECIFIED">;

/** Outcome of a write that failed: nothing was written, or nobody knows. */
export type Outcome = "NOT_APPLIED" | "UNKNOWN";

/**
 * Whether the same request may be sent again: yes; only if it cannot be applied twice (with
 * the same expected lsn or producer; reads always may); it would fail again.
 */
export type Retry = "SAFE" | "SAFE_WITH_CONDITION" | "NEVER";

/**
 * The place at which a call failed.
 *
 * - `SERVER`: the server answered with an error.
 * - `NOT_SENT`: there was no connection, or it ended before the call went out on it.
 * - `CONNECTION_LOST`: the connection broke underway.
 * - `TIMEOUT`: the deadline passed.
 * - `CANCELLED`: the caller's signal, or a close, ended the call.
 * - `FOREIGN`: something between client and server answered, or the server is not Wald.
 * - `CONTRACT`: the answer lacks a field that the contract promises.
 * - `TLS`: there is no TLS connection, or the server wants one; `tlsFailure` has the reason.
 * - `TOKEN`: the token cannot be used, or must not be sent over plaintext.
 * - `STATE`: the state of a durable producer or follower cannot be read, belongs to another log, or cannot be saved.
 * - `MISSING`: a durable follower has reached a gap; `gap` names the missing records.
 * - `USAGE`: the call itself was wrong, or its client is closed; nothing was sent.
 * - `EARLIER_FAILED`: an earlier batch of the same session or producer failed.
 */
export type FailureKind =
  | "SERVER"
  | "NOT_SENT"
  | "CONNECTION_LOST"
  | "TIMEOUT"
  | "CANCELLED"
  | "FOREIGN"
  | "CONTRACT"
  | "TLS"
  | "TOKEN"
  | "STATE"
  | "MISSING"
  | "USAGE"
  | "EARLIER_FAILED";

/** One failed check of a request. */
export interface FailedCheck {
  /** Its reason, such as `POSITION_MISMATCH`. */
  reason: string;
  /** The log that it is about. */
  log: string;
  /** The expected and the actual value, for people. */
  description: string;
}

/** The parts of a {@link WaldError}. */
export interface Failure {
  kind: FailureKind;
  code: string;
  message: string;
  reason?: WaldError["reason"];
  outcome: Outcome;
  retry: Retry;
  facts?: Readonly<Record<string, string>>;
  failedChecks?: readonly FailedCheck[];
  retryAfterMs?: number | undefined;
  tlsFailure?: TlsFailure | undefined;
  gap?: Gap | undefined;
  server?: string | undefined;
  followed?: boolean;
  cause?: unknown;
}

/** Facts of a failed attempt besides its error, which nodes.ts knows. */
export interface FailedAttempt {
  /** The server that the attempt went to. */
  server: string;
  /** The server named another one as the owner, and the client has left this server. */
  followed: boolean;
  /** The reason why the owner must not get the calls of this client. */
  refusal: string | undefined;
}

const attempts = new WeakMap<ConnectError, FailedAttempt>();

/** Notes facts for {@link toWaldError}. */
export function noteAttempt(error: ConnectError, attempt: FailedAttempt): void {
  attempts.set(error, attempt);
}

/** The reason why a call failed, and the outcome for the data. */
export class WaldError extends Error {
  override readonly name = "WaldError";
  /** The place at which the call failed. */
  readonly kind: FailureKind;
  /** The name of the gRPC status code, such as `FAILED_PRECONDITION`. */
  readonly code: string;
  /**
   * The server's reason, such as `POSITION_MISMATCH`; undefined if Wald did not answer. A newer server may
   * send one that has no {@link ReasonName}.
   */
  readonly reason: ReasonName | (string & {}) | undefined;
  /**
   * Outcome of a write. A read has nothing to apply: NOT_APPLIED.
   *
   * If an earlier attempt of the same call may have been applied, the outcome is unknown
   * even if the last attempt was refused: a POSITION_MISMATCH after a lost connection can be
   * the echo of one's own success.
   */
  readonly outcome: Outcome;
  /**
   * Whether the same request may be sent again. The client has done so already, as far as
   * its policy and the deadline go.
   */
  readonly retry: Retry;
  /** Every fact that the server gave, by name. */
  readonly facts: Readonly<Record<string, string>>;
  /** All checks that failed, if the request had conditions. */
  readonly failedChecks: readonly FailedCheck[];
  /** Minimum time before the next attempt, as the server asks. */
  readonly retryAfterMs: number | undefined;
  /** Why there is no TLS connection; undefined of other failures. */
  readonly tlsFailure: TlsFailure | undefined;
  /** Records that are missing, if a durable follower has reached a gap. */
  readonly gap: Gap | undefined;
  /**
   * The server that the attempt went to, such as `http://127.0.0.1:6925`. Undefined if the failure is of the client
   * alone, and with a transport of one's own.
   */
  readonly server: string | undefined;
  readonly #followed: boolean;

  constructor(failure: Failure) {
    super(failure.message, failure.cause === undefined ? undefined : { cause: failure.cause });
    this.kind = failure.kind;
    this.code = failure.code;
    this.reason = failure.reason;
    this.outcome = failure.outcome;
    this.retry = failure.retry;
    this.facts = failure.facts ?? {};
    this.failedChecks = failure.failedChecks ?? [];
    this.retryAfterMs = failure.retryAfterMs;
    this.tlsFailure = failure.tlsFailure;
    this.gap = failure.gap;
    this.server = failure.server;
    this.#followed = failure.followed ?? false;
  }

  /** @internal The server named another one as the owner, and the client has turned to that one. */
  get followed(): boolean {
    return this.#followed;
  }

  /** This error, for a call whose earlier attempt may have been applied. */
  afterUnknown(): WaldError {
    return this.#said(
      "UNKNOWN",
      this.retry === "SAFE" ? "SAFE_WITH_CONDITION" : this.retry,
      " (an earlier attempt of this call may have been applied)",
    );
  }

  /** This error, for one of several batches that it concerns. */
  of(outcome: Outcome): WaldError {
    if (this.outcome === outcome) {
      return this;
    }
    return outcome === "UNKNOWN"
      ? this.afterUnknown()
      : this.#said(outcome, this.retry === "SAFE_WITH_CONDITION" ? "SAFE" : this.retry, "");
  }

  #said(outcome: Outcome, retry: Retry, more: string): WaldError {
    return new WaldError({ ...this, message: this.message + more, outcome, retry, cause: this.cause });
  }
}

/** Whether a call failed for a reason. */
export function failedFor(error: unknown, reason: ReasonName): boolean {
  return error instanceof WaldError && error.reason === reason;
}

/** The connection was not there, so the call never went out on it. */
export class NotSent extends Error {
  override readonly name = "NotSent";
}

/** The producer has given up a session that brought no ack. */
export class SilentStream extends Error {
  override readonly name = "SilentStream";
}

/** The client is closed, so no connection will be there. */
export class ClosedError extends Error {
  override readonly name = "ClosedError";

  constructor() {
    super("the client is closed");
  }
}

/** The error of an encoded google.rpc.Status, as connect reads it from the trailers of a call. */
export function statusError(encoded: Uint8Array, metadata = new Headers({ "grpc-status-details-bin": "" })): ConnectError {
  try {
    const { code, message, details } = fromBinary(StatusSchema, encoded);
    const error = new ConnectError(message, code in Code ? code : Code.Internal, metadata);
    error.details = details.map(({ typeUrl, value }) => ({ type: typeUrl.slice(typeUrl.lastIndexOf("/") + 1), value }));
    return error;
  } catch {
    return new ConnectError("the status cannot be read", Code.DataLoss, metadata);
  }
}

/** Whether a call reads or writes, which decides about its errors. */
export type Access = "READ" | "WRITE";

/** The outcome of a call that failed without a word about it: a read has nothing to apply. */
function unknownOf(access: Access): Outcome {
  return access === "WRITE" ? "UNKNOWN" : "NOT_APPLIED";
}

/** Turns whatever a call threw into a {@link WaldError}. */
export function toWaldError(thrown: unknown, access: Access, cancelled?: AbortSignal): WaldError {
  if (thrown instanceof WaldError) {
    return thrown;
  }
  const error = ConnectError.from(thrown);
  const read = readStatus(error, thrown, access, cancelled);
  const attempt = attempts.get(error);
  if (attempt === undefined) {
    return read;
  }
  const { refusal, ...facts } = attempt;
  const more = refusal === undefined ? "" : ` (the owner is not asked: ${refusal})`;
  return new WaldError({ ...read, ...facts, message: read.message + more, cause: read.cause });
}

function readStatus(error: ConnectError, thrown: unknown, access: Access, cancelled?: AbortSignal): WaldError {
  const unknown = unknownOf(access);
  const info = details(error, "google.rpc.ErrorInfo", ErrorInfoSchema);
  if (info?.domain === DOMAIN) {
    return new WaldError({
      kind: "SERVER",
      code: codeName(error.code),
      message: `${info.reason}: ${error.rawMessage}`,
      reason: info.reason,
      outcome: outcomeOf(info.metadata["outcome"], error.code) ?? unknown,
      retry: retryOf(info.metadata["retry"], error.code),
      facts: info.metadata,
      failedChecks: failedChecks(error),
      retryAfterMs: retryAfterMs(error),
    });
  }
  if (cancelled?.aborted) {
    const { reason } = cancelled;
    return reason instanceof SilentStream ? lostError(access, reason.message) : cancelledError(unknown, reason);
  }
  // connect's words (2.1, protocol/serialization.ts) for values that fit no field.
  if (!answered(error) && error.rawMessage.startsWith("serialize binary: ")) {
    return usageError(error.rawMessage);
  }
  if (error.cause instanceof TlsProblem) {
    return tlsError(error.cause);
  }
  if (error.cause instanceof ClosedError) {
    return usageError(error.cause.message);
  }
  if (error.cause instanceof NotSent || refused(error)) {
    return new WaldError({
      kind: "NOT_SENT",
      code: "UNAVAILABLE",
      message: `not sent: ${error.rawMessage}`,
      outcome: "NOT_APPLIED",
      retry: "SAFE",
      cause: thrown,
    });
  }
  // The transport on the other side calls its timer's end CANCELLED.
  const expired = error.code === Code.Canceled && error.rawMessage === "Timeout expired";
  if (expired || error.code === Code.DeadlineExceeded) {
    return timeoutError(access, "the deadline passed");
  }
  if (answered(error)) {
    const unbuilt = error.code === Code.Unimplemented;
    return new WaldError({
      kind: "FOREIGN",
      code: codeName(error.code),
      message: `${codeName(error.code)}: ${error.rawMessage}`,
      // UNIMPLEMENTED: the method was not even found.
      outcome: unbuilt ? "NOT_APPLIED" : unknown,
      retry: error.code === Code.Unavailable ? "SAFE_WITH_CONDITION" : "NEVER",
      cause: thrown,
    });
  }
  return lostError(access, error.rawMessage, thrown);
}

/** The connection broke underway; a write may have been applied. */
export function lostError(access: Access, detail: string, cause?: unknown): WaldError {
  return new WaldError({
    kind: "CONNECTION_LOST",
    code: "UNAVAILABLE",
    message: `the connection was lost: ${detail}`,
    outcome: unknownOf(access),
    retry: "SAFE_WITH_CONDITION",
    cause,
  });
}

/** The deadline passed; a write may have been applied, or still be. */
export function timeoutError(access: Access, message: string, server?: string): WaldError {
  return new WaldError({
    kind: "TIMEOUT",
    code: "DEADLINE_EXCEEDED",
    message,
    outcome: unknownOf(access),
    retry: "SAFE_WITH_CONDITION",
    server,
  });
}

/** The caller did not want to wait any longer. */
export function cancelledError(outcome: Outcome, cause: unknown, server?: string): WaldError {
  return new WaldError({
    kind: "CANCELLED",
    code: "CANCELLED",
    message: "cancelled",
    outcome,
    retry: "NEVER",
    server,
    cause,
  });
}

/** The answer breaks the contract. */
export function contractError(access: Access, field: string): WaldError {
  return new WaldError({
    kind: "CONTRACT",
    code: "INTERNAL",
    message: `the answer breaks the contract: ${field} is missing`,
    outcome: unknownOf(access),
    retry: "NEVER",
  });
}

/** Minimum time between two connections after a TLS failure, over all calls of a client. */
export const TLS_PAUSE_MS = 1_000;

/** There is no TLS connection; nothing was sent. */
export function tlsError(problem: TlsProblem): WaldError {
  const settings = problem.failure === "SETTINGS";
  return new WaldError({
    kind: "TLS",
    code: settings ? "INVALID_ARGUMENT" : "UNAVAILABLE",
    message: `no TLS connection: ${problem.message}`,
    outcome: "NOT_APPLIED",
    retry: settings ? "NEVER" : "SAFE",
    retryAfterMs: settings ? undefined : TLS_PAUSE_MS,
    tlsFailure: problem.failure,
  });
}

/** The token cannot be used; nothing was sent. */
export function tokenError(message: string): WaldError {
  return new WaldError({
    kind: "TOKEN",
    code: "INVALID_ARGUMENT",
    message,
    outcome: "NOT_APPLIED",
    retry: "NEVER",
  });
}

/** The state of a durable producer or follower. A batch whose save failed may be sent by the next start. */
export function stateError(detail: string, cause?: unknown): WaldError {
  return new WaldError({
    kind: "STATE",
    code: "INTERNAL",
    message: `state: ${detail}`,
    outcome: "UNKNOWN",
    retry: "NEVER",
    cause,
  });
}

/** A durable follower has reached a gap. */
export function missingError(gap: Gap): WaldError {
  const { log, fromLsn, toLsn, reason } = gap;
  return new WaldError({
    kind: "MISSING",
    code: "DATA_LOSS",
    message: `records of "${log}" are missing: lsn ${fromLsn ?? "unknown"} up to ${toLsn ?? "the end"} (${reason})`,
    outcome: "NOT_APPLIED",
    retry: "NEVER",
    gap,
  });
}

/** The call was wrong; nothing was sent. */
export function usageError(message: string): WaldError {
  return new WaldError({
    kind: "USAGE",
    code: "INVALID_ARGUMENT",
    message,
    outcome: "NOT_APPLIED",
    retry: "NEVER",
  });
}

/**
 * A batch that came after one that failed. Code, reason and facts are the first one's; the
 * outcome is its own.
 */
export function earlierFailed(first: WaldError, outcome: Outcome): WaldError {
  return new WaldError({
    kind: "EARLIER_FAILED",
    code: first.code,
    message: `an earlier batch failed: ${first.message}`,
    reason: first.reason,
    outcome,
    retry: outcome === "UNKNOWN" ? "SAFE_WITH_CONDITION" : "SAFE",
    facts: first.facts,
    failedChecks: first.failedChecks,
    retryAfterMs: first.retryAfterMs,
    server: first.server,
    cause: first,
  });
}

function outcomeOf(said: string | undefined, code: Code): Outcome | undefined {
  if (said === "NOT_APPLIED" || said === "UNKNOWN") {
    return said;
  }
  // The server's promise, whatever the facts say.
  return code === Code.Unavailable ? "NOT_APPLIED" : undefined;
}

function retryOf(said: string | undefined, code: Code): Retry {
  if (said === "SAFE" || said === "SAFE_WITH_CONDITION" || said === "NEVER") {
    return said;
  }
  // Errors of reads do not say; these two pass by themselves.
  const passes = said === undefined && (code === Code.Unavailable || code === Code.ResourceExhausted);
  return passes ? "SAFE" : "NEVER";
}

function failedChecks(error: ConnectError): FailedCheck[] {
  const failure = details(error, "google.rpc.PreconditionFailure", PreconditionFailureSchema);
  return (failure?.violations ?? []).map(({ type, subject, description }) => ({
    reason: type,
    log: subject,
    description,
  }));
}

function retryAfterMs(error: ConnectError): number | undefined {
  const delay = details(error, "google.rpc.RetryInfo", RetryInfoSchema)?.retryDelay;
  return delay === undefined ? undefined : durationMs(delay);
}

function details<T extends DescMessage>(
  error: ConnectError,
  type: string,
  schema: T,
): MessageShape<T> | undefined {
  for (const detail of error.details) {
    if ("type" in detail && detail.type === type) {
      try {
        return fromBinary(schema, detail.value);
      } catch {
        return undefined;
      }
    }
  }
  return undefined;
}

/** Whether the status came over the wire: only then there are headers or trailers. */
function answered(error: ConnectError): boolean {
  return !error.metadata.keys().next().done;
}

/**
 * Whether the server's transport says that it has not looked at the call, as it does of those
 * that come after it has begun to close the connection (RFC 9113, 8.7). The code of RST_STREAM
 * is nowhere but in the message, Node's own or connect-node's.
 */
function refused(error: ConnectError): boolean {
  return !answered(error) && /error code (NGHTTP2_)?REFUSED_STREAM/.test(error.rawMessage);
}

/** `FailedPrecondition` -> `FAILED_PRECONDITION`. */
function codeName(code: Code): string {
  if (code === Code.Canceled) {
    return "CANCELLED";
  }
  return (Code[code] ?? "Unknown").replace(/(?<=[a-z])(?=[A-Z])/g, "_").toUpperCase();
}
