// What a request's cache remembers: asked again and again while the answer is written, drawn token by token.

import { get } from "./chat.js";
import { percent } from "./held.js";

const COLOURS = 12; // the style sheet has as many
const PAUSE_MS = 150;
const NEAR_PX = 40; // of the end of the text: the newest tokens are in sight

const $ = (id) => document.getElementById(id);

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let i = 0;
  while (n >= 1024 && i < units.length - 1) { n /= 1024; i++; }
  return `${i ? n.toFixed(1) : n} ${units[i]}`;
}

export class MemoryView {
  constructor(key) {
    this.key = key; // gives the API key
    this.layer = 0;
    this.clear();
    for (let i = 0; i < COLOURS; i++) $("scale").append(Object.assign(document.createElement("i"), { className: `c${i}` }));
    $("layer").addEventListener("change", () => this.choose(Number($("layer").value)));
    $("text").addEventListener("mouseover", (event) => this.point(this.spans.indexOf(event.target)));
    $("text").addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step || event.altKey) return;
      this.point(Math.max(0, Math.min(this.spans.length - 1, this.current + step)));
      event.preventDefault();
    });
  }

  clear() {
    this.id = null;
    this.running = false;
    this.seen = null;
    this.spans = [];
    this.current = -1;
    $("text").replaceChildren();
    $("held").textContent = $("token").textContent = "";
  }

  // Follow a request until `ended`.
  async follow(id) {
    this.clear();
    this.id = id;
    this.running = true;
    while (this.running && this.id === id) {
      await this.look();
      await new Promise((go) => setTimeout(go, PAUSE_MS));
    }
  }

  // The request is over; one that gave nothing held nothing that could be asked for.
  async ended(gave) {
    this.running = false;
    if (gave) await this.look();
  }

  choose(layer) {
    const last = $("layer").options.length - 1;
    this.layer = Math.max(0, Math.min(last, layer));
    $("layer").value = this.layer;
    return this.look();
  }

  async look() {
    const { id, layer } = this;
    if (!id) return;
    let found;
    try {
      found = await get(`v1/millpond/memory/${id}?layer=${layer}&since=${this.spans.length}`, this.key());
    } catch (error) {
      if (error.status !== 404) $("bytes").textContent = error.message; // 404: over, and no longer known
      return;
    }
    if (!found || id !== this.id || layer !== this.layer) return;
    this.draw(found);
  }

  draw(found) {
    if (found.since === this.spans.length) this.append(found.texts);
    this.seen = found;
    if ($("layer").options.length !== found.n_layers) {
      $("layer").replaceChildren(...Array.from({ length: found.n_layers }, (_, i) => new Option(i, i)));
      $("layer").disabled = false;
      $("layer").value = found.layer;
    }
    const known = found.scores.filter((score) => score !== null && score > 0);
    const low = Math.log(Math.min(...known)), high = Math.log(Math.max(...known));
    this.spans.forEach((span, i) => {
      if (i < found.kept.length) this.paint(span, found.kept[i], found.scores[i], low, high);
    });
    const share = found.seen ? found.held / found.seen : 0;
    $("fill").style.width = `${Math.min(100, 100 * share)}%`;
    $("held").textContent = `${percent(share)} held`;
    $("bar").setAttribute("aria-label", $("held").textContent);
    $("bytes").textContent = `${bytes(found.kv_bytes)} in memory, of ${bytes(found.full_kv_bytes)} for all ` +
      `${found.seen.toLocaleString("en")} tokens in the model's own numbers` +
      (found.unused_bytes ? ` · ${bytes(found.unused_bytes)} in unfilled pages` : "");
    this.point(this.current);
  }

  append(texts) {
    // a tokenizer of whole words has no spaces in its tokens
    this.wordy = this.spans.length ? this.wordy : texts.length > 3 && !texts.some((text) => /\s/.test(text));
    const fresh = document.createDocumentFragment();
    for (const text of texts) {
      const span = Object.assign(document.createElement("span"), { textContent: text, className: "t" });
      this.spans.push(span);
      fresh.append(span, this.wordy ? " " : "");
    }
    const box = $("text"), atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_PX;
    box.append(fresh);
    if (atEnd || this.spans.length === texts.length) box.scrollTop = box.scrollHeight; // follow, unless a person looks back
  }

  paint(span, kept, score, low, high) {
    let look = "t gone";
    if (kept > 0) {
      const level = score > 0 && high > low ? Math.round((COLOURS - 1) * (Math.log(score) - low) / (high - low)) : null;
      look = `t kept ${level === null ? "plain" : `c${level}`}${kept <= 0.5 ? " part" : ""}`;
    }
    if (span.className !== look) span.className = look;
  }

  point(place) {
    if (place < 0 || !this.seen || place >= this.seen.kept.length) return;
    this.spans[this.current]?.removeAttribute("aria-current");
    this.current = place;
    this.spans[place].setAttribute("aria-current", "true");
    const { kept, scores, n_kv_heads } = this.seen;
    const held = Math.round(kept[place] * n_kv_heads);
    const score = scores[place] === null ? "" : ` · score ${scores[place]}`;
    $("token").textContent = `position ${place} · held by ${held} of ${n_kv_heads} heads${score}`;
  }
}
