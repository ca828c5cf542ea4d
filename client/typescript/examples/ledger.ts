/**
 * usage: ledger.js DIR PREFIX COUNT
 *
 * A ledger that may be killed at any moment, and started again: two producers append COUNT transfers
 * exactly once, and a follower keeps the balances. Each keeps its state in one file of DIR, always together
 * with its effects. Prints the balances when all transfers are applied.
 */
import { randomBytes } from "node:crypto";
import { open, readFile, rename } from "node:fs/promises";

import { Client } from "../src/index.js";

interface Transfer {
  from: string;
  to: string;
  amount: number;
}

const [directory = ".", prefix = "ledger/", total = "1000"] = process.argv.slice(2);
const count = Number(total);

/** The transfers are the same in every run: a repeated transfer has the same content. */
function transfer(number: number): Transfer {
  return {
    from: `account${(number * 7) % 10}`,
    to: `account${(number * 3 + 1) % 10}`,
    amount: ((number * 13) % 100) + 1,
  };
}

async function load<T>(file: string, first: T): Promise<T> {
  return readFile(file, "utf8").then((text) => JSON.parse(text) as T, () => first);
}

/** All of it or nothing, and on the device. */
async function store(file: string, state: unknown): Promise<void> {
  const draft = await open(`${file}.new`, "w");
  await draft.writeFile(JSON.stringify(state));
  await draft.sync();
  await draft.close();
  await rename(`${file}.new`, file);
}

async function produce(client: Client, half: number): Promise<void> {
  const file = `${directory}/producer${half}.json`;
  const state = await load(file, { id: randomBytes(8).toString("hex"), logId: "", acked: 0 });
  const producer = await client.producer(`${prefix}${half}`, {
    id: state.id,
    firstSequence: BigInt(state.acked),
    ...(state.logId !== "" && { logId: BigInt(state.logId) }),
  });
  // Before the first batch: without it the next start would be another producer.
  state.logId = String(producer.logId);
  await store(file, state);
  const sent = [];
  const last = count / 2 - 1;
  for (let number = state.acked; number <= last; number++) {
    sent.push(await producer.send(JSON.stringify(transfer(2 * number + half))));
    await new Promise((resolve) => setTimeout(resolve, 1));
    while (sent.length > 32 || (sent.length > 0 && number === last)) {
      await sent.shift()?.ack;
      state.acked++;
      if (state.acked % 20 === 0 || sent.length === 0) {
        await store(file, state);
      }
    }
  }
  await producer.close();
}

async function follow(client: Client): Promise<{ applied: number; balances: Record<string, number> }> {
  const file = `${directory}/ledger.json`;
  const state = await load(file, { cursor: "", applied: 0, balances: {} as Record<string, number> });
  if (state.applied >= count) {
    return state;
  }
  const from = state.cursor === "" ? {} : { cursor: Buffer.from(state.cursor, "base64") };
  for await (const event of client.follow({ prefix }, from)) {
    if (event.gaps.length > 0) {
      throw new Error(`records are missing: ${event.gaps.map(({ log }) => log).join()}`);
    }
    for (const record of event.batches.flatMap(({ records }) => records)) {
      const { from, to, amount } = JSON.parse(record.text()) as Transfer;
      state.balances[from] = (state.balances[from] ?? 0) - amount;
      state.balances[to] = (state.balances[to] ?? 0) + amount;
      state.applied++;
    }
    state.cursor = Buffer.from(event.cursor).toString("base64");
    // Effects and cursor together.
    await store(file, state);
    if (state.applied >= count) {
      break;
    }
  }
  return state;
}

const client = await Client.fromEnv();
const [{ applied, balances }] = await Promise.all([follow(client), produce(client, 0), produce(client, 1)]);
console.log(JSON.stringify({ applied, balances }));
await client.close();
