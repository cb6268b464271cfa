// npm `@langchain/cloudflare`, which always streams, and reads `response` of every event.
import { assert, check, load, run } from "./packages.mjs";

const { ChatCloudflareWorkersAI } = await load("@langchain/cloudflare");
const { WAI_BASE_URL, WAI_ACCOUNT_ID, WAI_TOKEN, WAI_MODEL_TEXT: TEXT } = process.env;
const chat = () => new ChatCloudflareWorkersAI({
  model: TEXT,
  cloudflareAccountId: WAI_ACCOUNT_ID,
  cloudflareApiToken: WAI_TOKEN,
  baseUrl: `${WAI_BASE_URL}/accounts/${WAI_ACCOUNT_ID}/ai/run`,
});

check("a message", [TEXT], async () => {
  const answer = await chat().invoke("Say hello.");
  assert(answer.content.trim() && !answer.content.includes("undefined"), answer.content);
});
check("a stream", [TEXT], async () => {
  const parts = [];
  for await (const part of await chat().stream("Say hello.")) parts.push(part.content);
  assert(parts.length > 1 && parts.every((part) => typeof part === "string"), JSON.stringify(parts));
});

await run();
