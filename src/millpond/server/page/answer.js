// One answer in the log: as it comes plain text, and Markdown as soon as the server has rendered it.

import { rendered } from "./chat.js";

const PAUSE_MS = 200;
const MOST_CHARACTERS = 50000, MOST_MARKS = 2000, MOST_LINES = 3000; // what the server renders

const count = (text, pattern) => (text.match(pattern) ?? []).length;
const isPlain = (text) =>
  text.length > MOST_CHARACTERS || count(text, /[*_~[!`]/g) > MOST_MARKS || count(text, /[\n\r|]/g) > MOST_LINES;

export class Answer {
  constructor(box, key) {
    this.box = box;
    this.key = key;
    this.text = "";
    this.shown = ""; // of it, what is rendered
    this.working = null;
    box.classList.add("raw");
  }

  add(piece) {
    this.text += piece;
    if (this.box.classList.contains("raw")) this.box.textContent = this.text;
    this.working ??= this.render().catch(() => {}).finally(() => { this.working = null; });
  }

  async render() {
    const text = this.text;
    if (text === this.shown || !text.trim() || isPlain(text)) return;
    const html = await rendered(text, this.key());
    this.box.innerHTML = html;
    this.box.classList.remove("raw");
    this.shown = text;
    await new Promise((go) => setTimeout(go, PAUSE_MS));
  }

  // All of it is there.
  async end() {
    try {
      await this.working;
      await this.render();
    } catch { /* what is not rendered stays as it is */ }
    if (this.text !== this.shown) {
      this.box.classList.add("raw");
      this.box.textContent = this.text;
    }
  }
}
