// The page: one state (step, layer, head, all heads, token), everything else follows from it.

const $ = (id) => document.getElementById(id);
const trace = new Trace(JSON.parse($("trace").textContent));
const state = { step: 0, layer: 0, head: 0, all: false, token: null };
let playing = null, pinned = null;
const PACE_MS = 220;

const text = new Text($("text"), trace, (position, stays) => {
  if (stays) { pinned = position; text.mark(position); }
  change({ token: position === null ? pinned : position }, stays);
});
const bars = new HeadBars($("heads"), $("heads-note"), trace, (layer, head) => change({ layer, head, all: false }));
const strip = new Strip($("strip"), $("strip-step"), $("strip-token"), trace, (step, token) => {
  stop();
  pinned = token;
  text.mark(token);
  change({ step, token });
});

function theme() {
  const style = getComputedStyle(document.documentElement);
  const rgb = (name) => [1, 3, 5].map((i) => parseInt(style.getPropertyValue(name).trim().slice(i, i + 2), 16));
  return {
    name: dark.matches ? "dark" : "light",
    colours: Array.from({ length: COLOURS }, (_, i) => rgb(`--c${i}`)),
    lost: rgb("--lost"),
  };
}
const dark = matchMedia("(prefers-color-scheme: dark)");
dark.addEventListener("change", () => show());

// ------------------------------------------------------------------ state

const within = (value, low, high) => Math.max(low, Math.min(high, Math.round(value) || 0));

function change(wanted, tell = true) {
  const before = JSON.stringify(state);
  Object.assign(state, wanted);
  state.step = within(state.step, 0, trace.steps);
  state.layer = within(state.layer, 0, trace.layers - 1);
  state.head = within(state.head, 0, trace.perLayer - 1);
  if (state.token !== null) state.token = within(state.token, 0, trace.n - 1);
  if (JSON.stringify(state) === before) return;
  show("token" in wanted && Object.keys(wanted).length === 1);
  if (tell) { remember(); announce(); }
}

function show(onlyToken = false) {
  const { step, layer, head, all } = state;
  if (!onlyToken) {
    text.paint(all ? lookOfAll(trace, step) : lookOfHead(trace, trace.head(layer, head), step));
    $("step").value = step;
    $("step").setAttribute("aria-valuetext", stepName());
    $("step-text").textContent = stepName();
    $("layer").value = layer;
    $("head").value = head;
    $("all").setAttribute("aria-pressed", all);
    document.body.classList.toggle("all", all);
    $("tally").textContent = tally();
    bars.show(state);
    showLegend($("legend"), trace, state);
  }
  strip.show(state, theme());
  showToken($("token"), trace, state, state.token);
}

const stepName = () => state.step ? `step ${state.step} of ${trace.steps}` : `prompt read, step 0 of ${trace.steps}`;

function tally() {
  const held = trace.head(state.layer, state.head).counts[state.step], seen = trace.seen(state.step);
  const cache = `${bytes(trace.kv[state.step])} of ${bytes(trace.full[state.step])} in all`;
  return state.all ? cache : `${number(held)} of ${number(seen)} tokens held here (${percent(held / seen)}) · ${cache}`;
}

// ------------------------------------------------------------------ words for those who listen, and the address

function announce() {
  if (playing) return;
  const parts = [stepName(), state.all ? "all heads" : `layer ${state.layer}, head ${state.head}`, tally()];
  if (!state.all && state.step) {
    const [gone] = trace.head(state.layer, state.head).data.changes[state.step - 1];
    parts.push(gone.length ? `forgotten: ${gone.slice(0, 3).map((p) => shown(trace.tokens[p])).join(", ")}${gone.length > 3 ? " and more" : ""}` : "nothing forgotten");
  }
  if (state.token !== null) {
    const kept = trace.layers * trace.perLayer - forgettings(trace, state.token, state.step).reduce((sum, [, heads]) => sum + heads.length, 0);
    const there = state.token < trace.seen(state.step);
    parts.push(`token ${shown(trace.tokens[state.token])}, position ${state.token}${there ? `, kept in ${kept} heads` : ", not read yet"}`);
  }
  $("live").textContent = parts.join("; ");
}

let wrote = "";
function remember() {
  const { step, layer, head, all, token } = state;
  wrote = `#step=${step}&layer=${layer}&head=${head}${all ? "&all=1" : ""}${token === null ? "" : `&token=${token}`}`;
  try { history.replaceState(null, "", wrote); } catch { /* some viewers forbid it; the page works without */ }
}

function fromAddress() {
  if (!location.hash.includes("=") || location.hash === wrote) return;
  const wanted = new URLSearchParams(location.hash.slice(1)), next = {};
  for (const name of ["step", "layer", "head", "token"]) if (wanted.has(name)) next[name] = Number(wanted.get(name));
  next.all = wanted.get("all") === "1";
  if ("token" in next) { pinned = within(next.token, 0, trace.n - 1); text.mark(pinned); }
  change(next);
}

// ------------------------------------------------------------------ play and keys

function play() {
  if (state.step >= trace.steps) change({ step: 0 });
  playing = setInterval(() => state.step < trace.steps ? change({ step: state.step + 1 }) : stop(), PACE_MS);
  showPlaying();
}
function stop() {
  if (!playing) return;
  clearInterval(playing);
  playing = null;
  showPlaying();
  announce();
}
function showPlaying() {
  $("play").setAttribute("aria-pressed", Boolean(playing));
  $("play").setAttribute("aria-label", playing ? "Pause" : "Play");
  $("play-shape").setAttribute("d", playing ? "M7 5h4v14H7zM14 5h4v14h-4z" : "M7 4.5v15l12-7.5z");
}

const step = (by) => { stop(); change({ step: state.step + by }); };
const KEYS = {
  ArrowLeft: () => step(-1),
  ArrowRight: () => step(1),
  ArrowUp: () => change({ head: state.head - 1, all: false }),
  ArrowDown: () => change({ head: state.head + 1, all: false }),
  PageUp: () => change({ layer: state.layer - 1, all: false }),
  PageDown: () => change({ layer: state.layer + 1, all: false }),
  Home: () => step(-trace.steps),
  End: () => step(trace.steps),
  " ": () => playing ? stop() : play(),
  a: () => change({ all: !state.all }),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const on = event.target.tagName;
  if (on === "SELECT" || (on === "BUTTON" && (event.key === " " || event.key === "Enter"))) return;
  if (event.shiftKey && (event.key === "ArrowLeft" || event.key === "ArrowRight")) {
    const from = state.token === null ? -1 : state.token;
    text.focus(within(from + (event.key === "ArrowRight" ? 1 : -1), 0, trace.n - 1));
  } else if (KEYS[event.key] && !event.shiftKey) KEYS[event.key]();
  else return;
  event.preventDefault();
});

// ------------------------------------------------------------------ the start

$("heading").textContent = trace.title;
for (const [name, value] of Object.entries(trace.setting)) {
  const pair = make("div");
  pair.append(make("dt", "", name), make("dd", "", value));
  $("setting").append(pair);
}
for (const [id, count] of [["layer", trace.layers], ["head", trace.perLayer]]) {
  for (let i = 0; i < count; i++) $(id).append(new Option(i, i));
  $(id).addEventListener("change", () => change({ [id]: Number($(id).value), all: false }));
}
$("step").max = trace.steps;
$("step").addEventListener("input", () => { stop(); change({ step: Number($("step").value) }); });
$("play").addEventListener("click", () => playing ? stop() : play());
$("all").addEventListener("click", () => change({ all: !state.all }));
addEventListener("hashchange", fromAddress);
show();
fromAddress();
