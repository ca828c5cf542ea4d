/** Runs the examples of README.md, in order, as one program, against $WALD_ENDPOINT. */
import { spawnSync } from "node:child_process";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";

const root = fileURLToPath(new URL("../../", import.meta.url));
const readme = readFileSync(`${root}README.md`, "utf8");
const examples = [...readme.matchAll(/^```ts\n(.*?)^```$/gms)].map(([, example]) => example ?? "");
const marked = examples.map((example, index) => `${example}console.log("ok example ${index + 1}");\n`);
mkdirSync(`${root}dist/readme`, { recursive: true });
writeFileSync(`${root}dist/readme/examples.ts`, marked.join("\n"));
writeFileSync(
  `${root}dist/readme/tsconfig.json`,
  JSON.stringify({ extends: "../../tsconfig.json", compilerOptions: { rootDir: ".", outDir: "." }, include: [], files: ["examples.ts"] }),
);
run(`${root}node_modules/.bin/tsc`, "-p", `${root}dist/readme`);
run(process.execPath, `${root}dist/readme/examples.js`);
console.log(`${examples.length} passed, 0 failed`);

function run(command: string, ...args: string[]): void {
  const { status } = spawnSync(command, args, { stdio: "inherit", cwd: root });
  if (status !== 0) {
    console.log(`0 passed, ${examples.length} failed`);
    process.exit(1);
  }
}
