// Numbers, times and bytes for people.

const grouped = new Intl.NumberFormat("en");

/** A whole number: 12,345. */
export const count = (number) => grouped.format(number);

function scaled(number, base, units) {
  let index = 0;
  while (Math.abs(number) >= base * 0.9995 && index < units.length - 1) {
    number /= base;
    index += 1;
  }
  const digits = number === 0 || number >= 99.95 || (index === 0 && Number.isInteger(number)) ? 0 : number >= 9.995 ? 1 : 2;
  return `${number.toFixed(digits)}${units[index]}`;
}

/** Bytes in powers of 1024: 1.25 MiB. */
export const bytes = (number) => (number == null ? "–" : scaled(number, 1024, [" B", " KiB", " MiB", " GiB", " TiB", " PiB"]));

/** A rate of something: 1.25k/s. */
export const rate = (number) => (number == null ? "–" : `${scaled(number < 0.005 ? 0 : number, 1000, ["", "k", "M", "G"])}/s`);

/** A rate of bytes. */
export const byteRate = (number) => (number == null ? "–" : `${bytes(number < 0.5 ? 0 : number)}/s`);

/** A short time, given in seconds: 340 µs, 1.2 ms, 3.4 s. */
export function seconds(number) {
  if (number == null) return "–";
  if (number === 0) return "0";
  const digits = (value) => (value >= 99.5 ? value.toFixed(0) : value.toPrecision(2));
  if (number < 1e-3) return `${digits(number * 1e6)} µs`;
  if (number < 1) return `${digits(number * 1e3)} ms`;
  return number < 120 ? `${digits(number)} s` : span(number);
}

/** A long time, given in seconds: 3 d 4 h. */
export function span(number) {
  const whole = Math.max(0, Math.floor(number));
  const parts = [[Math.floor(whole / 86400), "d"], [Math.floor(whole / 3600) % 24, "h"], [Math.floor(whole / 60) % 60, "min"], [whole % 60, "s"]];
  const first = parts.findIndex(([value]) => value > 0);
  if (first < 0) return "0 s";
  return parts.slice(first, first + 2).filter(([value]) => value > 0).map(([value, unit]) => `${value} ${unit}`).join(" ");
}

const pad = (number, digits) => String(number).padStart(digits, "0");

function date(micros) {
  const found = new Date(Math.floor(micros / 1000));
  return Number.isNaN(found.getTime()) ? null : found;
}

/** Time of day in UTC with microseconds, from microseconds since the epoch. */
export function clock(micros) {
  const found = date(micros);
  if (!found) return `${micros} µs`;
  return `${found.toISOString().slice(11, 19)}.${pad(((micros % 1e6) + 1e6) % 1e6, 6)}`;
}

/** Date and time in UTC with microseconds. */
export function instant(micros) {
  const found = date(micros);
  return found ? `${found.toISOString().slice(0, 10)} ${clock(micros)}Z` : `${micros} µs`;
}

/** The day in UTC. */
export const day = (micros) => date(micros)?.toISOString().slice(0, 10) ?? "";

/** Bytes from base64. */
export function fromBase64(text) {
  const binary = atob(text);
  const found = new Uint8Array(binary.length);
  for (let index = 0; index < binary.length; index += 1) found[index] = binary.charCodeAt(index);
  return found;
}

/** Bytes as UTF-8 text, or null if they are none. `cut`: the last character may be half. */
export function asText(data, cut) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(data, { stream: cut });
  } catch {
    return null;
  }
}

/** Bytes as pairs of hexadecimal digits. */
export function asHex(data, most = data.length) {
  return Array.from(data.subarray(0, most), (byte) => pad(byte.toString(16), 2)).join(" ");
}

/** Bytes as lines: offset, sixteen bytes, their characters. */
export function hexLines(data, most = 65536) {
  const lines = [];
  for (let at = 0; at < Math.min(data.length, most); at += 16) {
    const row = data.subarray(at, at + 16);
    const left = asHex(row.subarray(0, 8)).padEnd(23);
    const right = asHex(row.subarray(8)).padEnd(23);
    const characters = Array.from(row, (byte) => (byte >= 32 && byte < 127 ? String.fromCharCode(byte) : "·")).join("");
    lines.push(`${pad(at.toString(16), 8)}  ${left}  ${right}  ${characters}`);
  }
  if (data.length > most) lines.push(`… ${count(data.length - most)} bytes more`);
  return lines.join("\n");
}

/** Bytes as JSON with indentation, or null if they are none. Numbers stay as they are written. */
export function asJson(data) {
  const text = asText(data, false);
  if (text === null) return null;
  try {
    JSON.parse(text);
  } catch {
    return null;
  }
  return indent(text);
}

/** Indents valid JSON token by token: parsing and writing it would change large numbers. */
function indent(text) {
  let depth = 0;
  const line = () => `\n${"  ".repeat(depth)}`;
  return text.replace(/"(?:[^"\\]|\\.)*"|[^\s"{}[\],:]+|[{}[\],:]|\s+/g, (token, at) => {
    switch (token) {
      case "{":
      case "[":
        depth += 1;
        return /^\s*[}\]]/.test(text.slice(at + 1, at + 64)) ? token : token + line();
      case "}":
      case "]": {
        depth -= 1;
        return /[{[]\s*$/.test(text.slice(Math.max(0, at - 64), at)) ? token : line() + token;
      }
      case ",":
        return token + line();
      case ":":
        return ": ";
      default:
        return /^\s/.test(token) ? "" : token;
    }
  });
}
