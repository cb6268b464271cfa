// `@ai-sdk/openai`, whose default is /responses: text, a stream, a tool and an object.
import { assert, check, load, run } from "./packages.mjs";

const [{ createOpenAI }, ai, { z }] = [await load("@ai-sdk/openai"), await load("ai"), await load("zod")];
const { WAI_OPENAI_URL, WAI_TOKEN, WAI_MODEL_TEXT: TEXT } = process.env;
const openai = createOpenAI({ baseURL: WAI_OPENAI_URL, apiKey: WAI_TOKEN });
const GREEDY = { model: openai(TEXT), prompt: "Name the capital of France.", temperature: 0, maxOutputTokens: 32, maxRetries: 0 };
const get_weather = ai.tool({ description: "Weather of a city", inputSchema: z.object({ city: z.string() }) });

check("streamed and whole are alike", [TEXT], async () => {
  const whole = await ai.generateText(GREEDY);
  assert(whole.text.trim() && whole.usage.outputTokens > 0, JSON.stringify(whole.usage));
  const stream = ai.streamText(GREEDY), parts = [];
  for await (const part of stream.fullStream) {
    if (part.type === "error") throw part.error;
    if (part.type === "text-delta") parts.push(part.text);
  }
  assert(parts.length > 1 && parts.join("") === whole.text, `${parts.length} parts: ${parts.join("")}`);
  assert((await stream.usage).totalTokens === whole.usage.totalTokens, "usage");
});
check("a tool", [TEXT], async () => {
  const options = { ...GREEDY, maxOutputTokens: 128, tools: { get_weather }, toolChoice: { type: "tool", toolName: "get_weather" } };
  const [call] = (await ai.generateText(options)).toolCalls;
  assert(call.toolName === "get_weather" && typeof call.input.city === "string", JSON.stringify(call));
  const stream = ai.streamText(options);
  for await (const _ of stream.fullStream);
  assert(JSON.stringify((await stream.toolCalls)[0].input) === JSON.stringify(call.input), "streamed");
});
check("an object", [TEXT], async () => {
  const schema = z.object({ city: z.string(), population: z.number().int() });
  const { output } = await ai.generateText({ ...GREEDY, maxOutputTokens: 128, output: ai.Output.object({ schema }) });
  assert(typeof output.city === "string" && Number.isInteger(output.population), JSON.stringify(output));
});

await run();
