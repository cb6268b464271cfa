// npm `cloudflare`: models whose ids come as one encoded segment, an event stream, paged lists, errors.
import { assert, check, load, run } from "./packages.mjs";

const Cloudflare = (await load("cloudflare")).default;
const { WAI_BASE_URL, WAI_ACCOUNT_ID: account_id, WAI_TOKEN: apiToken, WAI_MODEL_TEXT: TEXT, WAI_MODEL_EMBED: EMBED } = process.env;
const client = new Cloudflare({ apiToken, baseURL: WAI_BASE_URL, timeout: 300_000, maxRetries: 0 });
const GREEDY = { account_id, messages: [{ role: "user", content: "Name the capital of France." }], temperature: 0, max_tokens: 24 };

check("streamed and whole are alike", [TEXT], async () => {
  const whole = await client.ai.run(TEXT, GREEDY);
  assert(whole.response.trim() && whole.usage.completion_tokens > 0, JSON.stringify(whole));
  const answer = await client.ai.run(TEXT, { ...GREEDY, stream: true }).asResponse();
  const events = (await answer.text()).split("\n\n").filter((event) => event.startsWith("data: {"));
  const text = events.map((event) => JSON.parse(event.slice(6)).response ?? "").join("");
  assert(text === whole.response, `streamed ${JSON.stringify(text)}, whole ${JSON.stringify(whole.response)}`);
});
check("embeddings", [EMBED], async () => {
  const { shape, data } = await client.ai.run(EMBED, { account_id, text: ["a cat", "revenue"] });
  assert(shape[0] === 2 && data[0].length === shape[1], JSON.stringify(shape));
});
check("every page of the models, once", [TEXT], async () => {
  const names = [];
  for await (const model of client.ai.models.list({ account_id, per_page: 2 })) names.push(model.name);
  assert(names.includes(TEXT) && new Set(names).size === names.length, names.join());
});
check("errors", [TEXT], async () => {
  const error = await client.ai.run("@cf/none/such", { account_id, prompt: "x" }).then(() => null, (failed) => failed);
  assert([400, 404].includes(error?.status) && error.errors[0].message, String(error));
});

await run();
