/**
 * The stream that the ordinary appends of a client share: an AppendSession of independent requests.
 *
 * ```text
 * append ──▶ unsent ──▶ one write for all appends of this turn of the event loop ──▶ server
 *   ▲                                                                                 │
 *   └──────── by request_id ◀──────────────── one reader ◀────────────────────────────┘
 * ```
 *
 * One attempt of a call is one request on the stream. retry.ts repeats calls, and nodes.ts chooses the server, as for unary
 * calls. The stream ends when it is idle, and the next append opens another one.
 *
 * connect passes each message through several async generators and waits for each write. This stream takes the HTTP/2 stream of
 * connection.ts directly, because that makes it many times faster.
 */
import * as http2 from "node:http2";

import { create, fromBinary, toBinary, type MessageInitShape } from "@bufbuild/protobuf";
import { Code, ConnectError } from "@connectrpc/connect";

import type { ProtoBatch } from "./append-stream.js";
import { cancelledError, contractError, NotSent, noteAttempt, statusError, timeoutError, toWaldError } from "./errors.js";
import {
  AppendSessionRequestSchema,
  AppendSessionResponseSchema,
  type AppendBatchResponse,
  type AppendRequestSchema,
  type AppendResponse,
  type AppendSessionResponse,
} from "./gen/wald/v1/wal_pb.js";
import { MAX_ANSWER_BYTES, OWNER_HEADER, type Node, type Nodes } from "./nodes.js";
import type { Attempt } from "./retry.js";

/** Larger requests are unary calls: they would delay small ones, and the limit of the server may be low. */
const MAX_REQUEST_BYTES = 64 << 10;

/** Time without a request after which the stream is half-closed. */
const IDLE_MS = 1_000;

/** Time without an answer after which the stream takes no more requests once a caller gives up. */
const SILENCE_MS = 5_000;

/** Time of unary calls after a server has refused the stream. */
const UNARY_MS = 60_000;

const PATH = "/wald.v1.WalService/AppendSession";

/** Bytes before each message: a flag for compression, and the length. */
const PREFIX_BYTES = 5;

/** One record in the contract's form. */
export type ProtoAppend = MessageInitShape<typeof AppendRequestSchema>;

/** Sends one attempt of an append. */
export interface Appends {
  append(request: ProtoAppend, attempt: Attempt): Promise<AppendResponse>;
  appendBatch(request: ProtoBatch, attempt: Attempt): Promise<AppendBatchResponse>;
}

/** The content of a request. */
type Content = { append: ProtoAppend } | { batch: ProtoBatch };

/** The appends of a client, on one stream per server. */
export class SharedAppends implements Appends {
  readonly #nodes: Nodes;
  readonly #unary: Appends;
  readonly #headers: Readonly<Record<string, string>>;
  /** The stream of new requests, unless it takes none any more. */
  #current: SharedStream | undefined;
  /** All streams that are open, also those that only deliver their last answers. */
  readonly #open = new Set<SharedStream>();
  /** Servers that get unary calls only, until a time. */
  readonly #unaryUntil = new Map<string, number>();
  #nextId = 0n;

  /** `unary` takes requests that cannot go on a stream; every stream has `headers` and the token. */
  constructor(nodes: Nodes, unary: Appends, headers: Readonly<Record<string, string>>) {
    this.#nodes = nodes;
    this.#unary = unary;
    this.#headers = headers;
  }

  async append(request: ProtoAppend, attempt: Attempt): Promise<AppendResponse> {
    const send = (left: Attempt): Promise<AppendResponse> => this.#unary.append(request, left);
    return this.#send({ append: request }, attempt, ({ appendAck }) => appendAck, send);
  }

  async appendBatch(request: ProtoBatch, attempt: Attempt): Promise<AppendBatchResponse> {
    const send = (left: Attempt): Promise<AppendBatchResponse> => this.#unary.appendBatch(request, left);
    return this.#send({ batch: request }, attempt, ({ ack }) => ack, send);
  }

  /** Half-closes all streams. They end once every caller has its answer. */
  close(): void {
    for (const stream of this.#open) {
      stream.close();
    }
  }

  async #send<A>(
    content: Content,
    attempt: Attempt,
    ackOf: (answer: AppendSessionResponse) => A | undefined,
    unary: (attempt: Attempt) => Promise<A>,
  ): Promise<A> {
    const deadline = performance.now() + attempt.timeoutMs;
    const node = this.#nodes.server;
    if (this.#isUnary(node)) {
      return unary(attempt);
    }
    const requestId = this.#nextId++;
    const bytes = encode(requestId, content);
    if (bytes.length > MAX_REQUEST_BYTES) {
      return unary(attempt);
    }
    const stream = this.#streamTo(node, attempt.headers?.["authorization"]);
    const answer = await stream.send(requestId, bytes, attempt);
    if (answer === undefined) {
      return unary({ ...attempt, timeoutMs: Math.max(1, Math.ceil(deadline - performance.now())) });
    }
    if (answer.error.length > 0) {
      throw this.#nodes.failed(node, statusError(answer.error), attempt.signal);
    }
    const ack = ackOf(answer);
    if (ack === undefined) {
      throw contractError("WRITE", "the ack of the request");
    }
    return ack;
  }

  #isUnary({ authority }: Node): boolean {
    const until = this.#unaryUntil.get(authority);
    if (until !== undefined && performance.now() >= until) {
      this.#unaryUntil.delete(authority);
      return false;
    }
    return until !== undefined;
  }

  /** The stream to a server with a token. A stream with another token, or to another server, only delivers its answers. */
  #streamTo(node: Node, authorization: string | undefined): SharedStream {
    const current = this.#current;
    if (current?.takes(node, authorization)) {
      return current;
    }
    current?.end();
    const stream: SharedStream = new SharedStream(this.#nodes, node, authorization, this.#headers, (unshared) => {
      this.#open.delete(stream);
      if (unshared) {
        this.#unaryUntil.set(node.authority, performance.now() + UNARY_MS);
      }
    });
    this.#open.add(stream);
    return (this.#current = stream);
  }
}

/** A caller that waits for the answer to a request. */
interface Waiter {
  /** Takes the answer; undefined: the server takes this request as a unary call only. */
  resolve(answer: AppendSessionResponse | undefined): void;
  reject(error: unknown): void;
}

/** One AppendSession call. */
class SharedStream {
  readonly #nodes: Nodes;
  readonly #node: Node;
  readonly #authorization: string | undefined;
  readonly #onEnd: (unshared: boolean) => void;
  /** Callers by the numbers of their requests, until they have their answers or give up. */
  readonly #waiters = new Map<bigint, Waiter>();
  /** Requests that the transport has not taken, in order. */
  readonly #unsent = new Map<bigint, Uint8Array>();
  /** Requests that the transport has taken, and that have no answer yet. */
  #unanswered = 0;
  /** When the transport took the first request since the last answer; undefined: it has taken none. */
  #silentSince: number | undefined;
  #isAnswered = false;
  /** Undefined until the connection is there. */
  #stream: http2.ClientHttp2Stream | undefined;
  #isWriting = false;
  /** The transport has enough for now. */
  #isFull = false;
  /** No more requests come. */
  #isEnding = false;
  #isClosing = false;
  #isEnded = false;
  #idleSince = 0;
  #idleTimer: NodeJS.Timeout | undefined;
  #unread: Buffer | undefined;
  /** The owner that the server names in its header. */
  #owner: string | null = null;
  /** The status in headers or trailers; null: OK. */
  #status: ConnectError | null | undefined;
  readonly #end = (): void => this.end();

  constructor(
    nodes: Nodes,
    node: Node,
    authorization: string | undefined,
    headers: Readonly<Record<string, string>>,
    onEnd: (unshared: boolean) => void,
  ) {
    this.#nodes = nodes;
    this.#node = node;
    this.#authorization = authorization;
    this.#onEnd = onEnd;
    const all = new Headers(headers);
    all.set("content-type", "application/grpc+proto");
    all.set("te", "trailers");
    if (!all.has("user-agent")) {
      all.set("user-agent", "wald-client-typescript");
    }
    if (authorization !== undefined) {
      all.set("authorization", authorization);
    }
    node.connection.open(PATH, Object.fromEntries(all)).then(
      (stream) => this.#opened(stream),
      (thrown: unknown) => this.#finish(thrown),
    );
  }

  /** Whether a request of a call to this server, with this token, goes on this stream. */
  takes(node: Node, authorization: string | undefined): boolean {
    return !this.#isEnding && node === this.#node && authorization === this.#authorization;
  }

  /** Sends a request. Returns its answer; undefined: the server takes this request as a unary call only. */
  send(id: bigint, bytes: Uint8Array, { timeoutMs, signal }: Attempt): Promise<AppendSessionResponse | undefined> {
    return new Promise((resolve, reject) => {
      const server = this.#node.authority;
      const settled = (): void => {
        clearTimeout(timer);
        signal?.removeEventListener("abort", abort);
      };
      const giveUp = (error: typeof timeoutError | typeof cancelledError): void => {
        // The transport has not seen the request: the server never will.
        const outcome = this.#unsent.delete(id) ? "NOT_APPLIED" : "UNKNOWN";
        const gone =
          error === timeoutError
            ? timeoutError("WRITE", "the deadline passed", server).of(outcome)
            : cancelledError(outcome, signal?.reason, server);
        this.#settle(id)?.reject(gone);
        if (this.#silentSince !== undefined && performance.now() - this.#silentSince >= SILENCE_MS) {
          // The stream may end at a proxy whose server is gone, and another one may reach the next server. Requests that wait keep
          // waiting: the server may only be slow.
          this.close();
        }
      };
      // The open stream does not keep the process alive, but this timer does.
      const timer = setTimeout(() => giveUp(timeoutError), timeoutMs);
      const abort = (): void => giveUp(cancelledError);
      this.#unsent.set(id, bytes);
      this.#waiters.set(id, {
        resolve: (answer) => {
          settled();
          resolve(answer);
        },
        reject: (error) => {
          settled();
          reject(error);
        },
      });
      signal?.addEventListener("abort", abort);
      if (signal?.aborted) {
        abort();
      }
      this.#write();
    });
  }

  /** Takes no more requests, and half-closes the stream once all are sent. */
  end(): void {
    this.#isEnding = true;
    this.#write();
  }

  /** As {@link end}, and nobody waits for the answers of requests whose callers have given up. */
  close(): void {
    this.#isClosing = true;
    this.end();
    this.#giveUp();
  }

  /** The caller of a request, which waits no longer. */
  #settle(id: bigint): Waiter | undefined {
    const waiter = this.#waiters.get(id);
    if (waiter !== undefined && this.#waiters.delete(id) && this.#waiters.size === 0) {
      this.#idle();
      this.#giveUp();
    }
    return waiter;
  }

  #idle(): void {
    this.#idleSince = performance.now();
    this.#idleTimer ??= setTimeout(() => this.#checkIdle(), IDLE_MS).unref();
  }

  #checkIdle(): void {
    this.#idleTimer = undefined;
    if (this.#waiters.size > 0 || this.#isEnding) {
      return;
    }
    const left = this.#idleSince + IDLE_MS - performance.now();
    if (left > 0) {
      this.#idleTimer = setTimeout(() => this.#checkIdle(), Math.ceil(left)).unref();
    } else {
      this.end();
    }
  }

  #giveUp(): void {
    if (this.#isClosing && this.#waiters.size === 0 && this.#unanswered > 0) {
      this.#stream?.close(http2.constants.NGHTTP2_CANCEL);
    }
  }

  #opened(stream: http2.ClientHttp2Stream): void {
    this.#stream = stream;
    if (this.#waiters.size === 0) {
      this.#idle();
    }
    // The server takes no more calls on this connection: new requests go to another one.
    stream.session?.once("goaway", this.#end);
    stream.on("response", (headers) => this.#begun(headers));
    stream.on("data", (chunk: Buffer) => this.#received(chunk));
    stream.on("trailers", (headers) => this.#noteStatus(headers));
    stream.on("drain", () => {
      this.#isFull = false;
      this.#write();
    });
    stream.on("end", () => this.#finish());
    stream.on("error", (error) => this.#finish(error));
    stream.on("close", () => this.#finish());
    this.#write();
  }

  /** Writes, after this turn, all requests that came in it. */
  #write(): void {
    if (!this.#isWriting && this.#stream !== undefined && !this.#isFull) {
      this.#isWriting = true;
      process.nextTick(() => this.#writeNow());
    }
  }

  #writeNow(): void {
    this.#isWriting = false;
    const stream = this.#stream;
    if (stream === undefined || this.#isEnded) {
      return;
    }
    while (this.#unsent.size > 0 && !this.#isFull) {
      let size = 0;
      const taken: Uint8Array[] = [];
      for (const [id, bytes] of this.#unsent) {
        taken.push(bytes);
        this.#unsent.delete(id);
        size += PREFIX_BYTES + bytes.length;
        if (size >= MAX_REQUEST_BYTES) {
          break;
        }
      }
      const joined = Buffer.allocUnsafe(size);
      let at = 0;
      for (const bytes of taken) {
        joined.writeUInt8(0, at);
        joined.writeUInt32BE(bytes.length, at + 1);
        joined.set(bytes, at + PREFIX_BYTES);
        at += PREFIX_BYTES + bytes.length;
      }
      this.#unanswered += taken.length;
      this.#silentSince ??= performance.now();
      this.#isFull = !stream.write(joined);
    }
    if (this.#isEnding && this.#unsent.size === 0 && !stream.writableEnded) {
      stream.end();
    }
  }

  #begun(headers: http2.IncomingHttpHeaders & http2.IncomingHttpStatusHeader): void {
    const status = headers[":status"] ?? 0;
    const type = headers["content-type"];
    this.#owner = headers[OWNER_HEADER]?.toString() ?? null;
    if (status !== 200) {
      this.#finish(new ConnectError(`HTTP ${status}`, codeOfHttp(status), metadataOf(headers)));
    } else if (type?.startsWith("application/grpc") !== true) {
      this.#finish(new ConnectError(`unsupported content type ${type}`, Code.Unknown));
    } else {
      this.#nodes.approach(this.#node, this.#owner);
      this.#noteStatus(headers);
    }
  }

  #noteStatus(headers: http2.IncomingHttpHeaders): void {
    const code = headers["grpc-status"]?.toString();
    if (code === undefined) {
      return;
    }
    if (code === "0") {
      this.#status = null;
      return;
    }
    const details = headers["grpc-status-details-bin"]?.toString();
    this.#status =
      details === undefined
        ? new ConnectError(decoded(headers["grpc-message"]?.toString() ?? ""), codeOf(code), metadataOf(headers))
        : statusError(Buffer.from(details, "base64"), metadataOf(headers));
  }

  #received(chunk: Buffer): void {
    const bytes = this.#unread === undefined ? chunk : Buffer.concat([this.#unread, chunk]);
    let at = 0;
    while (bytes.length - at >= PREFIX_BYTES && !this.#isEnded) {
      const length = bytes.readUInt32BE(at + 1);
      if (bytes[at] !== 0 || length > MAX_ANSWER_BYTES) {
        this.#finish(new ConnectError("an answer is compressed or too large", Code.Internal));
        return;
      }
      const end = at + PREFIX_BYTES + length;
      if (end > bytes.length) {
        break;
      }
      try {
        this.#answered(fromBinary(AppendSessionResponseSchema, bytes.subarray(at + PREFIX_BYTES, end)));
      } catch (thrown) {
        this.#finish(new ConnectError(`parse binary: ${String(thrown)}`, Code.Internal));
        return;
      }
      at = end;
    }
    this.#unread = at === bytes.length ? undefined : bytes.subarray(at);
    this.#nodes.approach(this.#node, this.#owner);
  }

  #answered(answer: AppendSessionResponse): void {
    this.#isAnswered = true;
    this.#silentSince = undefined;
    this.#unanswered--;
    this.#settle(answer.requestId)?.resolve(answer);
  }

  /** The stream has ended: with its status, or else with this error. */
  #finish(thrown?: unknown): void {
    if (this.#isEnded) {
      return;
    }
    this.#isEnded = this.#isEnding = true;
    clearTimeout(this.#idleTimer);
    const ended = this.#status ?? this.#lost(thrown);
    const unshared = this.#isUnshared(ended);
    this.#onEnd(unshared);
    const stream = this.#stream;
    stream?.session?.off("goaway", this.#end);
    const waiting = [...this.#waiters.keys()];
    if (waiting.length > 0) {
      // An answer that nobody waits for is no failure.
      const error = unshared ? ended : this.#nodes.failed(this.#node, ended);
      const isApplied = toWaldError(error, "WRITE").outcome === "UNKNOWN";
      for (const id of waiting) {
        const isSent = !this.#unsent.delete(id);
        const waiter = this.#settle(id);
        if (unshared) {
          waiter?.resolve(undefined);
        } else {
          waiter?.reject(isSent || !isApplied ? error : this.#notSent());
        }
      }
    }
    clearTimeout(this.#idleTimer);
    if (this.#status === undefined) {
      stream?.close(http2.constants.NGHTTP2_CANCEL);
    } else if (stream?.writableEnded === false) {
      // Never while the half-close is on its way: if the connection breaks then, Node 20 sends empty frames without end.
      stream.close(http2.constants.NGHTTP2_NO_ERROR);
    }
  }

  #lost(thrown: unknown): ConnectError {
    const error = ConnectError.from(thrown ?? new Error("the server ended the stream"), Code.Unavailable);
    // A stream that the server has refused as a whole has no answers.
    const isRefused = this.#isAnswered && /REFUSED_STREAM/.test(error.rawMessage);
    return isRefused ? new ConnectError("the stream was reset", Code.Unavailable) : error;
  }

  /**
   * Whether one bad message has ended the stream, perhaps that of another caller, or the server does not know independent
   * requests. An older server ends the stream with the refusal of one request, whose number it names. Nothing of the
   * unanswered requests was applied. A proxy does not know that: only Wald's own word about the outcome counts.
   */
  #isUnshared(ended: ConnectError): boolean {
    if (ended.metadata.keys().next().done) {
      return false;
    }
    const { kind, outcome, facts } = toWaldError(ended, "WRITE");
    const isOfOne =
      ended.code === Code.InvalidArgument || (facts["request_id"] !== undefined && ended.code !== Code.Unauthenticated);
    return ended.code === Code.Unimplemented || (isOfOne && kind === "SERVER" && outcome === "NOT_APPLIED");
  }

  #notSent(): ConnectError {
    const detail = "the stream has ended";
    const error = new ConnectError(detail, Code.Unavailable, undefined, undefined, new NotSent(detail));
    noteAttempt(error, { server: this.#node.authority, followed: false, refusal: undefined });
    return error;
  }
}

/** The message on the wire. */
function encode(requestId: bigint, content: Content): Uint8Array {
  try {
    const message = create(AppendSessionRequestSchema, { requestId, independent: true, ...content });
    return toBinary(AppendSessionRequestSchema, message);
  } catch (thrown) {
    // connect reports it in these words, and errors.ts knows them.
    throw new ConnectError(`serialize binary: ${thrown instanceof Error ? thrown.message : String(thrown)}`, Code.Internal);
  }
}

function codeOf(text: string): Code {
  const code = Number(text);
  return code in Code ? code : Code.Internal;
}

/** The code of an answer without gRPC, as gRPC defines it (http-grpc-status-mapping.md). */
function codeOfHttp(status: number): Code {
  const codes: Record<number, Code> = {
    400: Code.Internal,
    401: Code.Unauthenticated,
    403: Code.PermissionDenied,
    404: Code.Unimplemented,
    429: Code.Unavailable,
    502: Code.Unavailable,
    503: Code.Unavailable,
    504: Code.Unavailable,
  };
  return codes[status] ?? Code.Unknown;
}

function decoded(message: string): string {
  try {
    return decodeURIComponent(message);
  } catch {
    return message;
  }
}

function metadataOf(headers: http2.IncomingHttpHeaders): Headers {
  const metadata = new Headers();
  for (const [name, value] of Object.entries(headers)) {
    if (!name.startsWith(":") && value !== undefined) {
      metadata.set(name, value.toString());
    }
  }
  return metadata;
}
