/**
 * A producer that continues after a restart of its program.
 *
 * ```text
 *   appendBatch ──▶ kept in the state ──▶ sent ──▶ acked, and taken off the state
 *                          │                                 ▲
 *                          └── program killed ── next start ─┘
 * ```
 *
 * A batch is saved before it is sent, so the next start knows every batch that the server may have. The server
 * recognises the batches that it has by id, epoch and sequence.
 */
import { create, toBinary } from "@bufbuild/protobuf";

import { earlierFailed, stateError, toWaldError, usageError, WaldError } from "./errors.js";
import { ProducerStateSchema, StateKind, type ProducerState } from "./gen/wald/v1/state_pb.js";
import { LogBatchSchema, type LogBatch } from "./gen/wald/v1/wal_pb.js";
import { owned, protoRecord, type RecordInput } from "./messages.js";
import type { Producer, ProducerOptions } from "./producer.js";
import { MessageState, type State } from "./state.js";

/** Maximum number of batches that are kept and not acked. Each save writes all of them. */
const BATCHES_KEPT = 64;

/**
 * Settings of a {@link DurableProducer}. Once there is a state, `id`, `epoch`, `firstSequence` and `logId` come from
 * the state. At most 64 batches wait for their acks, also if `windowBatches` is larger.
 */
export interface DurableProducerOptions
  extends Omit<ProducerOptions, "lingerMs" | "maxBatchRecords" | "maxBatchBytes"> {
  /** Place of the producer's state. Text is the path of a file, as for {@link FileState}. */
  state: State | string;
}

/** @internal */
export interface DurableProducerSetup {
  log: string;
  options: DurableProducerOptions;
  /** Opens the producer that sends the batches. */
  produce: (options: ProducerOptions, onClose: () => void) => Promise<Producer>;
  onOpen: (producer: DurableProducer) => void;
  onClose: (producer: DurableProducer) => void;
}

/**
 * An exactly-once source of appends to one log, over restarts of the server **and of the program**.
 *
 * Each batch is kept in the state before it is sent. Once {@link appendBatch} has resolved, the batch will be in the
 * log once, and in its place: if the program ends before the ack, the next producer with the same state sends the
 * batch again. {@link nextSequence} is the place at which a program continues in its own input.
 *
 * A save costs about two flushes of the state's device, so larger batches are faster. **The first failure ends the
 * producer**, as it ends a {@link Producer}. A batch with a permanent refusal, such as one with a record that is too
 * large, stays in the state, and every later start fails with it: check the size of records before.
 *
 * The server forgets a producer that has been idle for longer than `producer_max_idle` (7 days unless the server
 * is configured otherwise). If no batch is in doubt, the producer goes on in a new epoch, and nobody notices. If the
 * state has batches that an earlier run may have appended, nobody can tell whether they are in the log, and every start
 * is refused (PRODUCER_EXPIRED) until somebody decides it with `walctl state settle`. For the same reason, never go back
 * to an old copy of a state.
 *
 * An ack counts at the durability that the log or the option `durability` asks for, and a batch is taken off the state
 * once it has its ack. With less than DURABLE, a crash of the server can lose batches that were acked. The producer is
 * then refused (PRODUCER_GAP), because the state no longer has them, unless the server has also forgotten the producer
 * since: the new epoch begins behind the hole, and nobody notices.
 */
export class DurableProducer {
  #producer: Producer;
  /** Opens the producer of the state's epoch. */
  readonly #reopen: (kept: ProducerState) => Promise<Producer>;
  /** The end of its last producer has closed it for the client, and it goes on. */
  readonly #onNextEpoch: () => void;
  readonly #state: MessageState<typeof ProducerStateSchema>;
  /** All batches without a known ack. */
  readonly #kept: ProducerState;
  /** Number of these batches, from the first one, that an earlier run may have sent. */
  #loaded: number;
  /** For each batch that was sent, from the first one: resolves once its ack or failure was taken. */
  #acks: Promise<void>[] = [];
  /** Batches are kept in the order of the calls, and saves come one after another. */
  #turn: Promise<unknown> = Promise.resolve();
  /** Ends the wait for the next ack or failure. */
  #wake = (): void => {};
  #failure: WaldError | undefined;
  #closing: Promise<void> | undefined;

  private constructor(
    producer: Producer,
    reopen: (kept: ProducerState) => Promise<Producer>,
    onOpen: (producer: DurableProducer) => void,
    state: MessageState<typeof ProducerStateSchema>,
    kept: ProducerState,
  ) {
    this.#producer = producer;
    this.#reopen = reopen;
    this.#onNextEpoch = () => onOpen(this);
    this.#state = state;
    this.#kept = kept;
    this.#loaded = kept.batches.length;
  }

  /** @internal */
  static async open({ log, options, produce, onOpen, onClose }: DurableProducerSetup): Promise<DurableProducer> {
    const { state, ...others } = options;
    const place = new MessageState(ProducerStateSchema, StateKind.PRODUCER, state);
    const found = await place.load();
    if (found !== undefined && (found.log !== log || found.id === "")) {
      throw stateError(`the state belongs to a producer of the log "${found.log}", not of "${log}"`);
    }
    // Undefined in the callback if the signal is aborted already.
    let opened: DurableProducer | undefined;
    const producerOf = (kept: ProducerState | undefined): Promise<Producer> =>
      produce(
        {
          ...others,
          ...(kept && { id: kept.id, epoch: kept.epoch, logId: kept.logId, firstSequence: kept.sequence }),
          // One call is one batch, since the state has its sequence.
          lingerMs: 0,
          windowBatches: Math.min(options.windowBatches ?? BATCHES_KEPT, BATCHES_KEPT),
        },
        () => opened && onClose(opened),
      );
    const producer = await producerOf(found);
    const { id, epoch, logId, nextSequence: sequence } = producer;
    const durable = new DurableProducer(
      producer,
      producerOf,
      onOpen,
      place,
      found ?? create(ProducerStateSchema, { log, logId, id, epoch, sequence, kind: StateKind.PRODUCER }),
    );
    opened = durable;
    onOpen(durable);
    try {
      // A new producer: without a state the next start would be another one. Loaded batches: the earlier program may
      // have been killed before it had flushed them, so a crash of the machine could still take them from the state.
      if (found === undefined || found.batches.length > 0) {
        await durable.#save();
      }
      await durable.#inTurn(() => durable.#sendKept());
    } catch (thrown) {
      await durable.#producer.close().catch(() => {});
      throw durable.#failure ?? thrown;
    }
    return durable;
  }

  /** The log's name. */
  get log(): string {
    return this.#producer.log;
  }

  /** The log's number. */
  get logId(): bigint {
    return this.#producer.logId;
  }

  /** Name of the source. It stays over restarts. */
  get id(): string {
    return this.#producer.id;
  }

  /** Incarnation of the source. A source that the server has forgotten goes on in a higher one. */
  get epoch(): bigint {
    return this.#kept.epoch;
  }

  /** The sequence of the next batch: the number of batches so far, in all runs of the program. */
  get nextSequence(): bigint {
    return this.#kept.earlierBatches + this.#kept.sequence + BigInt(this.#kept.batches.length);
  }

  /**
   * Keeps records as one batch, and sends it. Resolves with its sequence once the batch is kept; the ack may come
   * later. Waits while 64 batches are not acked. Batches have the order of the calls. A batch without records is
   * refused, and the producer goes on.
   *
   * @throws WaldError of this or an earlier batch; of kind STATE if the batch could not be saved. Such a batch was not
   * sent. `nextSequence` of the next start shows whether the state has it.
   */
  async appendBatch(records: RecordInput | readonly RecordInput[]): Promise<bigint> {
    if (this.#closing !== undefined) {
      throw usageError("the producer is closed");
    }
    const list = Array.isArray(records) ? (records as readonly RecordInput[]) : [records as RecordInput];
    const batch = ownBatch(list);
    return this.#inTurn(async () => {
      await this.#until(() => this.#kept.batches.length < BATCHES_KEPT);
      if (this.#failure !== undefined) {
        throw earlierFailed(this.#failure, "NOT_APPLIED");
      }
      const sequence = this.nextSequence;
      this.#kept.batches.push(batch);
      await this.#save();
      await this.#sendKept();
      return sequence;
    });
  }

  /**
   * Waits for the acks of all batches so far, and takes them off the state.
   *
   * @throws WaldError the failure that ended the producer.
   */
  async flush(): Promise<void> {
    return this.#closing ?? this.#inTurn(() => this.#flush());
  }

  /**
   * Takes no more, and waits as {@link flush}; after a failure it does not wait. The server remembers the producer, and
   * the next start continues as it.
   *
   * @throws WaldError the failure that ended the producer.
   */
  async close(): Promise<void> {
    this.#closing ??= this.#inTurn(async () => {
      try {
        await this.#flush();
      } finally {
        if (this.#failure !== undefined) {
          // Their acks could not be kept any more. The state has these batches.
          this.#producer.giveUp(this.#failure);
        }
        // Its failure, if any, is the one of flush.
        await this.#producer.close().catch(() => {});
      }
    });
    return this.#closing;
  }

  #inTurn<T>(work: () => Promise<T>): Promise<T> {
    const done = this.#turn.then(work);
    this.#turn = done.catch(() => {});
    return done;
  }

  async #flush(): Promise<void> {
    await this.#until(() => this.#kept.batches.length === 0);
    if (this.#failure !== undefined) {
      throw this.#failure;
    }
    await this.#save();
  }

  async #save(): Promise<void> {
    try {
      await this.#state.save(this.#kept);
    } catch (thrown) {
      throw this.#fail(toWaldError(thrown, "WRITE"));
    }
  }

  /** Sends the batches that are kept and were not sent. */
  async #sendKept(): Promise<void> {
    try {
      for (let batch; (batch = this.#kept.batches[this.#acks.length]) !== undefined; ) {
        if (this.#failure !== undefined) {
          throw this.#failure;
        }
        if (!this.#isCurrent(this.#producer)) {
          await this.#save();
          this.#producer = await this.#reopen(this.#kept);
        }
        await this.#send(this.#producer, batch);
      }
    } catch (thrown) {
      // The batch is kept, so the next start sends it.
      throw earlierFailed(this.#fail(toWaldError(thrown, "WRITE")), "UNKNOWN");
    }
  }

  /** Sends one batch, unless a new epoch begins meanwhile. */
  async #send(producer: Producer, batch: LogBatch): Promise<void> {
    try {
      const { ack } = await producer.sendProto(batch.records, toBinary(LogBatchSchema, batch).length);
      if (this.#isCurrent(producer)) {
        const refused = (error: WaldError): void => this.#refused(producer, error);
        this.#acks.push(ack.then(() => this.#acked(), refused));
      }
    } catch (thrown) {
      // The first failure is in an ack.
      await Promise.all(this.#acks);
      if (this.#isCurrent(producer)) {
        throw thrown;
      }
    }
  }

  #isCurrent(producer: Producer): boolean {
    return producer.epoch === this.#kept.epoch;
  }

  /** Takes the first batch off the state. The next save stores that. */
  #acked(): void {
    this.#acks.shift();
    this.#kept.batches.shift();
    this.#kept.sequence++;
    this.#loaded = Math.max(this.#loaded - 1, 0);
    this.#wake();
  }

  /** Takes the failure of the first batch, or of one behind it. */
  #refused(producer: Producer, error: WaldError): void {
    if (!this.#isCurrent(producer)) {
      // The first batch has begun a new epoch.
      return;
    }
    const epoch = this.#nextEpoch(error);
    if (epoch === undefined) {
      this.#fail(error);
    } else {
      this.#beginAgain(epoch);
    }
  }

  /**
   * The epoch in which this producer goes on after the failure of its first batch in doubt. The server has forgotten the
   * producer, and has applied none of the batches: each was sent once, and refused.
   */
  #nextEpoch({ kind, reason, outcome, facts }: WaldError): bigint | undefined {
    const epoch = facts["first_epoch"];
    // Not EARLIER_FAILED: this says nothing about the batch itself.
    const forgotten = kind === "SERVER" && reason === "PRODUCER_EXPIRED" && epoch !== undefined && /^\d+$/.test(epoch);
    const appliedNone = this.#loaded === 0 && outcome === "NOT_APPLIED";
    return forgotten && appliedNone ? BigInt(epoch) : undefined;
  }

  /** Begins a new epoch, and sends its batches, also if the program waits for none. */
  #beginAgain(epoch: bigint): void {
    this.#acks = [];
    this.#kept.earlierBatches += this.#kept.sequence;
    this.#kept.sequence = 0n;
    this.#kept.epoch = epoch;
    this.#onNextEpoch();
    this.#wake();
    // The next call reports the failure.
    this.#inTurn(() => this.#sendKept()).catch(() => {});
  }

  /** Ends the producer, and returns the first failure. */
  #fail(error: WaldError): WaldError {
    const { cause } = error;
    this.#failure ??= error.kind === "EARLIER_FAILED" && cause instanceof WaldError ? cause : error;
    this.#wake();
    return this.#failure;
  }

  /** Waits until something holds, or for the failure, and sends the batches that are due meanwhile. */
  async #until(holds: () => boolean): Promise<void> {
    while (!holds() && this.#failure === undefined) {
      if (this.#acks.length < this.#kept.batches.length) {
        // Its failure is kept.
        await this.#sendKept().catch(() => {});
      } else {
        await this.#change();
      }
    }
  }

  /** Waits for the next ack or failure. */
  #change(): Promise<void> {
    return new Promise((resolve) => (this.#wake = resolve));
  }
}

/** A copy in the contract's form: the caller may use its buffers again once the batch is kept. */
function ownBatch(records: readonly RecordInput[]): LogBatch {
  if (records.length === 0) {
    // The server would refuse it at each start.
    throw usageError("a batch has at least one record");
  }
  return owned(LogBatchSchema, { records: records.map(protoRecord) }).message;
}
