/**
 * usage: ledger.js DIR PREFIX COUNT
 *
 * A ledger that may be killed at any moment, and started again: two producers append COUNT transfers
 * exactly once, and a follower keeps the balances. Each keeps its state in one file of DIR, always together
 * with its effects. Prints the balances when all transfers are applied.
 */
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

async function produce(client: Client, half: number): Promise<void> {
  const state = `${directory}/producer${half}.state`;
  const producer = await client.durableProducer(`${prefix}${half}`, { state });
  for (let number = Number(producer.nextSequence); number < count / 2; number++) {
    await producer.appendBatch(JSON.stringify(transfer(2 * number + half)));
  }
  await producer.close();
}

interface Ledger {
  applied: number;
  balances: Record<string, number>;
}

async function follow(client: Client): Promise<Ledger> {
  const follower = await client.durableFollower({ prefix }, { state: `${directory}/ledger.state` });
  const { effects } = follower;
  const ledger: Ledger = effects ? JSON.parse(new TextDecoder().decode(effects)) : { applied: 0, balances: {} };
  const { balances } = ledger;
  if (ledger.applied >= count) {
    return ledger;
  }
  for await (const batches of follower) {
    for (const record of batches.flatMap(({ records }) => records)) {
      const { from, to, amount } = JSON.parse(record.text()) as Transfer;
      balances[from] = (balances[from] ?? 0) - amount;
      balances[to] = (balances[to] ?? 0) + amount;
      ledger.applied++;
    }
    // Together with the cursor behind these records.
    await follower.keep(JSON.stringify(ledger));
    if (ledger.applied >= count) {
      break;
    }
  }
  return ledger;
}

const client = await Client.fromEnv();
const [{ applied, balances }] = await Promise.all([follow(client), produce(client, 0), produce(client, 1)]);
console.log(JSON.stringify({ applied, balances }));
await client.close();
