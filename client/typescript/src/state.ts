/** State that a program keeps over its restarts. */
import { open, readFile, rename } from "node:fs/promises";
import { dirname } from "node:path";

import { fromBinary, toBinary, type DescMessage, type MessageShape } from "@bufbuild/protobuf";

import { stateError } from "./errors.js";

/**
 * The place of the state of one producer or one follower: a file ({@link FileState}), or a row in the program's own
 * database. Calls come one after another.
 *
 * The bytes are a message of the contract, the same for clients of all languages: {@link ProducerState} or
 * {@link FollowerState}.
 */
export interface State {
  /** Returns the last saved state; undefined if there is none. */
  load(): Promise<Uint8Array | undefined> | Uint8Array | undefined;
  /**
   * Replaces the state: all of it or nothing. After the return, the new state also survives a crash of the machine.
   */
  save(state: Uint8Array): Promise<void> | void;
}

/**
 * State in a file, which only its owner can read. One process may use the file at a time.
 *
 * Each save writes a new file (`path` and `.new`), flushes it, and renames it.
 */
export class FileState implements State {
  /** The file's path. */
  readonly path: string;

  /** State in the file of this path. The directory must exist. */
  constructor(path: string) {
    this.path = path;
  }

  async load(): Promise<Uint8Array | undefined> {
    try {
      return await readFile(this.path);
    } catch (error) {
      if (error instanceof Error && "code" in error && error.code === "ENOENT") {
        return undefined;
      }
      throw error;
    }
  }

  async save(state: Uint8Array): Promise<void> {
    const draft = `${this.path}.new`;
    const file = await open(draft, "w", 0o600);
    try {
      await file.writeFile(state);
      await file.sync();
    } finally {
      await file.close();
    }
    await rename(draft, this.path);
    // Without it a power cut may undo the rename. Windows opens no directories.
    if (process.platform !== "win32") {
      const directory = await open(dirname(this.path), "r");
      try {
        await directory.sync();
      } finally {
        await directory.close();
      }
    }
  }
}

/** A state in the form of its message. */
export class MessageState<D extends DescMessage> {
  readonly #schema: D;
  readonly #state: State;

  constructor(schema: D, state: State | string) {
    this.#schema = schema;
    this.#state = typeof state === "string" ? new FileState(state) : state;
  }

  /** @throws WaldError of kind STATE. */
  async load(): Promise<MessageShape<D> | undefined> {
    let found;
    try {
      found = await this.#state.load();
    } catch (thrown) {
      throw stateError(reasonOf(thrown), thrown);
    }
    if (found === undefined) {
      return undefined;
    }
    try {
      // A copy, so that its bytes are plain arrays and belong to the client alone.
      return fromBinary(this.#schema, Uint8Array.from(found));
    } catch (thrown) {
      throw stateError(`the state is damaged, or is not the state of a producer or follower: ${reasonOf(thrown)}`, thrown);
    }
  }

  /**
   * Saves the message as it is at the time of the call.
   *
   * @throws WaldError of kind STATE.
   */
  async save(message: MessageShape<D>): Promise<void> {
    const state = toBinary(this.#schema, message);
    try {
      await this.#state.save(state);
    } catch (thrown) {
      throw stateError(reasonOf(thrown), thrown);
    }
  }
}

function reasonOf(thrown: unknown): string {
  return thrown instanceof Error ? thrown.message : String(thrown);
}
