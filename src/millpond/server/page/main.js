// The page: a chat on the left, what is remembered of it on the right.

import { Answer } from "./answer.js";
import { events, get } from "./chat.js";
import { cannotTell, mark } from "./forgotten.js";
import { MemoryView } from "./memory.js";

const $ = (id) => document.getElementById(id);
const STORED = "millpond-key";

const messages = [], boxes = []; // what is said, and where each message is shown
let tells = true; // the server tells what it has forgotten
let abort = null;
let served = null; // what the server said of its model

const key = () => $("key").value;
const memory = new MemoryView(key);

function bubble(role, text) {
  const box = Object.assign(document.createElement("div"), { className: role, textContent: text });
  $("log").append(box);
  $("log").scrollTop = $("log").scrollHeight;
  return box;
}

function busy(on) {
  $("send").disabled = on;
  $("stop").disabled = !on;
}

function refused(error) {
  if (error.name === "AbortError") return;
  bubble("error", error.message);
  if (error.status === 401) { $("key-row").hidden = false; $("key").focus(); }
}

// How this chat's caches are kept, where it is not as the server does.
function chosen() {
  if ($("preset").value) return { preset: $("preset").value };
  const pairs = ["method", "budget", "codec"].map((name) => [name, $(name).value.trim()]);
  return Object.fromEntries(pairs.filter(([, text]) => text));
}

// Header and placeholders: what holds for this chat.
function showSettings() {
  if (!served) return;
  const own = chosen(), preset = served.presets[own.preset];
  for (const name of ["method", "budget", "codec"]) $(name).disabled = Boolean(preset);
  const method = preset?.method ?? own.method ?? served.method;
  const bare = served.without_budget.includes(method);
  const usual = bare ? "none" : served.budget ?? "default";
  $("method").placeholder = preset?.method ?? served.method ?? "";
  $("budget").placeholder = preset ? preset.budget ?? "none" : usual;
  $("codec").placeholder = preset?.codec ?? served.codec ?? "auto";
  const budget = preset ? preset.budget : bare ? null : own.budget ?? served.budget;
  const codec = preset?.codec ?? own.codec ?? served.codec;
  const context = `context ${served.context_length.toLocaleString("en")}`;
  $("about").textContent = [own.preset, method, budget && `budget ${budget}`, codec, context].filter(Boolean).join(" · ");
}

function wanted() {
  const millpond = { watch: true, ...(tells && { forgotten: true }), ...chosen() };
  const body = { messages, millpond, temperature: Number($("temperature").value) };
  if ($("most").value) body.max_tokens = Number($("most").value);
  return body;
}

function pace(began, first, tokens, now) {
  if (!first) return;
  const rate = tokens > 1 ? ` · ${((tokens - 1) / Math.max((now - first) / 1000, 1e-3)).toFixed(1)} tokens/s` : "";
  $("pace").textContent = `first token after ${((first - began) / 1000).toFixed(2)} s${rate}`;
}

// The events of an answer; once more without what a server cannot tell.
async function* answered(signal) {
  try {
    yield* events(wanted(), key(), signal);
  } catch (error) {
    if (!tells || !cannotTell(error)) throw error;
    tells = false;
    yield* events(wanted(), key(), signal);
  }
}

async function send(text) {
  messages.push({ role: "user", content: text });
  boxes.push(bubble("user", text));
  const box = bubble("assistant", "");
  const began = performance.now();
  const answer = new Answer(box, key);
  let first = 0, pieces = 0, id = null;
  abort = new AbortController();
  busy(true);
  try {
    for await (const event of answered(abort.signal)) {
      if (!id) { id = event.id; memory.follow(id); }
      const piece = event.choices[0]?.delta.content;
      if (piece) {
        first ||= performance.now();
        pieces++;
        answer.add(piece);
        $("log").scrollTop = $("log").scrollHeight;
      }
      mark(event.usage?.millpond?.forgotten, boxes, $("gone-legend"));
      pace(began, first, event.usage?.completion_tokens ?? pieces, performance.now());
    }
  } catch (error) {
    refused(error);
  } finally {
    if (answer.text) { messages.push({ role: "assistant", content: answer.text }); boxes.push(box); }
    else box.remove();
    await Promise.all([answer.end(), memory.ended(Boolean(answer.text))]);
    abort = null;
    busy(false);
    $("log").scrollTop = $("log").scrollHeight;
    $("input").focus();
  }
}

function fresh() {
  abort?.abort();
  messages.length = boxes.length = 0;
  $("gone-legend").hidden = true;
  memory.clear();
  $("log").replaceChildren();
  $("pace").textContent = "";
  $("input").focus();
}

async function about() {
  if (document.body.dataset.needsKey === "true" && !key()) {
    $("key-row").hidden = false;
    $("key").focus();
    return;
  }
  try {
    const [model] = (await get("v1/models", key())).data;
    served = model.millpond;
    $("model").textContent = model.id;
    document.title = `${model.id} · Millpond`;
    $("methods").replaceChildren(...served.methods.map((name) => new Option(name, name)));
    $("preset").replaceChildren(new Option("none", ""), ...Object.keys(served.presets).map((name) => new Option(name, name)));
    showSettings();
  } catch (error) {
    refused(error);
  }
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("input").value.trim();
  if (!text || abort) return;
  $("input").value = "";
  send(text);
});
$("input").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("form").requestSubmit();
});
$("stop").addEventListener("click", () => abort?.abort());
$("fresh").addEventListener("click", fresh);
for (const name of ["preset", "method", "budget", "codec"]) $(name).addEventListener("input", showSettings);
$("key").addEventListener("change", () => { sessionStorage.setItem(STORED, key()); about(); });
addEventListener("keydown", (event) => {
  if (event.key === "Escape") abort?.abort();
  else if (event.altKey && event.key === "ArrowUp") memory.choose(memory.layer - 1);
  else if (event.altKey && event.key === "ArrowDown") memory.choose(memory.layer + 1);
  else if (event.altKey && event.key.toLowerCase() === "n") fresh();
  else return;
  event.preventDefault();
});

$("key").value = sessionStorage.getItem(STORED) ?? "";
about();
