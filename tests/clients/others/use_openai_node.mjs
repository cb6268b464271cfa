// npm `openai` at /responses, greedily: the acceptance script leaves to chance whether the answer is short enough.
import { assert, check, load, run } from "./packages.mjs";

const OpenAI = (await load("openai")).default;
const { WAI_OPENAI_URL: baseURL, WAI_TOKEN: apiKey, WAI_MODEL_TEXT: model } = process.env;
const client = new OpenAI({ apiKey, baseURL, maxRetries: 0 });
const GREEDY = { model, input: "Say hello", temperature: 0, max_output_tokens: 64 };

check("responses", [model], async () => {
  const whole = await client.responses.create(GREEDY);
  assert(whole.status === "completed" && whole.output_text.trim(), JSON.stringify(whole));
  const { input_tokens, output_tokens, total_tokens } = whole.usage;
  assert(input_tokens > 0 && output_tokens > 0 && total_tokens === input_tokens + output_tokens, "usage");
  const stream = client.responses.stream(GREEDY), deltas = [];
  for await (const event of stream) if (event.type === "response.output_text.delta") deltas.push(event.delta);
  assert(deltas.length > 1 && deltas.join("") === whole.output_text, deltas.join(""));
});
check("a response that is cut short says so", [model], async () => {
  const cut = await client.responses.create({ ...GREEDY, max_output_tokens: 2 });
  assert(cut.status === "incomplete" && cut.incomplete_details.reason === "max_output_tokens", JSON.stringify(cut));
});

await run();
