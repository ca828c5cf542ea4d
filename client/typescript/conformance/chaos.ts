/** Producers and followers that continue through all faults of a chaos run. */
import { existsSync } from "node:fs";

import { Client, type ProducerAck, type Sent } from "../src/index.js";

const IN_FLIGHT = 32;

/** `chaos-producer LOG ID RATE`: appends until the file `stop` is there. */
export async function produce(stop: string, args: string[]): Promise<void> {
  const [log = "", id = "", rate = "1"] = args;
  // The daemon may be down just now.
  const client = Client.lazyFromEnv({ timeoutMs: 60_000, retry: { maxAttempts: 1_000 } });
  const producer = await client.producer(log, { id, epoch: 1n });
  const sent: Sent<ProducerAck>[] = [];
  const began = performance.now();
  let total = 0;
  while (!existsSync(stop)) {
    const early = began + (total * 1_000) / Number(rate) - performance.now();
    if (early > 0) {
      await new Promise((resolve) => setTimeout(resolve, early));
    }
    if (sent.length >= IN_FLIGHT) {
      await sent.shift()?.ack;
    }
    sent.push(await producer.send(`${id}:${total}`));
    total++;
  }
  await Promise.all(sent.map(({ ack }) => ack));
  await producer.append(`END:${id}`);
  console.log(`${id} ${total}`);
  await client.close();
}

/** `chaos-follower PREFIX COUNT`: prints records until it has seen COUNT ends. */
export async function follow(args: string[]): Promise<void> {
  const [prefix = "", count = "1"] = args;
  const client = Client.lazyFromEnv({ timeoutMs: 60_000, retry: { maxAttempts: 1_000 } });
  let left = Number(count);
  for await (const event of client.follow({ prefix })) {
    for (const { log, fromLsn, toLsn, reason } of event.gaps) {
      console.log(`GAP ${log} ${fromLsn ?? ""} ${toLsn ?? ""} ${reason}`);
    }
    for (const { log, records } of event.batches) {
      for (const record of records) {
        const data = record.text();
        console.log(`${log} ${record.lsn} ${data}`);
        left -= data.startsWith("END:") ? 1 : 0;
      }
    }
    if (left <= 0) {
      break;
    }
  }
  await client.close();
}
