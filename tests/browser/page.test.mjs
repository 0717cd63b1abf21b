// The page at / in a browser, by keyboard, against the stub: `nox -s browser` runs it.
// NV_BROWSER_MODULES: a folder with playwright-core and axe-core; CHROMIUM, PYTHON: programs.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, beforeEach, test } from "node:test";

const { NV_BROWSER_MODULES, CHROMIUM, PYTHON = "python" } = process.env;
const require = createRequire(`${NV_BROWSER_MODULES}/`);
const { chromium } = require("playwright-core");
const axe = await readFile(require.resolve("axe-core/axe.min.js"), "utf8");
const here = new URL(".", import.meta.url).pathname;
const KEY = "sk-right";
const NARROW = { width: 320, height: 640 };

let stub, origin, browser, folder;

before(async () => {
  stub = spawn(PYTHON, [join(here, "stub.py")], { stdio: ["pipe", "pipe", "inherit"] });
  const port = await new Promise((resolve, reject) => {
    stub.stdout.once("data", (data) => resolve(String(data).trim()));
    stub.once("exit", (code) => reject(new Error(`the stub ended with ${code}`)));
  });
  origin = `http://127.0.0.1:${port}`;
  const quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"];
  browser = await chromium.launch({ executablePath: CHROMIUM, args: ["--no-sandbox", "--disable-gpu", "--no-first-run", ...quiet] });
  folder = await mkdtemp(join(tmpdir(), "nv-browser-"));
});

after(async () => {
  await browser?.close();
  stub?.kill();
  if (folder) await rm(folder, { recursive: true });
});

beforeEach(() => state({}));

const post = (path, body) => fetch(origin + path, { method: "POST", body: JSON.stringify(body) });
const state = (values) => post("/state", values);
const requests = async () => (await fetch(`${origin}/requests`)).json();

/** Opens the page, runs `steps`, and checks that nothing failed and nothing came from elsewhere. */
async function open(options, steps) {
  const context = await browser.newContext({ viewport: { width: 1200, height: 800 }, ...options });
  const page = await context.newPage();
  const bad = [];
  page.on("filechooser", () => {}); // from now on, so that the first one is not missed
  page.on("pageerror", (error) => bad.push(`error: ${error.message}`));
  page.on("dialog", (dialog) => { bad.push(`dialog: ${dialog.message()}`); dialog.dismiss(); });
  page.on("request", (request) => { if (!/^(data|blob):/.test(request.url()) && !request.url().startsWith(origin)) bad.push(request.url()); });
  await page.addInitScript(() => {
    window.violations = [];
    window.announced = [];
    addEventListener("securitypolicyviolation", (event) => window.violations.push(event.violatedDirective));
    addEventListener("DOMContentLoaded", () => {
      const region = document.getElementById("announcer");
      new MutationObserver(() => window.announced.push(region.textContent)).observe(region, { childList: true, subtree: true, characterData: true });
    });
  });
  try {
    await page.goto(origin);
    if (!options.isRefused) await page.waitForFunction(() => document.getElementById("running").textContent === "3");
    await steps(page, context);
    assert.deepEqual(await page.evaluate(() => window.violations), []);
    assert.deepEqual(bad, []);
  } finally {
    await context.close();
  }
}

const focused = (page) => page.evaluate(() => document.activeElement.getAttribute("aria-label") ?? (document.activeElement.id || document.activeElement.textContent));
const answers = (page) => page.locator(".answer .text:not(.thoughts .text)").allInnerTexts();
const lastAnswer = async (page) => (await answers(page)).at(-1);
const announced = (page) => page.evaluate(() => window.announced);

/** Presses Tab until a control has the focus. */
async function tabTo(page, name, key = "Tab") {
  for (let presses = 0; presses < 60; presses += 1) {
    if ((await focused(page)) === name) return;
    await page.keyboard.press(key);
  }
  assert.fail(`Tab never reaches ${name}`);
}

async function done(page) {
  await page.waitForSelector(".answer:last-child:not([aria-busy])", { timeout: 20000 });
}

async function say(page, text) {
  await tabTo(page, "prompt");
  await page.keyboard.type(text);
  await page.keyboard.press("Enter");
  await done(page);
}

async function setProbabilities(page) {
  await tabTo(page, "open");
  await page.keyboard.press("Enter");
  await tabTo(page, "probabilities");
  await page.keyboard.press("Space");
}

test("chat: Enter sends, the answer streams, the focus stays, the system prompt and parameters go out", async () => {
  await open({}, async (page) => {
    assert.equal(await focused(page), "prompt");
    await tabTo(page, "open");
    await page.keyboard.press("Enter");
    assert.equal(await focused(page), "system");
    await page.keyboard.type("Be brief.");
    assert.equal(await page.getAttribute("#temperature", "placeholder"), "0.6");
    assert.equal(await page.getAttribute("#repetition_penalty", "placeholder"), "1.1");
    await tabTo(page, "temperature");
    await page.keyboard.type("0.25");
    await tabTo(page, "seed");
    await page.keyboard.type("-7");
    await tabTo(page, "stop");
    await page.keyboard.type("END");
    await page.keyboard.press("Enter");
    await page.keyboard.type("a\\nb");
    await tabTo(page, "other");
    await page.keyboard.type('{"min_tokens": 2, "stream": false}');
    await say(page, "first");
    assert.equal(await focused(page), "prompt");
    assert.equal(await lastAnswer(page), "You wrote: first");
    await page.keyboard.type("two");
    await page.keyboard.press("Shift+Enter");
    await page.keyboard.type("lines");
    await page.keyboard.press("Enter");
    await done(page);
    const body = (await requests()).at(-1);
    assert.deepEqual(body.messages, [
      { role: "system", content: "Be brief." }, { role: "user", content: "first" },
      { role: "assistant", content: "You wrote: first" }, { role: "user", content: "two\nlines" },
    ]);
    assert.equal(body.temperature, 0.25);
    assert.equal(body.seed, -7);
    assert.deepEqual(body.stop, ["END", "a\nb"]);
    assert.equal(body.min_tokens, 2);
    assert.equal(body.stream, true);
    assert.equal(body.model, "demo/small");
    assert.ok(!("top_p" in body) && !("logprobs" in body));
    const stats = await page.locator(".answer .stats").last().innerText();
    assert.match(stats, /^\d+ tokens · [\d.,]+ tokens\/s · first after .+ · prompt 24 tokens, 16 cached$/);
  });
});

test("an answer is announced once, when it is complete", async () => {
  await open({}, async (page) => {
    await say(page, "hello");
    assert.deepEqual(await announced(page), ["You wrote: hello"]);
    await tabTo(page, "prompt");
    await page.keyboard.type("slow");
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => document.querySelector(".answer:last-child .text").textContent.length > 40);
    assert.equal(await page.getAttribute(".answer:last-child", "aria-busy"), "true");
    assert.equal((await announced(page)).length, 1);
    await page.keyboard.press("Escape");
    await done(page);
    assert.equal((await announced(page)).length, 2);
    assert.match((await announced(page))[1], /^Stopped\.\none two/);
  });
});

test("stop: Esc ends the answer and the server sees it; the text stays", async () => {
  await open({}, async (page) => {
    await page.keyboard.type("slow");
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => document.querySelector(".answer .text").textContent.length > 40);
    await page.keyboard.press("Escape");
    await done(page);
    const text = await lastAnswer(page);
    assert.match(text, /^one two three/);
    assert.match(await page.locator(".stats").innerText(), /stopped$/);
    for (let tries = 0; (await requests()).at(-1) !== "the client has left"; tries += 1) {
      assert.ok(tries < 100, "the server never saw it");
      await page.waitForTimeout(20);
    }
    assert.equal(await lastAnswer(page), text);
    await page.keyboard.type("slow");
    await page.keyboard.press("Enter");
    await tabTo(page, "stop-answer");
    await page.keyboard.press("Enter");
    await done(page);
    assert.equal(await focused(page), "prompt");
  });
});

test("edit: a message is changed and sent again, later ones go and come back", async () => {
  await open({}, async (page) => {
    await say(page, "first");
    await say(page, "second");
    await tabTo(page, "Edit", "Shift+Tab"); // of the second
    await page.keyboard.press("Shift+Tab");
    await tabTo(page, "Edit", "Shift+Tab");
    await page.keyboard.press("Enter");
    assert.equal(await focused(page), "Edit the message");
    await page.keyboard.press("Escape");
    assert.equal(await focused(page), "Edit");
    assert.equal(await page.locator(".message").count(), 4);
    await page.keyboard.press("Enter");
    await page.keyboard.press("ControlOrMeta+a");
    await page.keyboard.type("changed");
    await page.keyboard.press("Enter");
    await done(page);
    assert.deepEqual(await answers(page), ["You wrote: changed"]);
    assert.deepEqual((await requests()).at(-1).messages, [{ role: "user", content: "changed" }]);
    assert.equal(await focused(page), "prompt");
    await tabTo(page, "undo", "Shift+Tab");
    await page.keyboard.press("Enter");
    assert.deepEqual(await answers(page), ["You wrote: first", "You wrote: second"]);
  });
});

test("regenerate: the same messages are sent again", async () => {
  await open({}, async (page) => {
    await say(page, "again");
    const body = (await requests()).at(-1);
    const count = (await requests()).length;
    await tabTo(page, "Regenerate", "Shift+Tab");
    await page.keyboard.press("Enter");
    await done(page);
    assert.equal((await requests()).length, count + 1);
    assert.deepEqual((await requests()).at(-1), body);
    assert.deepEqual(await answers(page), ["You wrote: again"]);
    assert.equal(await focused(page), "prompt");
  });
});

test("copy: the text of an answer as it came", async () => {
  await open({ permissions: ["clipboard-read", "clipboard-write"] }, async (page) => {
    await say(page, "**bold**");
    await tabTo(page, "Copy", "Shift+Tab");
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => document.querySelector("#notice span").textContent === "Copied.");
    assert.equal(await page.evaluate(() => navigator.clipboard.readText()), "You wrote: **bold**");
  });
});

test("export and import: a conversation comes back whole, without the key", async () => {
  await state({ needs_key: true });
  await open({ isRefused: true }, async (page) => {
    await page.waitForSelector("#banner-key:visible");
    await tabTo(page, "banner-key");
    await page.keyboard.press("Enter");
    assert.equal(await focused(page), "key");
    await page.keyboard.type(KEY);
    await page.waitForFunction(() => document.getElementById("running").textContent === "3");
    await tabTo(page, "system", "Shift+Tab");
    await page.keyboard.type("Be kind.");
    await tabTo(page, "top_k");
    await page.keyboard.type("3");
    await say(page, "think");
    await say(page, "rich");
    const before = await page.innerHTML("#conversation");
    await tabTo(page, "export");
    const [download] = await Promise.all([page.waitForEvent("download"), page.keyboard.press("Enter")]);
    const text = await readFile(await download.path(), "utf8");
    assert.match(download.suggestedFilename(), /^nv-conversation-.*\.json$/);
    assert.ok(!text.includes(KEY));
    const found = JSON.parse(text);
    assert.deepEqual(found.messages.map((each) => each.role), ["user", "assistant", "user", "assistant"]);
    assert.equal(found.messages[1].reasoning_content, "The user greets me. I should greet back, **briefly**.");
    assert.equal(found.system, "Be kind.");

    await tabTo(page, "new", "Shift+Tab");
    await page.keyboard.press("Enter");
    assert.equal(await page.locator(".message").count(), 0);
    await tabTo(page, "top_k");
    await page.keyboard.press("Backspace");
    const file = join(folder, "exported.json");
    await writeFile(file, text);
    await tabTo(page, "import");
    const [chooser] = await Promise.all([page.waitForEvent("filechooser"), page.keyboard.press("Enter")]);
    await chooser.setFiles(file);
    await page.waitForFunction(() => document.querySelectorAll(".message").length === 4);
    const plain = (html) => html.replace(/<summary>.*?<\/summary>/g, "<summary>");
    assert.equal(plain(await page.innerHTML("#conversation")), plain(before));
    assert.equal(await page.inputValue("#top_k"), "3");

    for (const [wrong, words] of [["[{}]", "Message 1"], ["nonsense", "not JSON"], ["{}", "no list"], ['[{"role": "robot", "content": "x"}]', '"robot"']]) {
      await writeFile(file, wrong);
      await page.setInputFiles("#file", file);
      await page.waitForFunction((text) => document.querySelector("#notice span").textContent.includes(text), words);
      assert.equal(await page.locator(".message").count(), 4);
    }
    await page.reload();
    assert.equal(await page.locator(".message").count(), 4);
    assert.equal(await page.inputValue("#key"), KEY);
    assert.equal(await page.evaluate(() => localStorage.length), 0);
  });
});

for (const [asked, title] of [
  ["status 429 queue_full", "The server is busy. Its queue is full. Try again in 3 s."],
  ["status 503 loading", "The model is still loading. Try again in a moment."],
  ["status 503 draining", "The server cannot answer now. The stub answers 503"],
  ["status 401", "The server wants an API key, or does not know the one that it got. The stub answers 401"],
  ["status 400", "The server refused the request. The stub answers 400"],
  ["status 500", "The server failed. The stub answers 500"],
]) {
  test(`an error in words, and Try again works: ${asked}`, async () => {
    await open({}, async (page) => {
      await say(page, asked);
      assert.equal((await page.locator(".problem p").allInnerTexts()).join(" "), title);
      assert.deepEqual(await announced(page), [title]);
      await tabTo(page, "Try again", "Shift+Tab");
      await page.keyboard.press("Enter");
      await done(page);
      assert.equal(await lastAnswer(page), `You wrote: ${asked}`);
      assert.equal(await page.locator(".problem").count(), 0);
      assert.deepEqual((await requests()).at(-1).messages, [{ role: "user", content: asked }]);
    });
  });
}

test("a broken connection, a late error, a server that is gone, and a wrong setting are errors in words", async () => {
  await open({}, async (page, context) => {
    await say(page, "cut");
    assert.match(await page.locator(".problem").last().innerText(), /The connection was lost/);
    assert.equal(await lastAnswer(page), "This answer is");
    await say(page, "late error");
    assert.match(await page.locator(".problem").last().innerText(), /The server failed\.\s+Out of memory/);
    assert.equal(await lastAnswer(page), "So far so good");
    await context.setOffline(true);
    await say(page, "hello");
    assert.match(await page.locator(".problem").last().innerText(), /The server cannot be reached/);
    await context.setOffline(false);
    await tabTo(page, "open", "Shift+Tab");
    await page.keyboard.press("Enter");
    await tabTo(page, "top_p");
    await page.keyboard.type("7");
    await say(page, "hello");
    assert.match(await page.locator(".problem").last().innerText(), /top_p is not a number that can be sent/);
  });
});

test("while the model loads the page says so, and goes on by itself", async () => {
  await state({ is_loading: true });
  await open({ isRefused: true }, async (page) => {
    await page.waitForFunction(() => document.getElementById("state").textContent === "The model is loading …");
    await state({});
    await page.waitForFunction(() => document.getElementById("running").textContent === "3");
    assert.ok(await page.isHidden("#banner"));
    assert.deepEqual(await page.locator("#gauges dd:not(.bar)").allInnerTexts(), ["3", "2", "37 %"]);
  });
});

test("for a model that pools the page says what it makes, and has no message field", async () => {
  const routes = ["/v1/embeddings", "/v1/score", "/v1/rerank", "/pooling"];
  await state({ defaults: { tasks: ["embed", "token_embed"], routes } });
  await open({}, async (page) => {
    await page.waitForFunction(() => document.getElementById("question").textContent === "This model does not chat");
    assert.equal(await page.innerText("#facts"), "demo/small reads texts of up to 2,048 tokens and makes embeddings and embeddings of each token. Send texts to /v1/embeddings, /v1/score, /v1/rerank, and /pooling.");
    assert.ok(await page.isHidden("#composer"));
    assert.ok(await page.isDisabled("#new"));
  });
});

test("gauges are asked for while the page is visible, and not while it is hidden", async () => {
  await open({}, async (page) => {
    let count = 0;
    page.on("request", (request) => { count += request.url().endsWith("/metrics") ? 1 : 0; });
    const show = (value) => page.evaluate((to) => {
      Object.defineProperty(document, "visibilityState", { value: to, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
    }, value);
    await page.waitForTimeout(3000);
    assert.ok(count >= 1);
    await show("hidden");
    await page.waitForTimeout(2500); // one may be on its way
    count = 0;
    await page.waitForTimeout(4500);
    assert.equal(count, 0);
    await show("visible");
    await page.waitForTimeout(500);
    assert.equal(count, 1);
  });
});

test("a hostile answer runs nothing and makes no element of its own", async () => {
  await open({}, async (page, context) => {
    await setProbabilities(page);
    await say(page, "hostile");
    await page.keyboard.press("Shift+Tab");
    await tabTo(page, "Show text", "Shift+Tab");
    await page.keyboard.press("Enter");
    await say(page, "<img src=x onerror='window.hacked = 20'><script>window.hacked = 21</script>");
    const file = join(folder, "hostile.json");
    const bad = "<img src=x onerror=window.hacked=30>";
    await writeFile(file, JSON.stringify({ system: bad, messages: [
      { role: "user", content: bad }, { role: "assistant", content: `[a](javascript:window.hacked=31) ${bad}`, reasoning_content: bad, model: bad, stats: bad },
    ] }));
    for (const step of [async () => {}, async () => { await page.setInputFiles("#file", file); await page.waitForFunction(() => document.querySelectorAll(".message").length === 2); }]) {
      await step();
      for (const link of await page.locator("#conversation a").all()) await link.click({ modifiers: ["ControlOrMeta"] });
      await page.waitForTimeout(200);
      assert.equal(await page.evaluate(() => window.hacked), undefined);
      const tags = await page.evaluate(() => [...new Set(Array.from(document.querySelectorAll("#conversation *"), (each) => each.localName))]);
      const known = ["article", "blockquote", "br", "button", "code", "details", "div", "h2", "h3", "p", "pre", "span", "summary", "table", "tbody", "td", "th", "thead", "tr"];
      assert.deepEqual(tags.filter((tag) => !known.includes(tag)), []);
      const attributes = await page.evaluate(() => [...new Set(Array.from(document.querySelectorAll("#conversation *"), (each) => each.getAttributeNames()).flat())]);
      assert.deepEqual(attributes.filter((name) => name.startsWith("on") || ["href", "src", "style"].includes(name)), []);
    }
    assert.equal(context.pages().length, 1);
  });
});

test("the policy stops a script even if one came into the page", async () => {
  const context = await browser.newContext();
  const page = await context.newPage();
  await page.goto(origin);
  const thrown = await page.evaluate(() => {
    try { document.body.innerHTML = "<img src=x onerror='window.hacked = 1'>"; } catch (error) { return error.name; }
    return "nothing";
  });
  assert.equal(thrown, "TypeError");
  await page.evaluate(() => {
    const script = document.createElement("script");
    try { script.text = "window.hacked = 2"; } catch { /* as it should */ }
    document.body.append(script);
    const link = document.createElement("a");
    link.href = "javascript:window.hacked = 3";
    link.click();
    fetch("http://127.0.0.1:9/").catch(() => {});
  });
  await page.waitForTimeout(200);
  assert.equal(await page.evaluate(() => window.hacked), undefined);
  await context.close();
});

test("thoughts are folded, and open by keyboard", async () => {
  await open({}, async (page) => {
    await say(page, "think");
    assert.equal(await lastAnswer(page), "Hello!");
    assert.ok(await page.isHidden(".thoughts .text"));
    assert.match(await page.innerText("summary"), /^Thoughts · /);
    await page.keyboard.press("Shift+Tab");
    while ((await page.evaluate(() => document.activeElement.localName)) !== "summary") await page.keyboard.press("Shift+Tab");
    await page.keyboard.press("Enter");
    assert.equal(await page.innerText(".thoughts .text"), "The user greets me. I should greet back, briefly.");
    assert.deepEqual(await announced(page), ["Hello!"]);
  });
});

test("token probabilities are shown by pointer and by keyboard", async () => {
  await open({}, async (page) => {
    await setProbabilities(page);
    await say(page, "the sea");
    const body = (await requests()).at(-1);
    assert.equal(body.logprobs, true);
    assert.equal(body.top_logprobs, 5);
    assert.equal(await page.innerText(".tokens"), "You wrote: the sea");
    await page.hover(".tokens span:nth-child(2)");
    assert.deepEqual(await page.locator("#candidates .drawn span").allInnerTexts(), ["67.0 %"]);
    await page.mouse.move(5, 400);
    assert.ok(await page.isHidden("#candidates"));
    await tabTo(page, "Tokens and their probabilities; arrow keys go from one to the next", "Shift+Tab");
    await page.keyboard.press("ArrowRight");
    await page.keyboard.press("ArrowRight");
    const label = () => page.evaluate(() => document.getElementById(document.querySelector(".tokens").getAttribute("aria-activedescendant")).getAttribute("aria-label"));
    assert.match(await label(), /^e: t, 30\.1 %; e: t 30\.1 %; ␣the 15\.0 %/);
    assert.ok(await page.isVisible("#candidates"));
    await page.keyboard.press("Escape");
    assert.ok(await page.isHidden("#candidates"));
    await tabTo(page, "Show text");
    await page.keyboard.press("Enter");
    assert.equal(await lastAnswer(page), "You wrote: the sea");
  });
});

async function everything(page, width) {
  await setProbabilities(page);
  if (width < 960) await page.keyboard.press("Escape");
  await say(page, "the sea");
  await say(page, "think");
  await page.click("summary");
  await say(page, "status 400");
  await say(page, "rich");
  await tabTo(page, "Show text", "Shift+Tab");
  await page.keyboard.press("Enter");
  await say(page, `unbroken ${"x".repeat(200)}`);
  await page.locator(".user button:text-is('Edit')").first().click();
}

async function problems(page) {
  await page.evaluate(axe);
  const { violations, passes } = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  assert.ok(passes.length > 20);
  return violations.map(({ id, nodes }) => `${id}: ${nodes.map((node) => node.html.slice(0, 200)).join(" | ")}`);
}

for (const colorScheme of ["light", "dark"]) {
  for (const viewport of [{ width: 1200, height: 800 }, NARROW]) {
    test(`axe finds nothing: ${colorScheme}, ${viewport.width} px`, async () => {
      await open({ colorScheme, viewport }, async (page) => {
        assert.deepEqual(await problems(page), []);
        await everything(page, viewport.width);
        assert.deepEqual(await problems(page), []);
        if (viewport === NARROW) await page.click("#open");
        assert.deepEqual(await problems(page), []);
      });
    });
  }
}

test("a screen of 320 px has nothing to scroll sideways", async () => {
  await open({ viewport: NARROW }, async (page) => {
    const excess = () => page.evaluate(() => [document.documentElement, document.getElementById("settings")].map((each) => each.scrollWidth - each.clientWidth));
    assert.deepEqual(await excess(), [0, 0]);
    await everything(page, NARROW.width);
    await page.locator(".tokens").first().focus();
    assert.deepEqual(await excess(), [0, 0]);
    const box = await page.locator("#candidates").boundingBox();
    if (box) assert.ok(box.x >= 0 && box.x + box.width <= NARROW.width);
    await page.locator("#open").click();
    assert.deepEqual(await excess(), [0, 0]);
    await tabTo(page, "close", "Shift+Tab");
    await page.keyboard.press("Enter");
    assert.equal(await focused(page), "open");
  });
});

test("every control that Tab reaches shows that it has the focus", async () => {
  await open({}, async (page) => {
    await setProbabilities(page);
    await say(page, "rich");
    await tabTo(page, "Show text", "Shift+Tab");
    await page.keyboard.press("Enter");
    const seen = new Set();
    for (let presses = 0; presses < 60; presses += 1) {
      await page.keyboard.press("Tab");
      const [name, isShown] = await page.evaluate(() => {
        const element = document.activeElement;
        const ring = element.id === "prompt" ? getComputedStyle(document.getElementById("box")).boxShadow !== "none"
          : getComputedStyle(element).outlineStyle !== "none" && parseFloat(getComputedStyle(element).outlineWidth) >= 2;
        const { width, height } = element.getBoundingClientRect();
        return [element.getAttribute("aria-label") ?? (element.id || element.textContent), element === document.body || (ring && width > 1 && height > 1)];
      });
      assert.ok(isShown, name);
      seen.add(name);
    }
    for (const name of ["Skip to the message field", "models", "new", "open", "system", "export", "import", "Edit", "Regenerate", "Code", "Table", "prompt"]) assert.ok(seen.has(name), name);
  });
});

/* ---- Markdown alone, in an empty page without a policy ---- */

async function markdown(steps) {
  const html = await readFile(join(here, "../../packages/nv-api/src/nv_api/server/page/index.html"), "utf8");
  const [, source] = /<script type="module">\n([\s\S]*?)\/\* ---- Small things/.exec(html);
  const context = await browser.newContext();
  const page = await context.newPage();
  await page.evaluate((text) => Object.assign(window, new Function(`${text}; return { Growing };`)()), source);
  await page.evaluate(() => {
    window.shown = (text, cuts) => {
      const root = document.createElement("div");
      const growing = new window.Growing(root);
      let from = 0;
      for (const cut of [...cuts, text.length]) {
        growing.push(text.slice(from, cut));
        if (cut < text.length) growing.show();
        from = cut;
      }
      growing.show(true);
      return root.innerHTML;
    };
  });
  try { await steps(page); } finally { await context.close(); }
}

const TEXTS = [
  "# One\n## Two ##\n\nA *b* **c** ***d*** ~~e~~ `f` ``g ` h`` \\*i\\* _j_ k_l_m 2*3*4 5 * 6\nnext\n\n---\n***\n",
  "- a\n- b\n  - c\n\n    d\n- e\n\n1. x\n2. y\n\n   z\n3) w\n* other\n\ntext\n- [ ] open\n",
  "before\n```py\na = 1\n\n  b = \"```\"\n``` \nafter\n~~~\nx\n```\n~~~\n- item\n  ```js\n  1\n  ```\n\n````\n```\n````",
  "| a | b |\n|---|:-:|\n| 1 | `x|y` | 3 |\n| 2 \\| 3 |\nnot | a row\n\ntext\n| c |\n|---|\n| d |\n",
  "> quote\n> - list\n>\n> > deeper\n\nhttps://example.org/a_(b). [l](http://x.org/y_(z) \"t\") [bad](javascript:x) [no] (http://a.b) **[n](https://a.b)** <https://c.d>\n",
  "**bold that never ends\n\n*italics `code\n\n```\ncode that never ends\n\n",
  "1\n2\n-\n- \n+\n#\n####### x\n#tag\n```\n\n\n\n   \n\t- tab\n\n12345678901. no\n",
];

test("a text that comes in pieces, cut anywhere, is shown as the whole", async () => {
  await markdown(async (page) => {
    const wrong = await page.evaluate((texts) => {
      const found = [];
      let seed = 12;
      const random = () => { seed = (seed * 1103515245 + 12345) % 2147483648; return seed / 2147483648; };
      for (const text of texts) {
        const whole = window.shown(text, []);
        const all = Array.from(text, (_, i) => i + 1).slice(0, -1);
        const ways = [all, ...all.map((cut) => [cut]), ...Array.from({ length: 100 }, () => all.filter(() => random() < 0.15))];
        for (const cuts of ways) {
          const shown = window.shown(text, cuts);
          if (shown !== whole) { found.push({ cuts, shown, whole }); break; }
        }
      }
      return found;
    }, TEXTS);
    assert.deepEqual(wrong, []);
  });
});

for (const [text, html] of [
  ["**a** *b* `c` ~~d~~", "<p><strong>a</strong> <em>b</em> <code>c</code> <s>d</s></p>"],
  ["***a*** __b__ _c_ d_e_f", "<p><strong><em>a</em></strong> <strong>b</strong> <em>c</em> d_e_f</p>"],
  ["**a *b** c*", "<p><strong>a *b</strong> c*</p>"],
  ["`a **b` c**", "<p><code>a **b</code> c**</p>"],
  ["2 * 3 * 4 ** 5", "<p>2 * 3 * 4 ** 5</p>"],
  ["\\# \\*a\\*", "<p># *a*</p>"],
  ["a\nb", "<p>a<br>b</p>"],
  ["## a #\n###### b\n### c\n# d", "<h3>a</h3><h4>b</h4><h4>c</h4><h3>d</h3>"],
  ["3. a\n4. b", '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>'],
  ["- a\n\n- b\n  1. c", "<ul><li><p>a</p></li><li><p>b</p><ol><li><p>c</p></li></ol></li></ul>"],
  ["> a\n> b", "<blockquote><p>a<br>b</p></blockquote>"],
  ["a\n\n---", "<p>a</p><hr>"],
  ["[a](https://b.c/d)", '<p><a href="https://b.c/d" rel="noopener noreferrer nofollow" target="_blank">a</a></p>'],
  ["see https://b.c/d.", '<p>see <a href="https://b.c/d" rel="noopener noreferrer nofollow" target="_blank">https://b.c/d</a>.</p>'],
  ["[a](javascript:b) [c](/d) [e](ftp://f)", "<p>[a](javascript:b) [c](/d) [e](ftp://f)</p>"],
  ["<b>&amp;</b>", "<p>&lt;b&gt;&amp;amp;&lt;/b&gt;</p>"],
]) {
  test(`Markdown: ${JSON.stringify(text)}`, async () => {
    await markdown(async (page) => assert.equal(await page.evaluate((given) => window.shown(given, []), text), html));
  });
}

test("a long answer costs each block once, and a hostile one is read in a straight line", async () => {
  await markdown(async (page) => {
    const { made, kept, numBlocks } = await page.evaluate(() => {
      let count = 0;
      const create = document.createElement.bind(document);
      document.createElement = (tag) => { count += 1; return create(tag); };
      const root = create("div");
      const growing = new window.Growing(root);
      const unit = "A paragraph with **bold** text.\n\n- item\n- item\n\n```\ncode\n```\n\n";
      growing.push(unit);
      growing.show();
      const first = root.firstChild;
      for (let i = 1; i < 400; i += 1) for (const half of [unit.slice(0, 20), unit.slice(20)]) { growing.push(half); growing.show(); }
      growing.push("```\n");
      const before = count;
      for (let i = 0; i < 5000; i += 1) { growing.push("a line of code\n"); growing.show(); }
      growing.show(true);
      return { made: [before, count - before], kept: root.firstChild === first, numBlocks: root.childElementCount };
    });
    assert.ok(kept);
    assert.equal(numBlocks, 1201);
    assert.ok(made[0] < 400 * 30, `${made[0]} elements`);
    assert.ok(made[1] < 20, `${made[1]} elements for one block of code`);
    const slow = await page.evaluate(() => {
      const n = 100000;
      const found = [];
      for (const unit of ["*", "**a ", "_a", "`", "``a`", "[", "[a](", "[a](http://b(", "> ", "- ", "  - a\n", "1. ", "|", "|-|\n", "#", "# ", "~~a", "http://", "http://a)", "\\", "*a_b**c", "``` ", "~~~\n", " "]) {
        const text = unit.repeat(n / unit.length);
        for (const each of [text, `# ${text}x`, `x${text}\n`]) {
          const begun = performance.now();
          window.shown(each, [n / 3, n / 2]);
          if (performance.now() - begun > 5000) found.push(unit);
        }
      }
      return found;
    });
    assert.deepEqual(slow, []);
  });
});
