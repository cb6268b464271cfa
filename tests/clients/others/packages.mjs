// What the scripts beside this file share: packages of the current folder, and checks that each print one line.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const entry = (e) => (!e || typeof e === "string" ? e : entry(e["."] ?? e.import ?? e.node ?? e.default));

// The package `name` of the current folder's node_modules, since node itself would look beside this file.
export const load = (name) => {
  const folder = join(process.cwd(), "node_modules", name);
  const described = JSON.parse(readFileSync(join(folder, "package.json")));
  return import(pathToFileURL(join(folder, entry(described.exports) ?? described.module ?? described.main)));
};

export const assert = (condition, what) => {
  if (!condition) throw new Error(what);
};

const checks = [];
export const check = (name, models, run) => checks.push([name, models.includes("-"), run]);

export const run = async () => {
  const numbers = { "ok  ": 0, FAIL: 0, SKIP: 0 };
  for (const [name, isSkipped, body] of checks) {
    let outcome = isSkipped ? "SKIP" : "ok  ", why = "";
    try {
      if (!isSkipped) await body();
    } catch (error) {
      [outcome, why] = ["FAIL", `- ${error.name} ${String(error.message).slice(0, 600)}`];
    }
    numbers[outcome] += 1;
    console.log(outcome, name, why);
  }
  const [passed, failed, skipped] = Object.values(numbers);
  console.log(`${passed} passed, ${failed} failed, ${skipped} skipped`);
  process.exit(failed || !passed ? 1 : 0);
};
