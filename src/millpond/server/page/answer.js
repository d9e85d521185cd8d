// One answer in the log: as it comes plain text, and Markdown as soon as the server has rendered it.

import { rendered } from "./chat.js";
import { copyButton } from "./clipboard.js";
import { highlighted } from "./highlight.js";

const PAUSE_MS = 200;
const MOST_CHARACTERS = 50000, MOST_MARKS = 2000, MOST_LINES = 3000; // what the server renders

const count = (text, pattern) => (text.match(pattern) ?? []).length;
const isPlain = (text) =>
  text.length > MOST_CHARACTERS || count(text, /[*_~[!`]/g) > MOST_MARKS || count(text, /[\n\r|]/g) > MOST_LINES;

// Give a block of code its language, a button that copies it, and colours.
function dress(pre) {
  const code = pre.firstElementChild, text = code.textContent;
  const language = code.className.replace(/^language-/, "");
  const figure = Object.assign(document.createElement("figure"), { className: "code" });
  const head = document.createElement("figcaption");
  head.append(Object.assign(document.createElement("span"), { textContent: language || "code" }));
  head.append(copyButton("Copy this code", () => text.replace(/\n$/, "")));
  code.replaceChildren(highlighted(text, language));
  pre.replaceWith(figure);
  pre.tabIndex = 0; // so that long lines can be read without a mouse
  pre.setAttribute("aria-label", `Code${language ? `, ${language}` : ""}`);
  pre.setAttribute("role", "region");
  figure.append(head, pre);
}

export class Answer {
  constructor(box, key) {
    this.box = box;
    this.key = key;
    this.text = "";
    this.shown = ""; // of it, what is rendered
    this.blocks = []; // the HTML of each block that is shown
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
    this.show(await rendered(text, this.key()));
    this.shown = text;
    await new Promise((go) => setTimeout(go, PAUSE_MS));
  }

  // Only blocks that changed are made anew: what is selected in the others stays so.
  show(html) {
    const made = document.createElement("template");
    made.innerHTML = html; // sanitised by the server
    const fresh = [...made.content.children], blocks = fresh.map((block) => block.outerHTML);
    if (this.box.classList.contains("raw")) this.box.replaceChildren();
    let same = 0;
    while (same < Math.min(blocks.length, this.box.children.length) && blocks[same] === this.blocks[same]) same++;
    while (this.box.children.length > same) this.box.lastElementChild.remove();
    for (const block of fresh.slice(same)) {
      this.box.append(block);
      (block.tagName === "PRE" ? [block] : block.querySelectorAll("pre")).forEach(dress);
    }
    this.blocks = blocks;
    this.box.classList.remove("raw");
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
