// The AI SDK (npm ai): text, a stream, an object of a schema, a tool.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const { NV_NODE_MODULES: modules, NV_URL: baseURL, NV_KEY: apiKey, NV_MODEL: name } = process.env;
const load = (found) => import(pathToFileURL(createRequire(`${modules}/`).resolve(found)));
const { Output, generateText, jsonSchema, streamText, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");

const provider = createOpenAICompatible({
  name: "nv",
  baseURL,
  apiKey,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const fields = { model: provider(name), prompt: "Say ab.", temperature: 0, maxRetries: 0 };

const plain = await generateText({ ...fields, maxOutputTokens: 16 });
const streamed = streamText({ ...fields, maxOutputTokens: 16 });
let joined = "";
for await (const piece of streamed.textStream) joined += piece;
assert.ok(plain.text);
assert.equal(joined, plain.text);
assert.equal((await streamed.usage).outputTokens, plain.usage.outputTokens);

const schema = jsonSchema({
  type: "object",
  properties: { sky: { enum: ["clear", "cloudy"] } },
  required: ["sky"],
  additionalProperties: false,
});
const typed = await generateText({ ...fields, output: Output.object({ schema }) });
assert.ok(["clear", "cloudy"].includes(typed.output.sky));

const painted = [];
const paint = tool({
  description: "Paint the wall.",
  inputSchema: jsonSchema({
    type: "object",
    properties: { red: { type: "boolean" } },
    required: ["red"],
    additionalProperties: false,
  }),
  execute: async ({ red }) => painted.push(red),
});
// A named tool is called once; a random model may call a required one until its context is full.
const toolChoice = { type: "tool", toolName: "paint" };
await generateText({ ...fields, tools: { paint }, toolChoice });
assert.deepEqual(painted.map((red) => typeof red), ["boolean"]);

await assert.rejects(generateText({ ...fields, temperature: -1 }), { statusCode: 400 });
