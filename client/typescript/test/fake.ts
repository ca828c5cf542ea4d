/** A server for tests: the real transport, one log in memory, and faults on demand. */
import { once } from "node:events";
import * as http2 from "node:http2";
import type { AddressInfo, Socket } from "node:net";

import { create, toBinary, type MessageInitShape } from "@bufbuild/protobuf";
import { durationFromMs } from "@bufbuild/protobuf/wkt";
import { Code, ConnectError, type ConnectRouter, type HandlerContext, type Interceptor } from "@connectrpc/connect";
import { connectNodeAdapter } from "@connectrpc/connect-node";

import { ErrorInfoSchema, PreconditionFailureSchema, RetryInfoSchema, StatusSchema } from "../src/gen/details_pb.js";
import { LogService } from "../src/gen/wald/v1/log_pb.js";
import {
  WalService,
  type AppendBatchRequest,
  type AppendBatchResponseSchema,
  type AppendRequest,
  type AppendResponseSchema,
  type AppendSessionRequest,
  type AppendSessionResponseSchema,
  type ScanRequest,
  type ScanResponseSchema,
} from "../src/gen/wald/v1/wal_pb.js";
import { Client, type ClientOptions } from "../src/index.js";

/** The contents of a log, and the behaviour of the server. */
export class Fake {
  readonly logId = 7n;
  /** The lowest epoch that the log takes of an unknown producer. */
  firstProducerEpoch = 0n;
  /** Producers of epochs below it are forgotten. */
  forgottenBelow = 0n;
  /** Asked for each batch of a producer as soon as it comes, repeats too. */
  came: (epoch: bigint, sequence: bigint) => void | Promise<void> = () => {};
  /** Producers that were to be forgotten. */
  readonly forgotten: string[] = [];
  /** Every record, as text. */
  readonly records: string[];
  /** The keys of the headers of every record. */
  readonly headerKeys: string[] = [];
  /** The ack of every batch of every producer. */
  readonly #acks: Map<string, { firstLsn: bigint; nextLsn: bigint }>;
  /** Sequences in the order in which they came, repeats too. */
  readonly sequences: bigint[] = [];
  /** Requests that came on sessions. */
  requests = 0;
  /** Calls that came, of any kind. An independent request counts as a call, and its stream does not. */
  calls = 0;
  /** Calls that came, of each method. */
  readonly methods: string[] = [];
  /** Headers of the calls that came. */
  readonly headers: http2.IncomingHttpHeaders[] = [];
  /** Sessions whose requests have ended. */
  halfClosed = 0;
  /** Called when the requests of a session have ended. */
  onHalfClosed: (count: number) => void = () => {};
  /** Asked for each independent request; throws to end the session before the request is read. */
  reading: (request: AppendSessionRequest) => void = () => {};
  /** A session of independent requests ends without the answers that are due, as one that a proxy ends. */
  losesAnswers = false;
  /** Asked before each batch, with its records; throws to refuse it. */
  before: (records: string[]) => void | Promise<void> = () => {};
  /** Asked after each batch was applied, before it is acked. */
  after: (records: string[]) => void | Promise<void> = () => {};
  /** Requests after whose acks a session ends in good order, as one that a proxy ends. */
  endsAfter = Infinity;
  /** Asked after the last request of a session, before the session ends. */
  last: () => void | Promise<void> = () => {};
  /** The messages of a scan. */
  scan: (request: ScanRequest, signal: AbortSignal) => AsyncIterable<MessageInitShape<typeof ScanResponseSchema>> =
    async function* () {};
  /**
   * Asked before each call and each independent request, with the header `authorization` of the call; throws to refuse it. A stream
   * without a credential ends.
   */
  authorize: (authorization: string | null) => void = () => {};
  /** The owner that answers through this server, `HOST:PORT`; undefined: this server answers. */
  speaksFor: string | undefined;
  readonly #server: http2.Http2Server | http2.Http2SecureServer;
  readonly #scheme: string;
  readonly #sockets = new Set<Socket>();
  readonly #sessions = new Set<http2.ServerHttp2Session>();

  private constructor(tls?: http2.SecureServerOptions, beside?: Fake) {
    this.records = beside?.records ?? [];
    this.#acks = beside === undefined ? new Map() : beside.#acks;
    const authorizing: Interceptor = (next) => (request) => {
      this.authorize(request.header.get("authorization"));
      return next(request);
    };
    const handler = connectNodeAdapter({ routes: (router) => this.#routes(router), interceptors: [authorizing] });
    const answer = (request: http2.Http2ServerRequest, response: http2.Http2ServerResponse): void => {
      this.calls++;
      this.methods.push(request.url.split("/").at(-1) ?? "");
      this.headers.push(request.headers);
      if (this.speaksFor !== undefined) {
        response.setHeader("wald-owner", this.speaksFor);
      }
      handler(request, response);
    };
    this.#scheme = tls === undefined ? "" : "https://";
    this.#server = tls === undefined ? http2.createServer(answer) : http2.createSecureServer(tls, answer);
    this.#server.on("connection", (socket) => {
      this.#sockets.add(socket);
      socket.on("close", () => this.#sockets.delete(socket));
    });
    this.#server.on("session", (session) => {
      session.on("error", () => {});
      this.#sessions.add(session);
      session.on("close", () => this.#sessions.delete(session));
    });
  }

  /** Serves in plaintext, or with these settings of TLS; its own log, or that of another server. */
  static async start(tls?: http2.SecureServerOptions, beside?: Fake): Promise<Fake> {
    const fake = new Fake(tls, beside);
    fake.#server.listen(0, "127.0.0.1");
    await once(fake.#server, "listening");
    return fake;
  }

  get endpoint(): string {
    return `${this.#scheme}127.0.0.1:${this.port}`;
  }

  get port(): number {
    return (this.#server.address() as AddressInfo).port;
  }

  /** Number of connections. */
  get connections(): number {
    return this.#sockets.size;
  }

  client(options: ClientOptions = {}): Client {
    return Client.lazy(this.endpoint, { retry: { maxAttempts: 5, firstPauseMs: 1, maxPauseMs: 5 }, ...options });
  }

  /** Breaks every connection now. */
  drop(): void {
    for (const socket of this.#sockets) {
      socket.destroy();
    }
  }

  /** Takes no more calls on the connections that are there. */
  goAway(): void {
    for (const session of this.#sessions) {
      session.close();
    }
  }

  async stop(): Promise<void> {
    this.drop();
    await new Promise((resolve) => this.#server.close(resolve));
  }

  #routes(router: ConnectRouter): void {
    router.service(LogService, {
      getLog: () => ({ log: { name: "log", logId: this.logId, firstProducerEpoch: this.firstProducerEpoch } }),
      forgetProducer: ({ producerId }) => {
        this.forgotten.push(producerId);
        return {};
      },
    });
    router.service(WalService, {
      append: (request) => this.#append(request),
      appendBatch: (request) => this.#apply(request),
      getTail: () => ({ firstLsn: 0n, tailLsn: BigInt(this.records.length), durableLsn: 0n, logId: this.logId }),
      scan: (request, { signal }) => this.scan(request, signal),
      appendSession: async function* (this: Fake, requests: AsyncIterable<AppendSessionRequest>, { requestHeader }: HandlerContext) {
        const eager = ahead(requests, () => this.requests++);
        const first = await eager.next();
        if (first.done === true) {
          this.onHalfClosed(++this.halfClosed);
          return;
        }
        const all = chain(first.value, eager);
        if (first.value.independent) {
          yield* this.#independent(all, requestHeader.get("authorization"));
          return;
        }
        let acked = 0;
        for await (const { requestId, batch } of all) {
          try {
            yield { requestId, ack: await this.#apply(batch ?? ({ batches: [] } as never)) };
          } catch (error) {
            throw error instanceof Refusal ? error.status({ request_id: String(requestId) }) : error;
          }
          if (++acked === this.endsAfter) {
            return;
          }
        }
        await this.last();
      }.bind(this),
    });
  }

  async #append({ log, record, condition }: AppendRequest): Promise<MessageInitShape<typeof AppendResponseSchema>> {
    const batches = [{ log, records: record ? [record] : [], condition }];
    const { appends } = await this.#apply({ batches } as AppendBatchRequest);
    return { lsn: appends?.[0]?.firstLsn ?? 0n };
  }

  /** Answers each request as soon as its answer is known. */
  async *#independent(
    requests: AsyncIterable<AppendSessionRequest>,
    authorization: string | null,
  ): AsyncGenerator<MessageInitShape<typeof AppendSessionResponseSchema>> {
    const answers: MessageInitShape<typeof AppendSessionResponseSchema>[] = [];
    let wake = (): void => {};
    const answer = async ({ requestId, append, batch }: AppendSessionRequest, refused?: unknown): Promise<void> => {
      try {
        if (refused !== undefined) {
          throw refused;
        }
        answers.push(
          append === undefined
            ? { requestId, ack: await this.#apply(batch ?? ({ batches: [] } as never)) }
            : { requestId, appendAck: await this.#append(append) },
        );
      } catch (error) {
        answers.push({ requestId, error: encoded(ConnectError.from(error)) });
      }
      wake();
    };
    let end: { error?: unknown } | undefined;
    const reading = (async () => {
      const underway: Promise<void>[] = [];
      try {
        for await (const request of requests) {
          this.reading(request);
          // The first one was counted and asked for with the HTTP call.
          const isFirst = underway.length === 0;
          this.calls += isFirst ? 0 : 1;
          underway.push(answer(request, isFirst ? undefined : this.#refusal(authorization)));
        }
        this.onHalfClosed(++this.halfClosed);
      } finally {
        // The requests that were read are answered before the session ends.
        await (this.losesAnswers ? undefined : Promise.all(underway));
      }
    })();
    reading.then(() => (end = {}), (error: unknown) => (end = { error })).finally(() => wake());
    for (;;) {
      const next = answers.shift();
      if (next !== undefined) {
        yield next;
      } else if (end === undefined) {
        await new Promise<void>((resolve) => (wake = resolve));
      } else if ("error" in end) {
        throw end.error;
      } else {
        return;
      }
    }
  }

  /** The refusal of a request. Throws if there is no credential any more. */
  #refusal(authorization: string | null): unknown {
    try {
      this.authorize(authorization);
      return undefined;
    } catch (error) {
      if (ConnectError.from(error).code === Code.Unauthenticated) {
        throw error;
      }
      return error;
    }
  }

  async #apply(request: AppendBatchRequest): Promise<MessageInitShape<typeof AppendBatchResponseSchema>> {
    const [batch] = request.batches;
    const records = (batch?.records ?? []).map(({ payload }) =>
      payload.case === "data" ? Buffer.from(payload.value).toString() : "",
    );
    const producer = batch?.condition?.producer;
    const key = producer && `${producer.id}/${producer.epoch}/${producer.sequence}`;
    if (producer !== undefined) {
      this.sequences.push(producer.sequence);
      await this.came(producer.epoch, producer.sequence);
      if (producer.epoch < this.forgottenBelow) {
        throw expired(this.forgottenBelow);
      }
    }
    const known = key === undefined ? undefined : this.#acks.get(key);
    let ack = known;
    if (ack === undefined) {
      await this.before(records);
      const expected = batch?.condition?.expectedLsn;
      if (expected !== undefined && expected !== BigInt(this.records.length)) {
        throw refusal(Code.FailedPrecondition, "POSITION_MISMATCH", "NOT_APPLIED", "NEVER");
      }
      ack = { firstLsn: BigInt(this.records.length), nextLsn: BigInt(this.records.length + records.length) };
      this.records.push(...records);
      this.headerKeys.push(...(batch?.records ?? []).flatMap(({ headers }) => headers.map(({ key }) => key)));
      if (key !== undefined) {
        this.#acks.set(key, ack);
      }
      await this.after(records);
    }
    return { appends: [{ ...ack, log: "log", deduplicated: known !== undefined, logId: this.logId }], durability: 3 };
  }
}

/** An error of Wald's, that a session adds the request's number to. */
export class Refusal extends ConnectError {
  readonly #info: MessageInitShape<typeof ErrorInfoSchema>;

  constructor(code: Code, info: MessageInitShape<typeof ErrorInfoSchema>) {
    super(info.reason ?? "", code);
    this.#info = info;
    this.details.push({ type: "google.rpc.ErrorInfo", value: toBinary(ErrorInfoSchema, create(ErrorInfoSchema, info)) });
  }

  status(more: Record<string, string>): ConnectError {
    return new Refusal(this.code, { ...this.#info, metadata: { ...this.#info.metadata, ...more } });
  }
}

export function refusal(code: Code, reason: string, outcome?: string, retry?: string): Refusal {
  const metadata = { ...(outcome && { outcome }), ...(retry && { retry }) };
  return new Refusal(code, { reason, domain: "wald.dev", metadata });
}

/** The status as google.rpc.Status. */
function encoded({ code, rawMessage, details }: ConnectError): Uint8Array {
  const any = details.flatMap((detail) =>
    "type" in detail ? [{ typeUrl: `type.googleapis.com/${detail.type}`, value: detail.value }] : [],
  );
  return toBinary(StatusSchema, create(StatusSchema, { code, message: rawMessage, details: any }));
}

/** The answer of a server that has forgotten the producer. */
function expired(firstEpoch: bigint): Refusal {
  const metadata = { outcome: "NOT_APPLIED", retry: "NEVER", first_epoch: String(firstEpoch) };
  return new Refusal(Code.FailedPrecondition, { reason: "PRODUCER_EXPIRED", domain: "wald.dev", metadata });
}

/** The answer of a server that does not own the store. The owner: `HOST:PORT`, or empty if the server does not know it. */
export function moved(owner: string): Refusal {
  const metadata = { outcome: "NOT_APPLIED", retry: "SAFE", owner, term: "4" };
  return new Refusal(Code.Unavailable, { reason: "MOVED", domain: "wald.dev", metadata });
}

/** Adds RetryInfo. */
export function retryAfter<E extends ConnectError>(error: E, ms: number): E {
  const info = create(RetryInfoSchema, { retryDelay: durationFromMs(ms) });
  error.details.push({ type: "google.rpc.RetryInfo", value: toBinary(RetryInfoSchema, info) });
  return error;
}

/** Adds PreconditionFailure. */
export function failed<E extends ConnectError>(
  error: E,
  violations: { type: string; subject: string; description: string }[],
): E {
  const failure = create(PreconditionFailureSchema, { violations });
  error.details.push({
    type: "google.rpc.PreconditionFailure",
    value: toBinary(PreconditionFailureSchema, failure),
  });
  return error;
}

/** A promise, and the function that settles it. */
export function gate(): { opened: Promise<void>; open: () => void } {
  let open = (): void => {};
  const opened = new Promise<void>((resolve) => (open = resolve));
  return { opened, open };
}

async function* chain<T>(first: T, others: AsyncIterable<T>): AsyncGenerator<T> {
  yield first;
  yield* others;
}

/** Takes each value when it arrives, and passes the values on in order. */
async function* ahead<T>(source: AsyncIterable<T>, onArrival: () => void): AsyncGenerator<T> {
  const taken: T[] = [];
  let wake = (): void => {};
  let ended = false;
  const taking = (async () => {
    for await (const each of source) {
      onArrival();
      taken.push(each);
      wake();
    }
  })().finally(() => {
    ended = true;
    wake();
  });
  taking.catch(() => {});
  for (;;) {
    const next = taken.shift();
    if (next !== undefined) {
      yield next;
    } else if (ended) {
      await taking;
      return;
    } else {
      await new Promise<void>((resolve) => (wake = resolve));
    }
  }
}
