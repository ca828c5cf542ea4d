/** A follower that continues after a restart of its program. */
import { create } from "@bufbuild/protobuf";

import { missingError } from "./errors.js";
import { FollowerStateSchema, StateKind } from "./gen/wald/v1/state_pb.js";
import type { Batch } from "./messages.js";
import type { Follower, Gap, ScanOptions } from "./scan.js";
import { MessageState, type State } from "./state.js";

/**
 * Settings of a {@link DurableFollower}. They name the start only until a state has a cursor.
 *
 * A start at the tail (`last`) thus holds only from the first {@link DurableFollower.keep} on. Until then each start of
 * the program takes the tail of that moment, and skips records that were appended in between.
 */
export interface DurableFollowerOptions extends ScanOptions {
  /** Place of the follower's state. Text is the path of a file, as for {@link FileState}. */
  state: State | string;
}

/**
 * Follows logs over restarts of the server **and of the program**. It keeps the effects of records together with the
 * cursor behind them, so each record takes effect once.
 *
 * An iteration delivers records, all up to a cursor. A gap throws a {@link WaldError} of kind MISSING with the `gap`; the next
 * iteration continues behind the gap. Leaving the loop closes the follower.
 *
 * The effects are bytes in a form of the program's own, and each {@link keep} writes all of them. A program whose effects
 * are in a database uses {@link Client.follow} instead, and stores the cursor of each event in the same transaction.
 */
export class DurableFollower implements AsyncIterableIterator<readonly Batch[]> {
  readonly #follower: Follower;
  readonly #state: MessageState<typeof FollowerStateSchema>;
  #effects: Uint8Array | undefined;
  #cursor: Uint8Array | undefined;
  /** Gaps and records that came and were not returned. */
  readonly #gaps: Gap[] = [];
  #batches: Batch[] = [];
  /** The cursor behind them. */
  #reached: Uint8Array | undefined;
  /** One `next` at a time. */
  #turn: Promise<unknown> = Promise.resolve();
  /** One save at a time. */
  #saving: Promise<unknown> = Promise.resolve();

  private constructor(
    follower: Follower,
    state: MessageState<typeof FollowerStateSchema>,
    effects: Uint8Array | undefined,
  ) {
    this.#follower = follower;
    this.#state = state;
    this.#effects = effects;
    this.#cursor = follower.cursor;
  }

  /** @internal */
  static async open(
    { state, ...options }: DurableFollowerOptions,
    follow: (options: ScanOptions) => Follower,
  ): Promise<DurableFollower> {
    const place = new MessageState(FollowerStateSchema, StateKind.FOLLOWER, state);
    const found = await place.load();
    const hasCursor = found !== undefined && found.cursor.length > 0;
    const behind = hasCursor && { lsn: undefined, timestampUs: undefined, time: undefined, last: undefined, cursor: found.cursor };
    return new DurableFollower(follow({ ...options, ...behind }), place, found?.effects);
  }

  /** The effects that were kept last; undefined if there are none yet. */
  get effects(): Uint8Array | undefined {
    return this.#effects;
  }

  /** Resumes behind the last records that `next` has returned; before the first ones, where it began. Undefined if that was no cursor. */
  get cursor(): Uint8Array | undefined {
    return this.#cursor;
  }

  /**
   * Keeps the effects of all records that were returned, together with the cursor behind these records.
   *
   * @throws WaldError of kind STATE if they could not be saved. The state is then the earlier or the new one.
   */
  async keep(effects: Uint8Array | string): Promise<void> {
    const kept = typeof effects === "string" ? new TextEncoder().encode(effects) : Uint8Array.from(effects);
    const cursor = this.#cursor ?? new Uint8Array();
    const state = create(FollowerStateSchema, { cursor, effects: kept, kind: StateKind.FOLLOWER });
    const saved = this.#saving.then(async () => {
      await this.#state.save(state);
      this.#effects = kept;
    });
    this.#saving = saved.catch(() => {});
    return saved;
  }

  /**
   * The next records, in order.
   *
   * @throws WaldError that ends the follower; of kind MISSING at a gap, which does not end it.
   */
  next(): Promise<IteratorResult<readonly Batch[]>> {
    const turn = this.#turn.then(() => this.#next());
    this.#turn = turn.catch(() => {});
    return turn;
  }

  /** Closes the follower. */
  async return(): Promise<IteratorResult<readonly Batch[]>> {
    await this.close();
    return { done: true, value: undefined };
  }

  /** Closes the follower once its saves are done. A `next` underway says that it is done. */
  async close(): Promise<void> {
    await this.#follower.close();
    this.#gaps.length = 0;
    this.#reached = undefined;
    await this.#saving;
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  async #next(): Promise<IteratorResult<readonly Batch[]>> {
    for (;;) {
      const gap = this.#gaps.shift();
      if (gap !== undefined) {
        throw missingError(gap);
      }
      if (this.#reached !== undefined) {
        const value = this.#batches;
        this.#cursor = this.#reached;
        this.#reached = undefined;
        this.#batches = [];
        if (value.length > 0) {
          return { done: false, value };
        }
      }
      const { done, value: event } = await this.#follower.next();
      if (done) {
        return { done: true, value: undefined };
      }
      this.#gaps.push(...event.gaps);
      this.#batches.push(...event.batches);
      if (event.cursor.length > 0) {
        this.#reached = event.cursor;
      }
    }
  }
}
