/** Values of cases: names in them, and the comparison of actual with expected values. */

/** A JSON value, or a number of 64 bits. */
export type Value = string | number | bigint | boolean | null | undefined | Value[] | { [member: string]: Value };

/** An object. */
export type Members = { [member: string]: Value };

/** One step of a case. */
export type Step = Members & { do: string };

/** The names that the harness gives to every case. */
function given(): Map<string, Value> {
  const names = ["server", "plain_server", "expired_server", "other_ca", "other_cert", "other_key"];
  const values = names.map((name): [string, Value] => [name, process.env[`WALD_CASE_${name.toUpperCase()}`]]);
  return new Map(values.filter(([, value]) => value !== undefined));
}

/** Names and their values. */
export class Names {
  readonly #kept: Map<string, Value>;
  readonly #prefix: string;
  readonly #counter: number | undefined;

  constructor(prefix: string, kept = given(), counter?: number) {
    this.#prefix = prefix;
    this.#kept = kept;
    this.#counter = counter;
  }

  /** Returns the names within a turn of `repeat`. */
  turn(counter: number): Names {
    return new Names(this.#prefix, this.#kept, counter);
  }

  keep(name: string, value: Value): void {
    this.#kept.set(name, value);
  }

  /** Replaces names, adds up, and writes lists out. */
  resolve(value: Value): Value {
    if (typeof value === "string") {
      const whole = /^\$\{([^}]*)\}$/.exec(value);
      return whole?.[1] !== undefined
        ? this.#look(whole[1])
        : value.replace(/\$\{([^}]*)\}/g, (_, name: string) => String(this.#look(name)));
    }
    if (Array.isArray(value)) {
      return value.map((each) => this.resolve(each));
    }
    if (isObject(value)) {
      const { add, times, each } = value;
      if (Array.isArray(add) && Object.keys(value).length === 1) {
        return add.reduce<bigint>((sum, term) => sum + integer(this.resolve(term)), 0n);
      }
      if (each !== undefined && times !== undefined) {
        return Array.from({ length: Number(times) }, (_, index) => this.turn(index).resolve(each));
      }
      return Object.fromEntries(Object.entries(value).map(([name, member]) => [name, this.resolve(member)]));
    }
    return value;
  }

  #look(path: string): Value {
    if (path.startsWith("log:")) {
      return this.#prefix + path.slice("log:".length);
    }
    if (path === "i" && this.#counter !== undefined) {
      return this.#counter;
    }
    const [name = "", ...members] = path.split(".");
    let value = this.#kept.get(name);
    for (const member of members) {
      value = Array.isArray(value) ? value[Number(member)] : isObject(value) ? value[member] : undefined;
    }
    if (value === undefined) {
      throw new Error(`nothing is called ${path}`);
    }
    return value;
  }
}

/** Where and how the actual value differs from the expected one; undefined if it does not. */
export function difference(expected: Value, came: Value, where = ""): string | undefined {
  const wrong = `${where || "it"}: expected ${show(expected)}, came ${show(came)}`;
  if (expected === "*") {
    return came === undefined || came === null ? wrong : undefined;
  }
  if (Array.isArray(expected)) {
    if (!Array.isArray(came) || came.length !== expected.length) {
      return wrong;
    }
    return first(expected.map((each, index) => difference(each, came[index], `${where}[${index}]`)));
  }
  if (isObject(expected)) {
    const { at_least, below, length } = expected;
    if (at_least !== undefined || below !== undefined) {
      const enough = at_least === undefined || (isNumber(came) && integer(came) >= integer(at_least));
      const little = below === undefined || (isNumber(came) && integer(came) < integer(below));
      return enough && little ? undefined : wrong;
    }
    if (length !== undefined) {
      return Array.isArray(came) && BigInt(came.length) === integer(length) ? undefined : wrong;
    }
    if (!isObject(came)) {
      return wrong;
    }
    return first(
      Object.entries(expected).map(([name, each]) =>
        // Facts are text.
        difference(where.endsWith("facts") && isNumber(each) ? String(each) : each, came[name], `${where}.${name}`),
      ),
    );
  }
  const same = isNumber(expected) ? isNumber(came) && integer(came) === integer(expected) : expected === came;
  return same ? undefined : wrong;
}

/** A number of 64 bits. */
export function integer(value: Value): bigint {
  if (typeof value === "bigint") {
    return value;
  }
  if (typeof value === "number") {
    return BigInt(value);
  }
  throw new Error(`${show(value)} is not a number`);
}

/** Reads an integer that may be absent. */
export function maybeInteger(value: Value): bigint | undefined {
  return value === undefined ? undefined : integer(value);
}

export function text(value: Value): string {
  if (typeof value !== "string") {
    throw new Error(`${show(value)} is not a string`);
  }
  return value;
}

export function list(value: Value): Value[] {
  if (value !== undefined && !Array.isArray(value)) {
    throw new Error(`${show(value)} is not a list`);
  }
  return value ?? [];
}

export function members(value: Value): Members {
  if (value !== undefined && !isObject(value)) {
    throw new Error(`${show(value)} is not an object`);
  }
  return value ?? {};
}

export function isObject(value: Value): value is Members {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function isNumber(value: Value): value is number | bigint {
  return typeof value === "number" || typeof value === "bigint";
}

function first(differences: (string | undefined)[]): string | undefined {
  return differences.find((each) => each !== undefined);
}

export function show(value: Value): string {
  const shown = JSON.stringify(value, (_, each: unknown) => (typeof each === "bigint" ? Number(each) : each)) ?? "nothing";
  return shown.length > 400 ? `${shown.slice(0, 400)}...` : shown;
}
