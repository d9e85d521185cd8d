// The page: a chat on the left, what is remembered of it on the right.

import { events, get } from "./chat.js";
import { MemoryView } from "./memory.js";

const $ = (id) => document.getElementById(id);
const STORED = "millpond-key";

const messages = [];
let abort = null;

const key = () => $("key").value;
const memory = new MemoryView(key);

function bubble(role, text) {
  const box = Object.assign(document.createElement("p"), { className: role, textContent: text });
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

function wanted() {
  const millpond = { watch: true };
  for (const name of ["method", "budget", "codec"]) {
    const text = $(name).value.trim();
    if (text) millpond[name] = text;
  }
  const body = { messages, millpond, temperature: Number($("temperature").value) };
  if ($("most").value) body.max_tokens = Number($("most").value);
  return body;
}

function pace(began, first, tokens, now) {
  if (!first) return;
  const rate = tokens > 1 ? ` · ${((tokens - 1) / Math.max((now - first) / 1000, 1e-3)).toFixed(1)} tokens/s` : "";
  $("pace").textContent = `first token after ${((first - began) / 1000).toFixed(2)} s${rate}`;
}

async function send(text) {
  messages.push({ role: "user", content: text });
  bubble("user", text);
  const box = bubble("assistant", "");
  const began = performance.now();
  let first = 0, pieces = 0, id = null, answer = "";
  abort = new AbortController();
  busy(true);
  try {
    for await (const event of events(wanted(), key(), abort.signal)) {
      if (!id) { id = event.id; memory.follow(id); }
      const piece = event.choices[0]?.delta.content;
      if (piece) {
        first ||= performance.now();
        pieces++;
        answer += piece;
        box.textContent = answer;
        $("log").scrollTop = $("log").scrollHeight;
      }
      pace(began, first, event.usage?.completion_tokens ?? pieces, performance.now());
    }
  } catch (error) {
    refused(error);
  } finally {
    abort = null;
    busy(false);
    if (answer) messages.push({ role: "assistant", content: answer });
    else box.remove();
    await memory.ended();
    $("input").focus();
  }
}

function fresh() {
  abort?.abort();
  messages.length = 0;
  memory.clear();
  $("log").replaceChildren();
  $("pace").textContent = "";
  $("input").focus();
}

async function about() {
  try {
    const [model] = (await get("v1/models", key())).data;
    const { method, budget, codec, context_length, methods } = model.millpond;
    $("model").textContent = model.id;
    document.title = `${model.id} · Millpond`;
    const setting = [method, budget && `budget ${budget}`, codec, `context ${context_length.toLocaleString("en")}`];
    $("about").textContent = setting.filter(Boolean).join(" · ");
    $("methods").replaceChildren(...methods.map((name) => new Option(name, name)));
    $("method").placeholder = method ?? "";
    $("budget").placeholder = budget ?? "";
    $("codec").placeholder = codec ?? "auto";
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
