// The side: what is known of a token, entries per head, memory over time, and the legend.

const make = (tag, name, text) => {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
};
const number = (x) => x.toLocaleString("en-US");
const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)}%`;
const short = (x) => x === 0 ? "0" : x >= 100 ? x.toFixed(0) : x >= 0.01 ? String(+x.toPrecision(2)) : x.toExponential(0);
const bytes = (n) => n < 1024 ? `${n} B` : n < 1048576 ? `${(n / 1024).toFixed(1)} KiB` : `${(n / 1048576).toFixed(1)} MiB`;
const shown = (piece) => piece.trim() || (piece.includes("\n") ? "↵" : "␣");

function when(step) { return step === 0 ? "after the prompt" : `at step ${step}`; }

// Groups of heads by when they forgot: [[step, ["layer 0 head 1", ...]], ...], earliest first.
function forgettings(trace, position, step) {
  const groups = new Map();
  for (const [layer, head, track] of trace.everyHead()) {
    const gone = track.goneAt(position, step);
    if (gone !== null) groups.set(gone, [...(groups.get(gone) || []), `layer ${layer} head ${head}`]);
  }
  return [...groups].sort((a, b) => a[0] - b[0]);
}

function showToken(box, trace, state, position) {
  box.replaceChildren();
  if (position === null) return box.append(make("p", "note", "Point at a token, or focus one, to see what became of it."));
  const total = trace.layers * trace.perLayer, track = trace.head(state.layer, state.head);
  const word = make("p", "word", shown(trace.tokens[position]));
  const facts = make("dl", "facts");
  const fact = (name, value) => facts.append(make("dt", "", name), make("dd", "", value));
  fact("position", `${number(position)}${position < trace.prompt ? " (prompt)" : " (generated)"}`);
  if (position >= trace.seen(state.step)) {
    fact("state", position === trace.seen(state.step) ? "written in this step, not read yet" : "not written yet");
    return box.append(word, facts);
  }
  const gone = forgettings(trace, position, state.step);
  const kept = total - gone.reduce((sum, [, heads]) => sum + heads.length, 0);
  fact("kept in", `${kept} of ${total} heads`);
  const here = track.goneAt(position, state.step), levels = track.levelsAt(state.step);
  fact("in this head", here === null ? "kept" : `forgotten ${when(here)}`);
  if (here === null && levels && levels[position] !== UNKNOWN) {
    const then = trace.scoreSteps[trace.frameOf(state.step)];
    fact("score", short(track.score(levels[position])) + (then < state.step ? `, as of step ${then}` : ""));
  }
  const merged = track.mergedAt(position, state.step), demoted = track.demotedAt(position, state.step);
  if (merged) fact("merged", `into position ${number(merged[2])} ${when(merged[0])}`);
  if (demoted) fact("demoted", `to ${demoted[2]} ${when(demoted[0])}`);
  box.append(word, facts, squares(trace, state, position));
  for (const [step, heads] of gone.slice(0, 4)) {
    const where = heads.length === total ? "all heads" : heads.length > 4 ? `${heads.length} heads` : heads.join(", ");
    box.append(make("p", "note", `forgotten ${when(step)} by ${where}`));
  }
  if (gone.length > 4) box.append(make("p", "note", `and at ${gone.length - 4} later steps by others`));
}

// A square per head, a row per layer: filled where the token is held.
function squares(trace, state, position) {
  const grid = make("div", "squares");
  grid.style.setProperty("--columns", trace.perLayer);
  grid.setAttribute("aria-hidden", "true");
  for (const [layer, head, track] of trace.everyHead()) {
    const gone = track.goneAt(position, state.step);
    const square = make("i", gone === null ? "on" : "off");
    square.title = `layer ${layer}, head ${head}: ${gone === null ? "kept" : `forgotten ${when(gone)}`}`;
    if (!state.all && layer === state.layer && head === state.head) square.classList.add("here");
    grid.append(square);
  }
  return grid;
}

class HeadBars {
  constructor(box, note, trace, onHead) {
    Object.assign(this, { box, note, trace, cells: [] });
    box.style.setProperty("--columns", trace.perLayer);
    box.classList.toggle("dense", trace.layers > 8);
    for (let layer = 0; layer < trace.layers; layer++) {
      box.append(make("span", "row-name", layer));
      for (let head = 0; head < trace.perLayer; head++) {
        const cell = make("span", "cell"), bar = make("i");
        cell.append(bar);
        cell.addEventListener("click", () => onHead(layer, head));
        box.append(cell);
        this.cells.push({ cell, bar, layer, head });
      }
    }
  }

  show(state) {
    const counts = this.cells.map(({ layer, head }) => this.trace.head(layer, head).counts[state.step]);
    const most = Math.max(...counts, 1), seen = this.trace.seen(state.step);
    this.cells.forEach(({ cell, bar, layer, head }, i) => {
      bar.style.height = `${(92 * counts[i]) / most}%`;
      cell.title = `layer ${layer}, head ${head}: ${number(counts[i])} entries`;
      cell.classList.toggle("here", !state.all && layer === state.layer && head === state.head);
    });
    const least = Math.min(...counts), mean = counts.reduce((a, b) => a + b, 0) / counts.length;
    const range = least === most ? `${number(most)} in every head` : `${number(least)} to ${number(most)}, on average ${mean.toFixed(1)}`;
    this.note.textContent = `${range}, of ${number(seen)} tokens read`;
    this.box.setAttribute("aria-label", `Entries per head: ${range}`);
  }
}

class Strip {
  constructor(canvas, stepLine, tokenLine, trace, onPick) {
    Object.assign(this, { canvas, stepLine, tokenLine, trace });
    canvas.width = Math.min(trace.n, 1024);
    canvas.height = trace.steps + 1;
    canvas.style.height = `${Math.max(56, Math.min(160, (trace.steps + 1) * 4))}px`;
    canvas.addEventListener("click", (e) => {
      const box = canvas.getBoundingClientRect();
      onPick(
        Math.min(trace.steps, Math.floor(((e.clientY - box.top) / box.height) * (trace.steps + 1))),
        Math.min(trace.n - 1, Math.floor(((e.clientX - box.left) / box.width) * trace.n)),
      );
    });
  }

  show(state, theme) {
    const key = `${state.all}/${state.layer}/${state.head}/${theme.name}`;
    if (this.drawn !== key) this.draw(state, theme);
    this.drawn = key;
    this.stepLine.style.top = `${(100 * (state.step + 0.5)) / (this.trace.steps + 1)}%`;
    this.tokenLine.hidden = state.token === null;
    if (state.token !== null) this.tokenLine.style.left = `${(100 * (state.token + 0.5)) / this.trace.n}%`;
    const what = state.all ? "in all heads" : `in layer ${state.layer}, head ${state.head}`;
    this.canvas.setAttribute("aria-label", `Which positions are held at which step, ${what}; the text panel says the same in words`);
  }

  draw(state, theme) {
    const { width, height } = this.canvas, { trace } = this, image = new ImageData(width, height);
    const sums = new Float32Array(width), held = new Float32Array(width), wide = new Float32Array(width);
    const heads = trace.layers * trace.perLayer, track = state.all ? null : trace.head(state.layer, state.head);
    const scored = track && track.data.levels;
    for (let step = 0; step < height; step++) {
      sums.fill(0); held.fill(0); wide.fill(0);
      const levels = track && track.levelsAt(step), bits = track ? track.heldAt(step) : trace.shares(step), seen = trace.seen(step);
      for (let p = 0; p < seen && p < trace.n; p++) {
        const x = Math.floor((p * width) / trace.n);
        wide[x] += 1;
        held[x] += track ? bits[p] : bits[p] / heads;
        if (bits[p] && levels) sums[x] += Math.max(levels[p], 1);
      }
      for (let x = 0; x < width; x++) {
        if (!wide[x]) continue;
        const share = held[x] / wide[x];
        const level = sums[x] / Math.max(held[x], 1);
        const colour = track ? (scored ? track.colour(level) : 6) : Math.min(COLOURS - 1, Math.floor(COLOURS * share));
        const [r, g, b] = share ? theme.colours[colour] : theme.lost;
        image.data.set([r, g, b, share ? 255 * (0.35 + 0.65 * share) : 255], 4 * (step * width + x));
      }
    }
    this.canvas.getContext("2d").putImageData(image, 0, 0);
  }
}

function showLegend(box, trace, state) {
  const track = trace.head(state.layer, state.head), scored = !state.all && track.data.levels;
  const key = `${state.all}/${state.layer}/${state.head}`;
  if (box.dataset.key === key) return;
  box.dataset.key = key;
  const scale = make("span", "scale");
  for (let i = 0; i < COLOURS; i++) scale.append(make("i", state.all ? `o${i}` : `c${i}`));
  const sample = (name, text) => make("span", `t ${name}`, text);
  const parts = [];
  if (state.all) parts.push(group("held by", "few", scaleOfShares(), "all heads"));
  else if (scored) parts.push(group("score", `${short(track.score(track.range()[0]))} or less`, scale, `${short(track.score(track.range()[1]))} or more`));
  else parts.push(sample("kept plain", "kept"), make("span", "note", "this method keeps no score"));
  parts.push(sample("gone", "forgotten"));
  if (!state.all) parts.push(sample("gone now", "forgotten just now"));
  parts.push(sample("fresh", "just written"));
  if (trace.hasMerged) parts.push(sample("gone merged", "merged into another"));
  if (trace.hasDemoted) parts.push(sample("kept plain demoted", "held in fewer bits"));
  box.replaceChildren(...parts);
}

function scaleOfShares() {
  const scale = make("span", "scale words");
  for (const share of [1, 3, 5, 8, 10]) scale.append(make("span", `t some o${share}`, "word"));
  return scale;
}

function group(title, low, scale, high) {
  const line = make("span", "group");
  line.append(make("span", "note", title), make("span", "end", low), scale, make("span", "end", high));
  return line;
}
