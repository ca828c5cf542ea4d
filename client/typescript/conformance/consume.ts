/** The state that a consumer has stored: effects and cursor, always together. */
import type { ScanEvent } from "../src/index.js";
import { gapResult } from "./inputs.js";
import type { Members } from "./values.js";

export class Stored {
  readonly #counting: string;
  /** The lsn that is due in each log. */
  readonly #next = new Map<string, bigint>();
  cursor: Uint8Array | undefined;
  applied = 0;
  readonly twice: string[] = [];
  readonly skipped: string[] = [];
  readonly gaps: Members[] = [];

  constructor(counting: string) {
    this.#counting = counting;
  }

  store({ gaps, batches, cursor }: ScanEvent): void {
    this.cursor = cursor;
    for (const gap of gaps.filter(({ log }) => log.startsWith(this.#counting))) {
      this.gaps.push(gapResult(gap));
      this.#reach(gap.log, gap.toLsn ?? 0n);
    }
    for (const { log, records } of batches.filter(({ log }) => log.startsWith(this.#counting))) {
      for (const { lsn } of records) {
        const due = this.#next.get(log) ?? 0n;
        if (lsn < due) {
          this.twice.push(`${log} ${lsn}`);
        } else if (lsn > due) {
          this.skipped.push(`${log} ${lsn}`);
        }
        this.#reach(log, lsn + 1n);
        this.applied++;
      }
    }
  }

  #reach(log: string, lsn: bigint): void {
    const due = this.#next.get(log) ?? 0n;
    this.#next.set(log, lsn > due ? lsn : due);
  }
}
