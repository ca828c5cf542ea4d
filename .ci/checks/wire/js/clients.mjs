// Well-behaved clients by grpc-js; .ci/checks/wire/go/clients.go has them by grpc-go: the same words, flags and results.
//
//   node clients.mjs sessions [-sessions N] [-messages N] [-bytes N] ADDRESS
//   node clients.mjs cancels [-calls N] [-group N] ADDRESS
//   node clients.mjs deadlines [-callers N] [-timeout MS] [-seconds S] ADDRESS

import { fileURLToPath } from "node:url";
import { setTimeout as pause } from "node:timers/promises";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const protos = fileURLToPath(new URL("../../../../proto", import.meta.url));
const loaded = loader.loadSync("wald/v1/wal.proto", { includeDirs: [protos], longs: Number, defaults: true });
const { WalService } = grpc.loadPackageDefinition(loaded).wald.v1;

const dial = (address) => new WalService(address, grpc.credentials.createInsecure());
const record = (size) => ({ data: Buffer.alloc(size) });
const request = (id, log, size) => ({ requestId: id, batch: { batches: [{ log, records: [record(size)] }] } });

/** Counts errors by their text. */
class Failures {
  counts;

  add(error) {
    this.counts ??= {};
    const text = `${grpc.status[error.code]} ${error.details}`.slice(0, 160);
    this.counts[text] = (this.counts[text] ?? 0) + 1;
  }
}

/** Sends messages as fast as flow control lets it; resolves when the last one is acked. */
async function session(service, log, messages, size, acked) {
  const stream = service.AppendSession();
  const ended = new Promise((resolve, reject) => {
    let expected = 0;
    stream.on("data", (ack) => {
      if (ack.requestId !== expected) stream.destroy(new Error(`ack ${ack.requestId} came instead of ${expected}`));
      expected += 1;
      acked.count += 1;
    });
    stream.on("end", resolve);
    stream.on("error", reject);
  });
  const send = async () => {
    for (let id = 0; id < messages && !stream.destroyed; id++) {
      if (!stream.write(request(id, log, size))) await new Promise((resolve) => stream.once("drain", resolve));
    }
    stream.end();
  };
  await Promise.race([ended, send().then(() => ended)]);
}

async function sessions({ sessions = 1, messages = 100_000, bytes = 1 }, address) {
  const service = dial(address);
  const failed = new Failures();
  const acked = { count: 0 };
  const began = performance.now();
  const one = (number) => session(service, `session-${number}`, messages, bytes, acked).catch((error) => failed.add(error));
  await Promise.all(Array.from({ length: sessions }, (_, number) => one(number)));
  return { acked: acked.count, seconds: (performance.now() - began) / 1000, failures: failed.counts };
}

const append = (service, log, size, options = {}) =>
  new Promise((resolve, reject) =>
    service.Append({ log, record: record(size) }, new grpc.Metadata(), options, (error, answer) => (error ? reject(error) : resolve(answer))),
  );

/** Maximum time until a session that lives gets its next ack, ms. A machine may stand still for seconds. */
const PATIENCE = 20_000;

/** A follower and a session that share a connection with other calls. */
class Neighbours {
  acks = 0;
  session = null;
  follower = null;

  static async beside(service) {
    await append(service, "shared", 1);
    const found = new Neighbours();
    const stream = service.AppendSession();
    stream.on("data", () => (found.acks += 1));
    stream.on("error", (error) => (found.session = error.message));
    const follower = service.Scan({ log: "shared", follow: true });
    follower.on("data", () => {});
    follower.on("error", (error) => (found.follower = error.message));
    let id = 0;
    found.sending = setInterval(() => stream.write(request(id++, "shared", 1)), 5);
    await pause(200);
    return found;
  }

  async result(calls, began, failed) {
    const acks = this.acks;
    const seconds = (performance.now() - began) / 1000;
    for (let waited = 0; waited < PATIENCE && this.acks === acks && !this.session; waited += 20) await pause(20);
    const { session, follower } = this;
    return { calls, seconds, failures: failed.counts, acks, acks_after: this.acks - acks, session, follower };
  }
}

/** Opens followers a group at a time and cancels each group at one moment. */
async function cancels({ calls = 1000, group = 100 }, address) {
  const service = dial(address);
  const shared = await Neighbours.beside(service);
  const failed = new Failures();
  const began = performance.now();
  for (let done = 0; done < calls; done += group) {
    const streams = Array.from({ length: group }, () => service.Scan({ log: "shared", follow: true }));
    const ended = streams.map(
      (stream) =>
        new Promise((resolve) => {
          stream.on("data", () => {});
          stream.on("error", (error) => {
            if (error.code !== grpc.status.CANCELLED) failed.add(error);
            resolve();
          });
        }),
    );
    await pause(20);
    for (const stream of streams) stream.cancel();
    await Promise.all(ended);
  }
  return shared.result(calls, began, failed);
}

/** Calls with a deadline that a pause of the daemon exceeds. */
async function deadlines({ callers = 64, timeout = 300, seconds = 4 }, address) {
  const service = dial(address);
  const shared = await Neighbours.beside(service);
  const failed = new Failures();
  const began = performance.now();
  let calls = 0;
  const caller = async () => {
    while (performance.now() - began < seconds * 1000) {
      calls += 1;
      await append(service, "deadline", 100, { deadline: Date.now() + timeout }).catch((error) => {
        if (error.code !== grpc.status.DEADLINE_EXCEEDED) failed.add(error);
      });
    }
  };
  await Promise.all(Array.from({ length: callers }, caller));
  return shared.result(calls, began, failed);
}

const [what, ...rest] = process.argv.slice(2);
const address = rest.pop();
const flags = {};
for (let at = 0; at < rest.length; at += 2) flags[rest[at].slice(1)] = Number(rest[at + 1]);
const result = await { sessions, cancels, deadlines }[what](flags, address);
// Calls in flight would keep the process alive.
process.stdout.write(`${JSON.stringify(result)}\n`, () => process.exit());
