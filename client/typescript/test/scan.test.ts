import assert from "node:assert/strict";
import test, { beforeEach, afterEach } from "node:test";

import { Code } from "@connectrpc/connect";

import type { ScanRequest } from "../src/gen/wald/v1/wal_pb.js";
import type { Client, ScanEvent } from "../src/index.js";
import { Fake, refusal } from "./fake.js";

let fake: Fake;
let client: Client;

beforeEach(async () => {
  fake = await Fake.start();
  client = fake.client();
});

afterEach(async () => {
  await client.close();
  await fake.stop();
});

const message = (lsn: number, caughtUp = false) => ({
  batches: [{ log: "log", firstLsn: BigInt(lsn), records: [{ payload: { case: "data" as const, value: Buffer.from(`${lsn}`) } }] }],
  caughtUp,
  cursor: Uint8Array.of(lsn + 1),
});

const forever = (signal: AbortSignal): Promise<void> =>
  new Promise((resolve) => signal.addEventListener("abort", () => resolve()));

const lsns = (events: ScanEvent[]): bigint[] =>
  events.flatMap(({ batches }) => batches.flatMap(({ records }) => records.map(({ lsn }) => lsn)));

/** Where a request begins, if by cursor. */
const cursorOf = ({ start }: ScanRequest): number | undefined => (start.case === "cursor" ? start.value[0] : undefined);

test("follower resumes by its cursor: nothing twice, nothing left out", async () => {
  const begins: (number | undefined)[] = [];
  fake.scan = async function* (request) {
    const begin = cursorOf(request);
    begins.push(begin);
    yield message(begin ?? 0);
    yield message((begin ?? 0) + 1);
    throw refusal(Code.Unavailable, "DRAINING");
  };
  const interrupted: string[] = [];
  const events: ScanEvent[] = [];
  for await (const event of client.follow("log", { onInterrupted: (error) => interrupted.push(error.reason ?? "") })) {
    events.push(event);
    if (events.length === 6) {
      break;
    }
  }
  assert.deepEqual(lsns(events), [0n, 1n, 2n, 3n, 4n, 5n]);
  assert.deepEqual(begins, [undefined, 2, 4]);
  assert.deepEqual(interrupted, ["DRAINING", "DRAINING"]);
});

test("server that ends a follow is asked again", async () => {
  fake.scan = async function* (request) {
    yield message(cursorOf(request) ?? 0);
  };
  const events: ScanEvent[] = [];
  for await (const event of client.follow("log")) {
    events.push(event);
    if (events.length === 3) {
      break;
    }
  }
  assert.deepEqual(lsns(events), [0n, 1n, 2n]);
});

test("cursor of an event covers it and nothing after it", async () => {
  fake.scan = async function* (_, signal) {
    yield {
      gaps: [{ log: "log", fromLsn: 0n, toLsn: 3n, reason: 1 }],
      batches: [...message(3).batches, ...message(4).batches],
      caughtUp: true,
      tailLsn: 5n,
      cursor: Uint8Array.of(9),
    };
    yield message(5);
    await forever(signal);
  };
  const follower = client.follow("log", { cursor: Uint8Array.of(1) });
  const taken: unknown[] = [];
  for await (const event of follower) {
    assert.deepEqual(follower.cursor, event.cursor);
    taken.push([event.gaps.length, lsns([event]), event.caughtUp, event.cursor[0]]);
    if (taken.length === 2) {
      break;
    }
  }
  assert.deepEqual(taken, [[1, [3n, 4n], true, 9], [0, [5n], false, 6]]);
});

test("heartbeat moves the cursor and is no event", async () => {
  fake.scan = async function* (_, signal) {
    yield { cursor: Uint8Array.of(5) };
    yield message(0);
    await forever(signal);
  };
  const follower = client.follow({ all: true });
  const first = await follower.next();
  assert.equal(first.value?.batches.length, 1);
  assert.equal(follower.cursor?.[0], 1);
  await follower.close();
});

test("follower that got only heartbeats begins again at its start", async () => {
  const starts: ScanRequest["start"][] = [];
  fake.scan = async function* ({ start }) {
    starts.push(start);
    if (starts.length === 1) {
      yield { recoveryEpoch: 1n };
      throw refusal(Code.Unavailable, "DRAINING");
    }
    yield message(4);
  };
  const follower = client.follow("log", { lsn: 4n });
  const first = await follower.next();
  assert.equal(first.value?.batches.length, 1);
  assert.deepEqual(starts, [
    { case: "lsn", value: 4n },
    { case: "lsn", value: 4n },
  ]);
  await follower.close();
});

test("silent scan counts as lost", async () => {
  await client.close();
  client = fake.client({ silenceTimeoutMs: 100 });
  let opened = 0;
  fake.scan = async function* (_, signal) {
    if (++opened < 3) {
      yield { cursor: Uint8Array.of(1) };
      await forever(signal);
    }
    yield message(7);
  };
  const kinds: string[] = [];
  const follower = client.follow("log", { onInterrupted: ({ kind }) => kinds.push(kind) });
  const first = await follower.next();
  assert.equal(first.value?.batches.length, 1);
  assert.ok(opened >= 3);
  assert.deepEqual([...new Set(kinds)], ["TIMEOUT"]);
  await follower.close();
});

test("follower that has begun does not give up", async () => {
  let opened = 0;
  fake.scan = async function* () {
    if (++opened === 1) {
      yield message(0);
    } else if (opened === 20) {
      yield message(1);
      return;
    }
    throw refusal(Code.Unavailable, "STARTING");
  };
  const follower = client.follow("log");
  const events = [await follower.next(), await follower.next()];
  assert.deepEqual(lsns(events.map(({ value }) => value)), [0n, 1n]);
  await follower.close();
});

test("scan gives up after as many attempts as any call, and at once for good", async () => {
  fake.scan = async function* () {
    throw refusal(Code.Unavailable, "STARTING");
  };
  await assert.rejects(client.scan("log").next(), { reason: "STARTING" });
  assert.equal(fake.calls, 5);
  fake.scan = async function* () {
    throw refusal(Code.NotFound, "LOG_NOT_FOUND");
  };
  await assert.rejects(client.scan("log").next(), { reason: "LOG_NOT_FOUND", outcome: "NOT_APPLIED" });
  assert.equal(fake.calls, 6);
});

test("tail offset of one log becomes an lsn before the first connection", async () => {
  fake.records.push("a", "b", "c");
  const starts: ScanRequest["start"][] = [];
  fake.scan = async function* ({ start }) {
    starts.push(start);
    yield message(1);
  };
  const follower = client.follow("log", { last: 2 });
  await follower.next();
  assert.deepEqual(starts, [{ case: "lsn", value: 1n }]);
  await follower.close();
});

test("follower of any node leaves the tail to the node", async () => {
  const starts: ScanRequest["start"][] = [];
  fake.scan = async function* ({ start }) {
    starts.push(start);
    yield message(1);
  };
  const follower = client.follow("log", { last: 2, anyNode: true });
  await follower.next();
  assert.deepEqual(starts, [{ case: "tailOffset", value: 2n }]);
  // The owner's tail is above that of a copy, which would refuse it.
  assert.deepEqual(fake.methods, ["Scan"]);
  await follower.close();
});

test("loss before the first message of a scan of many logs is an error", async () => {
  fake.scan = async function* () {
    fake.drop();
    yield message(0);
  };
  await assert.rejects(client.follow({ all: true }, { last: 0 }).next(), { kind: "CONNECTION_LOST" });
});

test("bounded scan that resumes asks for what is left", async () => {
  const bounds: bigint[] = [];
  fake.scan = async function* (request) {
    bounds.push(request.maxRecords);
    yield message(cursorOf(request) ?? 0);
    throw refusal(Code.Unavailable, "DRAINING");
  };
  const events: ScanEvent[] = [];
  for await (const event of client.scan("log", { maxRecords: 3 })) {
    events.push(event);
  }
  assert.deepEqual(lsns(events), [0n, 1n, 2n]);
  assert.deepEqual(bounds, [3n, 2n, 1n]);
});

for (const maxRecords of [0, 0n]) {
  test(`bound of ${typeof maxRecords} 0 is none`, async () => {
    fake.scan = async function* () {
      yield message(0);
      yield message(1);
    };
    const events: ScanEvent[] = [];
    for await (const event of client.scan("log", { maxRecords })) {
      events.push(event);
    }
    assert.deepEqual(lsns(events), [0n, 1n]);
  });
}

test("close and signal end a next underway", async () => {
  fake.scan = async function* (_, signal) {
    await forever(signal);
  };
  const closed = client.follow("log");
  const next = closed.next();
  await closed.close();
  assert.deepEqual(await next, { done: true, value: undefined });
  const end = new AbortController();
  const cancelled = client.follow("log", { signal: end.signal }).next();
  end.abort();
  assert.equal((await cancelled).done, true);
});
