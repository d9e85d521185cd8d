// The text: a span per token, painted chunk by chunk, what is in view first.

const CHUNK = 256;

class Text {
  constructor(box, trace, onToken) {
    this.box = box;
    this.trace = trace;
    this.spans = [];
    this.painted = [];
    this.chunks = [];
    this.inView = new Set([0]);
    this.job = 0;
    this.marked = 0; // the one token that Tab stops at
    this.build();
    box.addEventListener("pointerover", (e) => this.tell(e.target, onToken, false));
    box.addEventListener("pointerleave", () => onToken(null, false));
    box.addEventListener("focusin", (e) => this.tell(e.target, onToken, true));
    box.addEventListener("click", (e) => { if (e.target.dataset.p) e.target.focus({ preventScroll: true }); });
  }

  build() {
    const watch = new IntersectionObserver((seen) => {
      for (const { target, isIntersecting } of seen) {
        if (isIntersecting) this.inView.add(+target.dataset.chunk); else this.inView.delete(+target.dataset.chunk);
      }
    }, { rootMargin: "200px" });
    const all = document.createDocumentFragment();
    for (let begin = 0; begin < this.trace.n; begin += CHUNK) {
      const chunk = document.createElement("span");
      chunk.dataset.chunk = this.chunks.length;
      for (let p = begin; p < Math.min(begin + CHUNK, this.trace.n); p++) chunk.append(...this.token(p));
      this.chunks.push(begin);
      all.append(chunk);
      watch.observe(chunk);
    }
    this.box.append(all);
    this.spans[0].tabIndex = 0;
  }

  // White space stands outside the span, unless it is all that there is: then a sign makes it visible.
  token(p) {
    const piece = this.trace.tokens[p], span = document.createElement("span");
    const lead = piece.trim() ? piece.slice(0, piece.length - piece.trimStart().length) : "";
    span.dataset.p = p;
    span.tabIndex = -1;
    span.textContent = piece.slice(lead.length);
    if (!piece.trim()) span.dataset.sign = piece.includes("\n") ? "↵" : "·";
    if (this.trace.special.has(p)) span.dataset.special = "";
    this.spans.push(span);
    return lead ? [lead, span] : [span];
  }

  tell(target, onToken, stays) {
    const at = target.dataset && target.dataset.p;
    if (at !== undefined) onToken(+at, stays);
  }

  focus(p) {
    const span = this.spans[p];
    span.focus();
    span.scrollIntoView({ block: "nearest" });
  }

  mark(p) {
    const before = this.spans[this.marked];
    before.tabIndex = -1;
    before.removeAttribute("aria-current");
    this.marked = p;
    this.spans[p].tabIndex = 0;
    this.spans[p].setAttribute("aria-current", "true");
  }

  // `look(position)` gives the class of a token. Chunks out of view follow when the page has time.
  paint(look) {
    const job = ++this.job, later = [];
    this.chunks.forEach((_, chunk) => this.inView.has(chunk) ? this.paintChunk(chunk, look) : later.push(chunk));
    const go = () => {
      const end = performance.now() + 8;
      while (job === this.job && later.length && performance.now() < end) this.paintChunk(later.shift(), look);
      if (job === this.job && later.length) setTimeout(go);
    };
    if (later.length) setTimeout(go);
  }

  paintChunk(chunk, look) {
    const begin = this.chunks[chunk], end = Math.min(begin + CHUNK, this.trace.n);
    for (let p = begin; p < end; p++) {
      const name = look(p);
      if (this.painted[p] !== name) this.spans[p].className = this.painted[p] = name;
    }
  }
}

// How tokens look in one head: held (by score), forgotten, forgotten just now, just written, not there yet.
function lookOfHead(trace, head, step) {
  const held = head.heldAt(step).slice(), levels = head.levelsAt(step), seen = trace.seen(step);
  const now = new Set(step ? head.data.changes[step - 1][0] : []);
  const merged = new Set((head.data.merged || []).filter(([s]) => s <= step).map(([, p]) => p));
  const demoted = new Set((head.data.demoted || []).filter(([s]) => s <= step).map(([, p]) => p));
  return (p) => {
    if (p >= seen) return p === seen ? "t fresh" : "t later";
    if (!held[p]) return `t gone${now.has(p) || (step && trace.cameAt(p) === step) ? " now" : ""}${merged.has(p) ? " merged" : ""}`;
    const colour = levels && levels[p] !== UNKNOWN ? ` c${head.colour(levels[p])}` : " plain";
    return `t kept${colour}${demoted.has(p) ? " demoted" : ""}`;
  };
}

// How tokens look in all heads together: the more heads hold one, the deeper its ground.
function lookOfAll(trace, step) {
  const shares = trace.shares(step), total = trace.layers * trace.perLayer, seen = trace.seen(step);
  return (p) => {
    if (p >= seen) return p === seen ? "t fresh" : "t later";
    return shares[p] ? `t some o${Math.ceil((10 * shares[p]) / total)}` : "t gone";
  };
}
