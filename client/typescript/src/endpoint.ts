/** Endpoints: the texts that name servers. */
import { usageError } from "./errors.js";

/** Default address of a server. */
export const DEFAULT_ENDPOINT = "http://127.0.0.1:6925";

/** Port of an endpoint that names none. */
const DEFAULT_PORT = 6925;

/** `a,b:7000` -> `http://a:6925`, `http://b:7000`: one or more servers, each once, with one scheme. */
export function authoritiesOf(endpoint: string): [string, ...string[]] {
  const [first = "", ...others] = endpoint.split(",");
  if (others.length > 0 && [first, ...others].includes("")) {
    throw usageError(`\`${endpoint}\` has an empty part: put one comma between two endpoints`);
  }
  const authority = authorityOf(first);
  const { protocol } = new URL(authority);
  const further = others.map((part) => {
    const other = authorityOf(part);
    if (new URL(other).protocol !== protocol) {
      throw usageError(`\`${part}\` is not an endpoint to use with \`${first}\`: all must begin with ${protocol}//`);
    }
    return other;
  });
  const once = new Set(further);
  once.delete(authority);
  return [authority, ...once];
}

/** The authority of an owner, `HOST:PORT`, beside a server with this authority. Undefined: not such a text. */
export function authorityOfOwner(owner: string, beside: string): string | undefined {
  if (!/^[^\s/?#@\\]+:\d+$/.test(owner)) {
    return undefined;
  }
  try {
    return authorityOf(`${new URL(beside).protocol}//${owner}`);
  } catch {
    return undefined;
  }
}

/** `localhost` -> `http://localhost:6925`. */
function authorityOf(endpoint: string): string {
  let url: URL;
  try {
    url = new URL(endpoint.includes("://") ? endpoint : `http://${endpoint}`);
  } catch {
    throw usageError(`\`${endpoint}\` is not an endpoint such as ${DEFAULT_ENDPOINT}`);
  }
  if (!["http:", "https:"].includes(url.protocol) || url.hostname === "") {
    throw usageError(`\`${endpoint}\` is not an endpoint such as ${DEFAULT_ENDPOINT}`);
  }
  if (url.username !== "" || url.password !== "") {
    throw usageError(`an endpoint has no user name; give one such as ${DEFAULT_ENDPOINT}`);
  }
  // The URL leaves out port 80, which is the default of HTTP and not of Wald.
  const named = /:(\d+)\/?$/.exec(endpoint);
  if (named !== null && Number(named[1]) === 0) {
    throw usageError(`\`${endpoint}\` is not an endpoint such as ${DEFAULT_ENDPOINT}: its port is 0`);
  }
  return `${url.protocol}//${url.hostname}:${named === null ? DEFAULT_PORT : Number(named[1])}`;
}
