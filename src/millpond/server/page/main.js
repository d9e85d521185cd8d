// The page: a chat on the left, what is remembered of it on the right.

import { Answer } from "./answer.js";
import { cannotTell, events, get } from "./chat.js";
import { Conversation, Turn } from "./conversation.js";
import { MemoryView } from "./memory.js";
import { Reading } from "./reading.js";

const $ = (id) => document.getElementById(id);
const KEY = "millpond-key", SYSTEM = "millpond-system";
const NEAR_PX = 80; // of the end of the log: the newest words are in sight

let tells = true; // the server tells what is held of each message
let abort = null; // of the answer that is under way
let served = null; // what the server said of its model

const key = () => $("key").value;
const memory = new MemoryView(key);
const chat = new Conversation($("log"));
const definition = $("definition").textContent.replace(/\s+/g, " ");

function say(text) { $("status").textContent = text; }

function busy(on) {
  document.body.dataset.busy = on;
  for (const [id, shown] of [["send", !on], ["stop", on]]) {
    $(id).disabled = !shown;
    $(id).hidden = !shown;
  }
}

// Keep the end of the log in sight, unless a person looks back.
function follow(change) {
  const log = $("log"), atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_PX;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

// What is wrong, for a person; null: nothing is, the answer was stopped.
function refused(error) {
  if (error.status === 401) { $("key-row").hidden = false; $("key").focus(); }
  return error.name === "AbortError" ? null : error.message;
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

function wanted(turns) {
  const kept = (turn) => (turn.role === "system" && $("keep").checked ? { millpond: { keep: true } } : {});
  const messages = turns.map((turn) => ({ role: turn.role, content: turn.text, ...kept(turn) }));
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
async function* answered(turns, signal) {
  try {
    yield* events(wanted(turns), key(), signal);
  } catch (error) {
    if (!tells || !cannotTell(error)) throw error;
    tells = false;
    yield* events(wanted(turns), key(), signal);
  }
}

// What is held of each message that was sent.
function mark(usage, turns) {
  for (const { message, tokens, held } of usage?.millpond?.forgotten ?? []) {
    if (tokens) turns[message]?.holds(held, definition);
  }
}

// The answer to what is said so far; the last turn is a user's.
async function ask() {
  const question = chat.last, began = performance.now();
  chat.begin($("system").value.trim());
  const turns = chat.sent, turn = new Turn("assistant", "");
  turn.tool("again", "Regenerate", again);
  follow(() => chat.add(turn));
  $("log").scrollTop = $("log").scrollHeight;
  const answer = new Answer(turn.body, key), reading = new Reading(turn.body);
  let first = 0, pieces = 0, id = null, why = null;
  abort = new AbortController();
  busy(true);
  say("The model is asked");
  $("pace").textContent = "";
  try {
    for await (const event of answered(turns, abort.signal)) {
      if (!id) { id = event.id; memory.follow(id); }
      if (event.prompt_progress) reading.show(event.prompt_progress);
      const piece = event.choices[0]?.delta.content;
      if (piece) {
        if (!first) { first = performance.now(); reading.end(); }
        pieces++;
        follow(() => answer.add(piece));
      }
      follow(() => mark(event.usage, turns));
      pace(began, first, event.usage?.completion_tokens ?? pieces, performance.now());
    }
  } catch (error) {
    why = refused(error);
  } finally {
    reading.end();
    turn.text = answer.text;
    if (!answer.text) { chat.cut(turn); question.failed(why); }
    else if (why) turn.tell(why);
    await Promise.all([answer.end(), memory.ended(Boolean(answer.text))]);
    say(answer.text ? `The model says: ${answer.text}` : "There is no answer");
    abort = null;
    busy(false);
    follow(() => {});
    if (!document.activeElement?.closest(".edit")) $("input").focus();
  }
}

function send(text) {
  const turn = new Turn("user", text);
  turn.tool("again", "Try again", again);
  turn.tool("change", "Edit", () => { if (!abort) turn.edit((changed) => goOn(turn, changed)); });
  follow(() => chat.add(turn));
  ask();
}

// Another answer to the last thing that was said.
function again() {
  if (abort) return;
  if (chat.last.role === "assistant") chat.cut(chat.last);
  goOn(chat.last);
}

// A message, as it was or changed, and what follows from it.
function goOn(turn, text = turn.text) {
  if (abort) return;
  const next = chat.turns[chat.turns.indexOf(turn) + 1];
  if (next) chat.cut(next);
  turn.begun(text);
  ask();
}

function fresh() {
  abort?.abort();
  memory.clear();
  chat.clear();
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
    $("log").append(Object.assign(document.createElement("p"), { className: "error", textContent: refused(error) }));
  }
}

// A store of the browser's, which a person may have closed.
function stored(store, name, value) {
  try {
    if (value !== undefined) store().setItem(name, value);
    return store().getItem(name) ?? "";
  } catch { return ""; }
}
const session = () => sessionStorage, local = () => localStorage;

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
$("panel").addEventListener("click", () => {
  const open = document.body.classList.toggle("panel");
  $("panel").setAttribute("aria-expanded", open);
});
$("system").addEventListener("input", () => stored(local, SYSTEM, $("system").value));
for (const name of ["preset", "method", "budget", "codec"]) $(name).addEventListener("input", showSettings);
$("key").addEventListener("change", () => { stored(session, KEY, key()); about(); });
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && abort) abort.abort();
  else if (event.altKey && event.key === "ArrowUp") memory.choose(memory.layer - 1);
  else if (event.altKey && event.key === "ArrowDown") memory.choose(memory.layer + 1);
  else if (event.altKey && event.key.toLowerCase() === "n") fresh();
  else return;
  event.preventDefault();
});

$("key").value = stored(session, KEY);
$("system").value = stored(local, SYSTEM);
about();
