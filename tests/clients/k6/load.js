// Ten users at once, each with answers in one piece and as streams; every check must hold.
import { check } from "k6";
import http from "k6/http";

export const options = {
  vus: 10,
  iterations: 40,
  thresholds: { checks: ["rate==1"], http_req_failed: ["rate==0"] },
};
const MAX_TOKENS = 16;
const headers = { "Content-Type": "application/json", Authorization: `Bearer ${__ENV.NV_KEY}` };

function ask(body) {
  const common = { model: __ENV.NV_MODEL, max_tokens: MAX_TOKENS, temperature: 0 };
  const messages = [{ role: "user", content: `Count from ${__VU} on.` }];
  const url = `${__ENV.NV_URL}/chat/completions`;
  return http.post(url, JSON.stringify({ ...common, messages, ...body }), { headers });
}

export default function () {
  const plain = ask({});
  check(plain, {
    "answers in one piece": (r) => r.status === 200 && r.json("object") === "chat.completion",
    "usage within max_tokens": (r) => {
      const tokens = r.json("usage.completion_tokens");
      return tokens > 0 && tokens <= MAX_TOKENS;
    },
  });
  const streamed = ask({ stream: true });
  const events = streamed.body.trim().split("\n\n").map((event) => event.replace("data: ", ""));
  const joined = events
    .slice(0, -1)
    .map((event) => JSON.parse(event).choices[0]?.delta.content ?? "")
    .join("");
  check(streamed, {
    "streams end": () => events[events.length - 1] === "[DONE]",
    "a stream is the answer": () => joined === plain.json("choices.0.message.content"),
  });
}
