// The trace, unpacked when it is asked for. Knows nothing of the page.

const COLOURS = 12; // steps of the scale
const UNKNOWN = -1; // level of an entry that came after scores were last written down

function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

class Head {
  constructor(data, trace) {
    this.data = data;
    this.trace = trace;
    const bits = bytesOf(data.first);
    this.held = new Uint8Array(trace.n);
    for (let p = 0; p < trace.n; p++) this.held[p] = (bits[p >> 3] >> (p & 7)) & 1;
    this.at = 0; // the step that `held` speaks of
    this.counts = new Int32Array(trace.steps + 1);
    this.counts[0] = this.held.reduce((sum, bit) => sum + bit, 0);
    data.changes.forEach(([gone, come], i) => { this.counts[i + 1] = this.counts[i] + come.length - gone.length; });
    this.lastFrame = null;
  }

  // Which positions are held after `step`: one byte per position, valid until the next call.
  heldAt(step) {
    for (; this.at < step; this.at++) this.apply(this.data.changes[this.at], 0, 1);
    for (; this.at > step; this.at--) this.apply(this.data.changes[this.at - 1], 1, 0);
    return this.held;
  }

  apply([gone, come], ofGone, ofCome) {
    for (const p of gone) this.held[p] = ofGone;
    for (const p of come) this.held[p] = ofCome;
  }

  // Levels by position as last written down at or before `step`, UNKNOWN where none was; null if there are no scores.
  levelsAt(step) {
    if (!this.data.levels) return null;
    const frame = this.trace.frameOf(step);
    if (this.lastFrame && this.lastFrame.frame === frame) return this.lastFrame.levels;
    this.bytes ??= bytesOf(this.data.levels);
    let offset = 0;
    for (let f = 0; f < frame; f++) offset += this.counts[this.trace.scoreSteps[f]];
    const then = this.trace.scoreSteps[frame], held = this.heldAt(then);
    const levels = new Int16Array(this.trace.n).fill(UNKNOWN);
    for (let p = 0; p < held.length; p++) if (held[p]) levels[p] = this.bytes[offset++];
    this.lastFrame = { frame, levels };
    return levels;
  }

  // The levels between which colours are spread: almost all entries, without the few far above or below.
  range() {
    if (this.spread) return this.spread;
    const counts = new Uint32Array(256);
    this.bytes ??= bytesOf(this.data.levels);
    for (const level of this.bytes) counts[level]++;
    counts[0] = 0; // no score at all says nothing of the spread
    const total = counts.reduce((a, b) => a + b, 0), at = (share) => {
      let level = 0;
      for (let sum = 0; level < 255 && sum <= share * total; level++) sum += counts[level];
      return level - 1;
    };
    const low = Math.max(at(0.1), 1);
    return (this.spread = [low, Math.max(at(0.99), low + COLOURS)]);
  }

  colour(level) {
    const [low, high] = this.range();
    return Math.max(0, Math.min(COLOURS - 1, Math.floor(((level - low) / (high - low)) * COLOURS)));
  }

  score(level) {
    const { low, high } = this.data;
    if (level <= 0) return 0;
    return high > low ? low * (high / low) ** ((level - 1) / 254) : high;
  }

  // The step at which a position was forgotten, as seen from `step`; null while it is held.
  goneAt(position, step) {
    for (let s = step; s > 0; s--) {
      const [gone, come] = this.data.changes[s - 1];
      if (gone.includes(position)) return s;
      if (come.includes(position)) return null;
    }
    if (this.trace.cameAt(position) === 0) return this.heldAt(0)[position] ? null : 0;
    return this.trace.cameAt(position);
  }

  event(list, position, step) {
    return (list || []).find(([s, p]) => p === position && s <= step);
  }
  mergedAt(position, step) { return this.event(this.data.merged, position, step); }
  demotedAt(position, step) { return this.event(this.data.demoted, position, step); }
}

class Trace {
  constructor(data) {
    Object.assign(this, data);
    this.n = data.tokens.length;
    this.steps = data.kv.length - 1;
    this.special = new Set(data.special);
    this.layers = data.heads.length;
    this.perLayer = data.heads[0].length;
    this.made = new Map();
  }

  head(layer, head) {
    const key = layer * this.perLayer + head;
    if (!this.made.has(key)) this.made.set(key, new Head(this.heads[layer][head], this));
    return this.made.get(key);
  }

  *everyHead() {
    for (let l = 0; l < this.layers; l++) for (let h = 0; h < this.perLayer; h++) yield [l, h, this.head(l, h)];
  }

  seen(step) { return this.prompt + step; }
  cameAt(position) { return position < this.prompt ? 0 : position - this.prompt + 1; }
  frameOf(step) {
    let frame = 0;
    while (frame + 1 < this.scoreSteps.length && this.scoreSteps[frame + 1] <= step) frame++;
    return frame;
  }

  // In how many heads each position is held after `step`.
  shares(step) {
    const counts = new Uint16Array(this.n);
    for (const [, , head] of this.everyHead()) {
      const held = head.heldAt(step);
      for (let p = 0; p < held.length; p++) counts[p] += held[p];
    }
    return counts;
  }
}
