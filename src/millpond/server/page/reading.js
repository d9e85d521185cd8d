// How far a long prompt is read, in the place of an answer that has not begun.

const SOON_S = 2; // what is left for less is not said

const number = (n) => n.toLocaleString("en");

export class Reading {
  constructor(box) {
    this.element = Object.assign(document.createElement("div"), { className: "reading" });
    this.words = Object.assign(document.createElement("p"), { textContent: "Waiting for its turn" });
    this.bar = document.createElement("progress");
    this.bar.setAttribute("aria-label", "How much of the prompt is read");
    this.element.append(this.words, this.bar);
    box.append(this.element);
  }

  // told: `prompt_progress` of a stream.
  show({ processed, total, cache, time_ms: ms }) {
    this.bar.max = total;
    this.bar.value = processed;
    const read = processed - cache, left = total - processed, seconds = read ? (ms / 1000) * (left / read) : 0;
    const parts = left ? [`Reading ${number(processed)} of ${number(total)} tokens`] : [`Read ${number(total)} tokens`];
    if (cache) parts.push(`${number(cache)} were known`);
    if (seconds >= SOON_S) parts.push(`about ${seconds < 90 ? `${Math.round(seconds)} s` : `${Math.round(seconds / 60)} min`} left`);
    this.words.textContent = parts.join(" · ");
  }

  end() { this.element.remove(); }
}
