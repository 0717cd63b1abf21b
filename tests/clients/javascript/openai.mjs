// npm openai: chat and its stream, text, a tool call, responses, errors.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const { NV_NODE_MODULES: modules, NV_URL: baseURL, NV_KEY: apiKey, NV_MODEL: model } = process.env;
const found = createRequire(`${modules}/`).resolve("openai");
const { OpenAI } = await import(pathToFileURL(found));
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "Say ab." }];
const fields = { model, messages, temperature: 0, max_tokens: 16 };

const answer = await client.chat.completions.create(fields);
let joined = "";
let usage = null;
const stream_options = { include_usage: true };
for await (const chunk of await client.chat.completions.create({ ...fields, stream: true, stream_options })) {
  joined += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.ok(answer.choices[0].message.content);
assert.equal(joined, answer.choices[0].message.content);
assert.deepEqual(usage.completion_tokens, answer.usage.completion_tokens);

const text = await client.completions.create({ model, prompt: "Say ab.", temperature: 0 });
assert.ok(text.choices[0].text);

const parameters = {
  type: "object",
  properties: { red: { type: "boolean" } },
  required: ["red"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "paint", strict: true, parameters } }];
const called = await client.chat.completions.create({
  ...fields,
  max_tokens: 100,
  tools,
  tool_choice: "required",
  parallel_tool_calls: false,
});
const call = called.choices[0].message.tool_calls[0];
assert.equal(call.function.name, "paint");
assert.equal(typeof JSON.parse(call.function.arguments).red, "boolean");

let spoken = "";
const stream = client.responses.stream({ model, input: "Say ab.", temperature: 0, max_output_tokens: 16 });
stream.on("response.output_text.delta", (event) => (spoken += event.delta));
const response = await stream.finalResponse();
assert.ok(spoken);
assert.equal(spoken, response.output_text);

const leaving = await client.chat.completions.create({ ...fields, max_tokens: 500, stream: true });
for await (const _ of leaving) break; // it closes the connection
for (const [wrong, kind] of [
  [{ temperature: -1 }, OpenAI.BadRequestError],
  [{ model: "gpt-none" }, OpenAI.NotFoundError],
]) {
  await assert.rejects(client.chat.completions.create({ ...fields, ...wrong }), kind);
}
const stranger = new OpenAI({ baseURL, apiKey: "sk-wrong", maxRetries: 0 });
await assert.rejects(stranger.chat.completions.create(fields), OpenAI.AuthenticationError);
