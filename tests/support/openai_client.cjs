// The openai package of npm against a running server: node openai_client.cjs URL KEY.
// Prints what went wrong as JSON, by case. NODE_PATH says where the package is (make test-clients).
"use strict";

const assert = require("node:assert/strict");
const OpenAI = require("openai");

const MESSAGES = [{ role: "user", content: "Describe an egg." }];
const LIMITS = { model: "demo", temperature: 0, max_tokens: 300 };
const EGG = {
  type: "object",
  properties: { size: { enum: ["S", "M", "L"] }, fresh: { type: "boolean" } },
  required: ["size", "fresh"],
  additionalProperties: false,
};
const TOOLS = [{ type: "function", function: { name: "egg", parameters: EGG, strict: true } }];

function assertEgg(text) {
  const egg = JSON.parse(text);
  assert.deepEqual(Object.keys(egg), ["size", "fresh"]);
  assert.ok(["S", "M", "L"].includes(egg.size));
  assert.equal(typeof egg.fresh, "boolean");
}

const cases = {
  async completions(client) {
    const fields = { ...LIMITS, prompt: "Once upon a time", max_tokens: 12 };
    const whole = await client.completions.create({ ...fields, logprobs: 1, echo: true });
    assert.ok(whole.choices[0].text.startsWith("Once upon a time"));
    assert.equal(whole.choices[0].logprobs.token_logprobs[0], null);
    let text = "";
    for await (const chunk of await client.completions.create({ ...fields, stream: true })) text += chunk.choices[0].text;
    assert.equal("Once upon a time" + text, whole.choices[0].text);
  },
  async chats(client) {
    const fields = { ...LIMITS, messages: MESSAGES, max_tokens: 12, n: 2, temperature: 1, seed: 3 };
    const whole = await client.chat.completions.create(fields);
    const stream = client.chat.completions.stream({ ...fields, stream_options: { include_usage: true } });
    const streamed = await stream.finalChatCompletion();
    const contents = (answer) => answer.choices.map((choice) => choice.message.content);
    assert.deepEqual(contents(streamed), contents(whole));
    assert.deepEqual(streamed.usage.completion_tokens, whole.usage.completion_tokens);
  },
  async schemas(client) {
    const response_format = { type: "json_schema", json_schema: { name: "egg", schema: EGG, strict: true } };
    const answer = await client.chat.completions.parse({ ...LIMITS, messages: MESSAGES, response_format });
    assertEgg(answer.choices[0].message.content);
  },
  async tools(client) {
    const fields = { ...LIMITS, messages: MESSAGES, tools: TOOLS, tool_choice: "required", parallel_tool_calls: false };
    const whole = await client.chat.completions.create(fields);
    const streamed = await client.chat.completions.stream(fields).finalChatCompletion();
    for (const answer of [whole, streamed]) {
      assert.equal(answer.choices[0].finish_reason, "tool_calls");
      assertEgg(answer.choices[0].message.tool_calls[0].function.arguments);
    }
  },
  async errors(client) {
    const wrong = client.completions.create({ ...LIMITS, prompt: "a", temperature: -1 });
    await assert.rejects(wrong, (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
  },
};

async function main() {
  const client = new OpenAI({ baseURL: process.argv[2], apiKey: process.argv[3], maxRetries: 0 });
  const failures = {};
  for (const [name, run] of Object.entries(cases)) {
    try {
      await run(client);
    } catch (error) {
      failures[name] = String(error && error.stack);
    }
  }
  console.log(JSON.stringify(failures));
}

main();
