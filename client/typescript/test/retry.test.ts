import assert from "node:assert/strict";
import test from "node:test";

import { Code, ConnectError } from "@connectrpc/connect";

import { lostError, timeoutError, toWaldError, type WaldError } from "../src/errors.js";
import { Client } from "../src/index.js";
import { batchGuards, guards } from "../src/messages.js";
import { call, DEFAULT_RETRY, DEFAULT_TIMEOUT_MS, mayRepeat, pauseMs, type Plan, type Repeat } from "../src/retry.js";
import { Fake, gate, refusal, retryAfter } from "./fake.js";

const starting = (): WaldError => toWaldError(refusal(Code.Unavailable, "STARTING"), "WRITE");
const mismatch = (): WaldError =>
  toWaldError(refusal(Code.FailedPrecondition, "POSITION_MISMATCH", "NOT_APPLIED", "NEVER"), "WRITE");
const plan: Plan = {
  policy: { maxAttempts: 5, firstPauseMs: 1, maxPauseMs: 2 },
  repeat: "HARMFUL",
  access: "WRITE",
  timeoutMs: 1_000,
};

test("what is repeated after which failure", () => {
  const lost = lostError("WRITE", "");
  const journal = toWaldError(refusal(Code.Internal, "JOURNAL_FAILED", "UNKNOWN", "SAFE_WITH_CONDITION"), "WRITE");
  const busy = toWaldError(refusal(Code.ResourceExhausted, "BUSY", "NOT_APPLIED", "SAFE"), "WRITE");
  const between = toWaldError(new ConnectError("", Code.Unavailable, { "grpc-status": "14" }), "WRITE");
  const table: [WaldError, Record<Repeat, boolean>][] = [
    [starting(), { HARMLESS: true, GUARDED: true, HARMFUL: true }],
    [busy, { HARMLESS: true, GUARDED: true, HARMFUL: true }],
    [lost, { HARMLESS: true, GUARDED: true, HARMFUL: false }],
    [between, { HARMLESS: true, GUARDED: true, HARMFUL: false }],
    [journal, { HARMLESS: true, GUARDED: true, HARMFUL: false }],
    [timeoutError("WRITE", ""), { HARMLESS: true, GUARDED: true, HARMFUL: false }],
    [mismatch(), { HARMLESS: false, GUARDED: false, HARMFUL: false }],
  ];
  for (const [error, expected] of table) {
    for (const repeat of ["HARMLESS", "GUARDED", "HARMFUL"] as const) {
      assert.equal(mayRepeat(repeat, error), expected[repeat], `${error.message}, ${repeat}`);
    }
  }
});

test("which conditions hold at most once", () => {
  assert.equal(guards({ expectedLsn: 0n }), true);
  assert.equal(guards({ mustNotExist: true }), true);
  assert.equal(guards({ producer: { id: "p", epoch: 0n, sequence: 0n } }), true);
  assert.equal(guards({ mustExist: true, writerEpoch: 1n, logId: 1n }), false);
  const plain = { log: "a", records: ["x"] };
  assert.equal(batchGuards({ batches: [plain, { ...plain, log: "b", expectedLsn: 3n }] }), true);
  assert.equal(batchGuards({ batches: [plain], checks: [{ log: "b", expectedLsn: 3n }] }), false);
  assert.equal(batchGuards({ batches: [plain], cursors: [{ log: "b", cursor: "c", lsn: 4n, expectedLsn: 3n }] }), true);
  assert.equal(batchGuards({ batches: [plain], cursors: [{ log: "b", cursor: "c", lsn: 3n, expectedLsn: 3n }] }), false);
});

test("pauses double with jitter up to the longest, or as the server asks", () => {
  for (let failures = 1; failures <= 40; failures++) {
    const full = Math.min(50 * 2 ** (failures - 1), 2_000);
    const pause = pauseMs(DEFAULT_RETRY, failures, starting());
    assert.ok(pause >= full / 2 && pause <= full, `${pause} after ${failures}`);
  }
  const patient = toWaldError(retryAfter(refusal(Code.Unavailable, "STARTING"), 9_000), "WRITE");
  assert.equal(pauseMs(DEFAULT_RETRY, 1, patient), 9_000);
});

test("the deadline decides unless told otherwise", () => {
  let pauses = 0;
  for (let failures = 1; failures < DEFAULT_RETRY.maxAttempts; failures++) {
    pauses += pauseMs(DEFAULT_RETRY, failures, starting());
  }
  assert.ok(pauses >= DEFAULT_TIMEOUT_MS, `${pauses}`);
});

test("call that was not applied is repeated until it succeeds", async () => {
  let calls = 0;
  const answer = await call(plan, async () => {
    if (++calls < 4) {
      throw starting();
    }
    return "done";
  });
  assert.deepEqual([answer, calls], ["done", 4]);
});

test("refusal after an unknown outcome stays unknown", async () => {
  const errors = [lostError("WRITE", "reset"), mismatch()];
  await assert.rejects(
    call({ ...plan, repeat: "GUARDED" }, async () => {
      throw errors.shift();
    }),
    { reason: "POSITION_MISMATCH", outcome: "UNKNOWN", retry: "NEVER" },
  );
  assert.equal(errors.length, 0);
});

test("attempts end at their number, at the deadline, and when cancelled", async () => {
  let calls = 0;
  const fail = async (): Promise<never> => {
    calls++;
    throw starting();
  };
  await assert.rejects(call(plan, fail), { reason: "STARTING", outcome: "NOT_APPLIED" });
  assert.equal(calls, 5);
  calls = 0;
  const slow = { maxAttempts: 100, firstPauseMs: 60_000, maxPauseMs: 60_000 };
  await assert.rejects(call({ ...plan, policy: slow }, fail), { reason: "STARTING" });
  assert.equal(calls, 1);
  const cancelled = AbortSignal.abort();
  calls = 0;
  await assert.rejects(call({ ...plan, signal: cancelled }, fail), { kind: "CANCELLED", outcome: "NOT_APPLIED" });
  assert.equal(calls, 0);
});

test("plain append whose connection breaks is sent once", async () => {
  const fake = await Fake.start();
  const client = fake.client();
  fake.after = () => fake.drop();
  await assert.rejects(client.append("log", "a"), { kind: "CONNECTION_LOST", outcome: "UNKNOWN" });
  assert.deepEqual(fake.records, ["a"]);
  await client.close();
  await fake.stop();
});

test("append with expected lsn is sent again after a lost connection", async () => {
  const fake = await Fake.start();
  const client = fake.client();
  fake.after = () => fake.drop();
  await assert.rejects(client.append("log", "a", { expectedLsn: 0n }), {
    reason: "POSITION_MISMATCH",
    outcome: "UNKNOWN",
  });
  assert.deepEqual(fake.records, ["a"]);
  await client.close();
  await fake.stop();
});

for (const ms of [Infinity, 2 ** 31]) {
  test(`limit of ${ms} ms is no short one`, { timeout: 10_000 }, async () => {
    const fake = await Fake.start();
    const slowly = (): Promise<void> => new Promise((resolve) => setTimeout(resolve, 50));
    const limits = { timeoutMs: ms, silenceTimeoutMs: ms, connectTimeoutMs: ms, keepaliveIntervalMs: ms, keepaliveTimeoutMs: ms };
    fake.before = slowly;
    fake.scan = async function* () {
      await slowly();
      yield { cursor: Uint8Array.of(1), caughtUp: true };
    };
    for (const shareAppends of [true, false]) {
      const client = fake.client({ ...limits, shareAppends });
      await client.append("log", "a");
      await client.close();
    }
    const client = fake.client(limits);
    const producer = await client.producer("log", { retryTimeoutMs: ms });
    await producer.append("b");
    await producer.close();
    const interruptions: unknown[] = [];
    const follower = client.follow("log", { onInterrupted: (error) => interruptions.push(error) });
    assert.equal((await follower.next()).value?.caughtUp, true);
    assert.deepEqual(interruptions, []);
    assert.deepEqual(fake.records, ["a", "a", "b"]);
    await client.close();
    await fake.stop();
  });
}

test("close waits for a call that pauses", { timeout: 10_000 }, async () => {
  const fake = await Fake.start();
  const { endpoint } = fake;
  await fake.stop();
  const client = Client.lazy(endpoint);
  let settled = false;
  const done = assert.rejects(client.append("log", "a", { timeoutMs: 500 }), { kind: "NOT_SENT" }).finally(() => (settled = true));
  await client.close();
  assert.ok(settled);
  await done;
});

test("call of a closed client fails at once", { timeout: 5_000 }, async () => {
  const fake = await Fake.start();
  const client = fake.client({ retry: { firstPauseMs: 60_000, maxPauseMs: 60_000 }, timeoutMs: 120_000 });
  await client.append("log", "a");
  await client.close();
  const closed = { kind: "USAGE", message: "the client is closed", outcome: "NOT_APPLIED", retry: "NEVER" };
  await assert.rejects(client.append("log", "b"), closed);
  await assert.rejects(client.tail("log"), closed);
  await assert.rejects(client.follow("log").next(), closed);
  await assert.rejects(client.producer("log"), closed);
  const { ack } = await client.session().send({ batches: [{ log: "log", records: ["c"] }] });
  await assert.rejects(ack, closed);
  assert.deepEqual(fake.records, ["a"]);
  await fake.stop();
});

test("deadline and signal end a call underway", async () => {
  const fake = await Fake.start();
  const client = fake.client();
  const end = new AbortController();
  const { opened, open } = gate();
  await client.append("log", "first");
  fake.before = () => opened;
  await assert.rejects(client.append("log", "a", { timeoutMs: 30 }), { kind: "TIMEOUT", outcome: "UNKNOWN" });
  fake.before = () => {
    end.abort();
    return opened;
  };
  await assert.rejects(client.append("log", "a", { signal: end.signal }), { kind: "CANCELLED", outcome: "UNKNOWN" });
  open();
  await client.close();
  await fake.stop();
});
