/** One case under way. */
import {
  DEFAULT_RETRY,
  DEFAULT_TIMEOUT_MS,
  PRODUCER_DEFAULTS,
  Client,
  WaldError,
  type Follower,
  type Producer,
  type ScanOptions,
  type Selector,
} from "../src/index.js";
import { Stored } from "./consume.js";
import {
  batch,
  batchResult,
  condition,
  defined,
  durability,
  errorResult,
  gapResult,
  logId,
  move,
  record,
  recordResult,
  records,
  start,
} from "./inputs.js";
import { difference, integer, list, Names, show, text, type Members, type Step, type Value } from "./values.js";

const PATIENCE_MS = 20_000;

/** A follower in the background, and the events it has seen. */
interface Following {
  follower: Follower;
  records: Members[];
  gaps: Members[];
  caughtUp?: boolean;
  failure?: unknown;
}

/** Makes another client, and asks for the tail of a log. */
async function connect(step: Step): Promise<Members> {
  const endpoint = text(step["endpoint"]);
  const file = (name: string, variable: string): string | undefined =>
    (step[name] === undefined ? process.env[variable] : text(step[name])) || undefined;
  const files = defined({
    tlsCa: file("ca", "WALD_TLS_CA"),
    tlsCert: file("cert", "WALD_TLS_CERT"),
    tlsKey: file("key", "WALD_TLS_KEY"),
    serverName: step["server_name"] === undefined ? undefined : text(step["server_name"]),
  });
  const client = Client.lazy(endpoint, {
    timeoutMs: 1_900,
    ...(endpoint.startsWith("https://") && files),
    ...(step["token"] !== undefined && { token: text(step["token"]) }),
  });
  try {
    await client.tail("conformance/none");
  } catch (error) {
    if (!(error instanceof WaldError) || error.reason !== "LOG_NOT_FOUND") {
      throw error;
    }
  } finally {
    await client.close();
  }
  return { connected: true };
}

/** Carries out the steps of one case. */
export class Run {
  readonly #client: Client;
  readonly #control: string;
  readonly #names: Names;
  readonly #signal: AbortSignal;
  readonly #producers = new Map<string, Producer>();
  readonly #followers = new Map<string, Following>();
  readonly #jobs = new Map<string, Promise<unknown>>();
  /** Cursors of scans, by the text that stands for them. */
  readonly #cursors = new Map<string, Uint8Array>();
  /** The step that began last, for the error of a case that takes too long. */
  last = "";
  readonly #actions: Record<string, (step: Step, names: Names) => Promise<Members | void>>;

  constructor(client: Client, control: string, prefix: string, signal: AbortSignal) {
    this.#client = client;
    this.#control = control;
    this.#names = new Names(prefix);
    this.#signal = signal;
    this.#actions = this.#table();
  }

  async steps(steps: Step[], names: Names = this.#names): Promise<void> {
    for (const [index, step] of steps.entries()) {
      this.#signal.throwIfAborted();
      this.last = `step ${index + 1} (${step.do})`;
      await this.#step(step, names);
    }
  }

  async #step(raw: Step, names: Names): Promise<void> {
    // References in steps within a step are resolved when those are carried out.
    const { steps, expect, fails, within_ms, ...rest } = raw;
    const step: Step = { ...(names.resolve(rest) as Step), ...(steps !== undefined && { steps }) };
    const action = this.#actions[step.do];
    if (action === undefined) {
      throw new Error(`no step is called ${step.do}`);
    }
    const began = performance.now();
    const inTime = (): void => {
      const took = performance.now() - began;
      if (within_ms !== undefined && took > Number(within_ms)) {
        throw new Error(`${show(step)} took ${took.toFixed()} ms, at most ${show(within_ms)} are allowed`);
      }
    };
    let came: Members | void;
    try {
      came = await action(step, names);
    } catch (error) {
      if (!(error instanceof WaldError) || fails === undefined) {
        const what = error instanceof WaldError ? `${error.message} ${show(errorResult(error))}` : String(error);
        throw new Error(`${show(step)} failed: ${what}`);
      }
      const wrong = difference(names.resolve(fails), errorResult(error));
      if (wrong !== undefined) {
        throw new Error(`${show(step)} failed otherwise: ${wrong} (${error.message})`);
      }
      inTime();
      return;
    }
    inTime();
    if (fails !== undefined) {
      throw new Error(`${show(step)} did not fail; ${show(came ?? {})} came`);
    }
    if (typeof step["as"] === "string") {
      names.keep(step["as"], came ?? {});
    }
    if (expect !== undefined) {
      const wrong = difference(names.resolve(expect), came ?? {});
      if (wrong !== undefined) {
        throw new Error(`${show(step)}: ${wrong}`);
      }
    }
  }

  #table(): Record<string, (step: Step, names: Names) => Promise<Members | void>> {
    const client = this.#client;
    return {
      connect: (step) => connect(step),
      append: async (step) => {
        const options = { ...condition(step["condition"]), ...durability(step["durability"]) };
        const ack = await client.append(text(step["log"]), record(step["record"]), options);
        return {
          lsn: ack.lsn,
          deduplicated: ack.deduplicated,
          durability: ack.durability,
          durable_lsn: ack.durableLsn,
          replicated_lsn: ack.replicatedLsn,
          log_id: ack.logId,
        };
      },
      append_batch: async (step) => batchResult(await client.appendBatch(batch(step))),
      session: (step) => this.#session(step),
      read: async (step) => {
        const page = await client.read(text(step["log"]), {
          ...start(step),
          ...logId(step["log_id"]),
          ...(step["max_records"] !== undefined && { maxRecords: Number(step["max_records"]) }),
          ...(step["wait_ms"] !== undefined && { waitMs: Number(step["wait_ms"]) }),
        });
        return {
          records: page.records.map(recordResult),
          next_lsn: page.nextLsn,
          tail_lsn: page.tailLsn,
          first_lsn: page.firstLsn,
          durable_lsn: page.durableLsn,
          replicated_lsn: page.replicatedLsn,
        };
      },
      scan: async (step) => {
        const seen: Following = { follower: client.scan(selector(step), this.#scanOptions(step)), records: [], gaps: [] };
        await collect(seen);
        return this.#seen(seen);
      },
      follow: async (step) => {
        const follower = client.follow(selector(step), { ...this.#scanOptions(step), signal: this.#signal });
        const following: Following = { follower, records: [], gaps: [] };
        this.#followers.set(text(step["as"]), following);
        collect(following).catch((error: unknown) => (following.failure = error));
      },
      followed: async (step) => {
        const following = found(this.#followers, step["follower"]);
        const count = Number(step["count"]);
        const gaps = Number(step["gaps"] ?? 0);
        const caughtUp = step["caught_up"] === true;
        await this.#until(`${count} records`, async () => {
          // It may have ended since: the events it has seen count.
          const seen = following.records.length >= count && following.gaps.length >= gaps;
          const enough = seen && (!caughtUp || following.caughtUp === true);
          if (!enough && following.failure !== undefined) {
            throw following.failure;
          }
          return enough;
        });
        return this.#seen(following);
      },
      consume: (step) => this.#consume(step),
      unfollow: (step) => found(this.#followers, step["follower"]).follower.close(),
      tail: async (step) => {
        const tail = await client.tail(text(step["log"]), logId(step["log_id"]));
        return {
          first_lsn: tail.firstLsn,
          tail_lsn: tail.tailLsn,
          durable_lsn: tail.durableLsn,
          replicated_lsn: tail.replicatedLsn,
          writer_epoch: tail.writerEpoch,
          log_id: tail.logId,
        };
      },
      fence: async (step) => {
        const epoch = step["writer_epoch"];
        const fenced = await client.fence(text(step["log"]), {
          ...logId(step["log_id"]),
          ...(epoch !== undefined && { writerEpoch: integer(epoch) }),
        });
        return { tail_lsn: fenced.tailLsn, writer_epoch: fenced.writerEpoch, log_id: fenced.logId };
      },
      trim: async (step) => ({
        first_lsn: await client.trim(text(step["log"]), integer(step["before_lsn"]), logId(step["log_id"])),
      }),
      sync: (step) => client.sync(step["log"] === undefined ? {} : { log: text(step["log"]) }),
      create_log: async (step) => ({ log_id: (await client.createLog(text(step["log"]))).logId }),
      delete_log: (step) => client.deleteLog(text(step["log"]), logId(step["log_id"])),
      update_log: async (step) => {
        const config = { maxRecordBytes: Number(step["max_record_bytes"]) };
        const log = await client.updateLog(text(step["log"]), config, { paths: ["maxRecordBytes"] });
        return { max_record_bytes: log.config?.maxRecordBytes };
      },
      get_log: async (step) => {
        const log = await client.getLog(text(step["log"]));
        return { log_id: log.logId, max_record_bytes: log.config?.maxRecordBytes };
      },
      list_producers: async (step) => {
        const options = { ...logId(step["log_id"]), pageSize: Number(step["page_size"] ?? 0) };
        const producers: Members[] = [];
        for await (const { id, epoch, nextSequence } of client.listProducers(text(step["log"]), options)) {
          producers.push({ id, epoch, next_sequence: nextSequence });
        }
        return { producers };
      },
      forget_producer: (step) =>
        client.forgetProducer(text(step["log"]), text(step["id"]), logId(step["log_id"])),
      defaults: async () => ({
        batches_in_flight: PRODUCER_DEFAULTS.windowBatches,
        bytes_in_flight: PRODUCER_DEFAULTS.windowBytes,
        linger_ms: PRODUCER_DEFAULTS.lingerMs,
        attempts: DEFAULT_RETRY.maxAttempts,
        timeout_ms: DEFAULT_TIMEOUT_MS,
        retry_for_ms: PRODUCER_DEFAULTS.retryTimeoutMs,
      }),
      commit_cursor: async (step) => {
        const cursor = await client.commitCursor(move(step));
        return { lsn: cursor.lsn, log_id: cursor.logId };
      },
      get_cursor: async (step) => {
        const cursor = await client.getCursor(text(step["log"]), text(step["cursor"]), logId(step["log_id"]));
        return { lsn: cursor.lsn, log_id: cursor.logId };
      },
      delete_cursor: (step) =>
        client.deleteCursor(text(step["log"]), text(step["cursor"]), logId(step["log_id"])),
      list_cursors: async (step) => {
        const cursors: Members[] = [];
        for await (const { name, lsn } of client.listCursors(text(step["log"]))) {
          cursors.push({ cursor: name, lsn });
        }
        return { cursors };
      },
      producer: async (step) => {
        const { id, epoch, log_id } = step;
        const producer = await client.producer(text(step["log"]), {
          ...(id !== undefined && { id: text(id) }),
          ...(epoch !== undefined && { epoch: integer(epoch) }),
          ...logId(log_id),
          signal: this.#signal,
        });
        this.#producers.set(text(step["as"]), producer);
      },
      produce: async (step) => {
        const { writer_epoch, expected_lsn } = step;
        const ack = await found(this.#producers, step["producer"]).append(records(step["records"]), {
          ...(writer_epoch !== undefined && { writerEpoch: integer(writer_epoch) }),
          ...(expected_lsn !== undefined && { expectedLsn: integer(expected_lsn) }),
        });
        return { first_lsn: ack.firstLsn, next_lsn: ack.nextLsn, deduplicated: ack.deduplicated };
      },
      close_producer: (step) => found(this.#producers, step["producer"]).close(),
      produce_many: (step) => this.#produceMany(step),
      background: async (step, names) => {
        const job = this.steps(step["steps"] as Step[], names);
        job.catch(() => {});
        this.#jobs.set(text(step["as"]), job);
      },
      join: async (step) => {
        await found(this.#jobs, step["job"]);
      },
      repeat: async (step, names) => {
        for (let turn = 0; turn < Number(step["times"]); turn++) {
          await this.steps(step["steps"] as Step[], names.turn(turn));
        }
      },
      control: (step) => this.#ask(step),
      wait_tail: async (step) => {
        const least = integer(step["at_least"]);
        const log = text(step["log"]);
        await this.#until(`a tail of ${least}`, async () => (await client.tail(log)).tailLsn >= least);
      },
    };
  }

  async #consume(step: Step): Promise<Members> {
    const stored = new Stored(text(step["counting"] ?? ""));
    const count = Number(step["count"]);
    let lives = 0;
    for (let length = 1; stored.applied < count; ) {
      lives++;
      const before = stored.cursor;
      const start = before === undefined ? this.#scanOptions(step) : { ...logId(step["log_id"]), cursor: before };
      const follower = this.#client.follow(selector(step), { ...start, signal: this.#signal });
      try {
        for (let taken = 1; taken <= length && stored.applied < count; taken++) {
          const event = await within(PATIENCE_MS, follower.next());
          if (event.done === true) {
            throw new Error("the follower has ended");
          }
          if (taken < length || lives % 2 === 1) {
            stored.store(event.value);
          }
        }
      } finally {
        await follower.close();
      }
      length = stored.cursor === before ? length + 1 : 1;
    }
    const { applied, twice, skipped, gaps } = stored;
    return { applied, twice, skipped, gaps, lives };
  }

  async #session(step: Step): Promise<Members> {
    const session = this.#client.session({ signal: this.#signal });
    const sent = [];
    let failure: unknown;
    for (const request of list(step["requests"])) {
      try {
        sent.push(await session.send(batch(request as Members)));
      } catch (error) {
        // The session has failed meanwhile: the acks tell why.
        failure = error;
        break;
      }
    }
    const acks: Members[] = [];
    try {
      await session.close();
    } catch (error) {
      failure = error;
    }
    for (const { ack } of sent) {
      try {
        acks.push(batchResult(await ack));
      } catch {
        break;
      }
    }
    if (failure === undefined) {
      return { acks };
    }
    if (!(failure instanceof WaldError)) {
      throw failure;
    }
    const named = failure.facts["request_id"];
    return { acks, error: { ...errorResult(failure), ...(named !== undefined && { request: BigInt(named) }) } };
  }

  async #produceMany(step: Step): Promise<Members> {
    const producer = found(this.#producers, step["producer"]);
    const inFlight = Number(step["in_flight"]);
    const acks: Promise<bigint>[] = [];
    for (let index = 0; index < Number(step["count"]); index++) {
      if (index >= inFlight) {
        await acks[index - inFlight];
      }
      const { ack } = await producer.send(`${text(step["prefix"])}${index}`);
      const lsn = ack.then(({ firstLsn }) => firstLsn);
      lsn.catch(() => {});
      acks.push(lsn);
    }
    const lsns = await Promise.all(acks);
    const ascend = lsns.every((lsn, index) => index === 0 || lsn > (lsns[index - 1] ?? lsn));
    return { acked: lsns.length, lsns_ascend: ascend };
  }

  async #ask({ do: _, action, ...more }: Step): Promise<void> {
    const body = JSON.stringify(more, (__, value: unknown) => (typeof value === "bigint" ? Number(value) : value));
    const answer = await fetch(`${this.#control}/${text(action)}`, { method: "POST", body });
    if (!answer.ok) {
      throw new Error(`${text(action)}: ${answer.status} ${await answer.text()}`);
    }
    await answer.arrayBuffer();
  }

  #scanOptions(step: Step): ScanOptions {
    const { cursor, until_lsn, max_records, log_id } = step;
    return {
      ...start(step),
      ...logId(log_id),
      ...(cursor !== undefined && { cursor: found(this.#cursors, cursor) }),
      ...(until_lsn !== undefined && { untilLsn: integer(until_lsn) }),
      ...(max_records !== undefined && { maxRecords: integer(max_records) }),
    };
  }

  #seen({ follower, records: seen, gaps, caughtUp = false }: Following): Members {
    const { cursor } = follower;
    const came = { records: [...seen], gaps: [...gaps], caught_up: caughtUp };
    if (cursor === undefined) {
      return came;
    }
    const name = Buffer.from(cursor).toString("base64");
    this.#cursors.set(name, cursor);
    return { ...came, cursor: name };
  }

  async #until(what: string, holds: () => Promise<boolean>): Promise<void> {
    const deadline = performance.now() + PATIENCE_MS;
    while (!(await holds())) {
      this.#signal.throwIfAborted();
      if (performance.now() > deadline) {
        throw new Error(`no ${what} within ${PATIENCE_MS} ms`);
      }
      await new Promise((resolve) => setTimeout(resolve, 10));
    }
  }
}

/** Takes the events until the end. */
async function collect(following: Following): Promise<void> {
  for await (const { gaps, batches, caughtUp } of following.follower) {
    following.gaps.push(...gaps.map(gapResult));
    for (const { log, records: some } of batches) {
      following.records.push(...some.map((each) => ({ log, ...recordResult(each) })));
    }
    following.caughtUp ||= caughtUp;
  }
}

/** Waits for a promise, at most `ms` milliseconds. */
async function within<T>(ms: number, coming: Promise<T>): Promise<T> {
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(new Error(`nothing came within ${ms} ms`)), ms);
  });
  return Promise.race([coming, late]).finally(() => clearTimeout(timer));
}

function selector(step: Step): Selector {
  if (step["all"] === true) {
    return { all: true };
  }
  return step["prefix"] === undefined ? text(step["log"]) : { prefix: text(step["prefix"]) };
}

function found<T>(kept: Map<string, T>, name: Value): T {
  const value = kept.get(text(name));
  if (value === undefined) {
    throw new Error(`nothing is called ${text(name)}`);
  }
  return value;
}
