/** State that a program keeps over its restarts. */
import { open, readFile, readlink, rename, rm } from "node:fs/promises";
import { dirname, isAbsolute } from "node:path";

import { fromBinary, toBinary, type DescMessage, type MessageShape } from "@bufbuild/protobuf";

import { stateError } from "./errors.js";
import { StateKind, type FollowerStateSchema, type ProducerStateSchema } from "./gen/wald/v1/state_pb.js";

/**
 * The place of the state of one producer or one follower: a file ({@link FileState}), or a row in the program's own
 * database. Calls come one after another. One producer or follower of one process may use a state at a time: two would
 * replace each other's saves. The client does not check this.
 *
 * The bytes are a message of the contract, the same for clients of all languages: {@link ProducerState} or
 * {@link FollowerState}.
 */
export interface State {
  /** Returns the last saved state; undefined or null if there is none. */
  load(): Promise<Uint8Array | null | undefined> | Uint8Array | null | undefined;
  /**
   * Replaces the state: all of it or nothing. After the return, the new state also survives a crash of the machine.
   */
  save(state: Uint8Array): Promise<void> | void;
}

/** Number of the next save of this process. */
let nextSave = 0;

/**
 * State in a file, which only its owner can read. **One process may use the file at a time. Nothing enforces this,
 * because Node has no file locks.**
 *
 * Each save writes a new file beside it, whose name ends with `.new`, flushes it, and renames it. A program that is
 * killed during a save can leave such a file behind. If the path is a symbolic link, a save replaces the file that the
 * link names, and the link stays.
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
      throw this.#failed(error);
    }
  }

  async save(state: Uint8Array): Promise<void> {
    const path = await behindLinks(this.path);
    const draft = `${path}.${process.pid}.${nextSave++}.new`;
    try {
      await this.#replace(path, draft, state);
    } catch (error) {
      await rm(draft, { force: true }).catch(() => {});
      throw this.#failed(error);
    }
  }

  async #replace(path: string, draft: string, state: Uint8Array): Promise<void> {
    const file = await open(draft, "w", 0o600);
    try {
      await file.writeFile(state);
      await file.sync();
    } finally {
      await file.close();
    }
    await rename(draft, path);
    // Without it a power cut may undo the rename. Windows opens no directories.
    if (process.platform !== "win32") {
      const directory = await open(dirname(path), "r");
      try {
        await directory.sync();
      } finally {
        await directory.close();
      }
    }
  }

  /** The error with the path, which not every error of Node has. */
  #failed(error: unknown): Error {
    return new Error(`${this.path}: ${reasonOf(error)}`, { cause: error });
  }
}

/** The path that a symbolic link names, which need not exist; the path itself, if it is no link. */
async function behindLinks(path: string): Promise<string> {
  // The kernel refuses a path with more links.
  for (let links = 0; links < 40; links++) {
    let target: string;
    try {
      target = await readlink(path);
    } catch {
      break;
    }
    // Not join, which removes ".." after links to directories.
    path = isAbsolute(target) ? target : `${dirname(path)}/${target}`;
  }
  return path;
}

/** The kinds of states, as errors name them. */
const OWNERS = { [StateKind.PRODUCER]: "producer", [StateKind.FOLLOWER]: "follower" } as const;

/** A state in the form of its message. */
export class MessageState<D extends typeof ProducerStateSchema | typeof FollowerStateSchema> {
  readonly #schema: D;
  readonly #kind: keyof typeof OWNERS;
  readonly #state: State;

  constructor(schema: D, kind: keyof typeof OWNERS, state: State | string) {
    this.#schema = schema;
    this.#kind = kind;
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
    // Databases have null for it.
    if (found == null) {
      return undefined;
    }
    const strange = `it is not the state of a ${OWNERS[this.#kind]}`;
    let message: MessageShape<D>;
    try {
      // A copy, so that its bytes are plain arrays and belong to the client alone.
      message = fromBinary<DescMessage>(this.#schema, Uint8Array.from(found)) as MessageShape<D>;
    } catch (thrown) {
      throw stateError(`${strange}: ${reasonOf(thrown)}`, thrown);
    }
    // The kind is the last field, so a state that was cut off has none.
    if (message.kind !== this.#kind) {
      throw stateError(strange);
    }
    return message;
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
