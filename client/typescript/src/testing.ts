import { spawn, type ChildProcess } from "node:child_process";
import { once } from "node:events";
import { createInterface } from "node:readline";

/**
 * A server with an empty store of its own, for a test. It ends with `stop`, or with the process of the test.
 *
 * The program is the one of the variable WALD_BINARY, or else the `wald` of PATH. Its errors go to the standard error of the
 * test; the variable WALD_LOG_FILTER shows more.
 */
export class EphemeralServer {
  /** Starts the server and waits until it serves. `args` are further arguments, such as `"--sync-mode", "async"`. */
  static async start(...args: string[]): Promise<EphemeralServer> {
    const binary = process.env.WALD_BINARY || "wald";
    const child = spawn(binary, ["--ephemeral", ...args], {
      stdio: ["ignore", "pipe", "inherit"],
      env: { WALD_LOG_FILTER: "error", ...process.env },
    });
    const ended = new Promise<void>((resolve) => child.once("close", () => resolve()));
    await once(child, "spawn").catch((error: unknown) => {
      throw new Error(`cannot start ${binary}: ${String(error)}; install wald, or set WALD_BINARY`);
    });
    const lines = createInterface({ input: child.stdout });
    const line = await Promise.race([once(lines, "line").then(([line]) => String(line)), ended.then(() => "")]);
    lines.close();
    // A test that does not stop the server may still end, and the server ends with it.
    child.stdout.destroy();
    child.unref();
    const address = (name: string) => line.split(" ").find((word) => word.startsWith(`${name}=`))?.slice(name.length + 1);
    const [grpc, http] = [address("grpc"), address("http")];
    if (grpc === undefined || http === undefined) {
      child.ref();
      child.kill("SIGKILL");
      await ended;
      throw new Error(`${binary} --ephemeral does not serve: status ${child.exitCode}; its own error is above`);
    }
    return new EphemeralServer(child, ended, grpc, http);
  }

  private constructor(
    private readonly child: ChildProcess,
    private readonly ended: Promise<void>,
    /** Address of the gRPC service: HOST:PORT. */
    readonly endpoint: string,
    /** Address of metrics, probes and the console: HOST:PORT. */
    readonly http: string,
  ) {}

  /** Ends the server, and removes its store. */
  async stop(): Promise<void> {
    this.child.ref();
    this.child.kill("SIGTERM");
    await this.ended;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.stop();
  }
}
