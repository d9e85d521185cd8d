// The turns of a chat: what is said, where it is shown, and what of it a request sends.

import { copyButton } from "./clipboard.js";
import { percent } from "./held.js";

const SPEAKERS = { system: "System prompt", user: "You", assistant: "Model" };

const make = (tag, className, textContent = "") => Object.assign(document.createElement(tag), { className, textContent });

export class Turn {
  constructor(role, text) {
    this.role = role;
    this.text = text;
    this.answered = true; // else it is not sent
    this.element = make("article", `turn of-${role}`);
    this.element.setAttribute("aria-label", SPEAKERS[role]);
    this.body = make("div", role, text);
    this.foot = make("div", "foot");
    this.held = make("span", "held-of");
    this.foot.append(this.held, copyButton(`Copy: ${SPEAKERS[role]}`, () => this.text));
    this.element.append(this.body, this.foot);
  }

  tool(className, label, act) {
    const button = Object.assign(make("button", `tool ${className}`, label), { type: "button" });
    button.addEventListener("click", act);
    this.foot.append(button);
  }

  // share: of its entries that are held.
  holds(share, definition) {
    this.held.textContent = `${percent(share)} held`;
    this.held.title = definition;
    this.element.style.setProperty("--held", share);
  }

  // What went wrong with it.
  tell(why) { this.element.append(Object.assign(make("p", "error", why), { role: "alert" })); }

  // Nothing came of it; why, where that is known.
  failed(why) {
    this.answered = false;
    this.element.classList.add("unanswered");
    if (why) this.tell(why);
  }

  // It is sent (once more).
  begun(text = this.text) {
    this.text = this.body.textContent = text;
    this.answered = true;
    this.held.textContent = "";
    this.element.classList.remove("unanswered");
    this.element.querySelector(".error")?.remove();
  }

  // Let a person change it; `done` gets another text.
  edit(done) {
    if (this.element.classList.contains("edited")) return;
    const form = make("form", "edit"), area = make("textarea", ""), row = make("div", "row");
    const send = Object.assign(make("button", "primary", "Send"), { type: "submit" });
    const leave = Object.assign(make("button", "quiet", "Cancel"), { type: "button" });
    area.value = this.text;
    area.setAttribute("aria-label", "The message, to be changed");
    row.append(leave, send);
    form.append(area, row);
    const close = () => {
      this.element.classList.remove("edited");
      form.remove();
    };
    leave.addEventListener("click", close);
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) form.requestSubmit();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = area.value.trim();
      if (!text) return;
      close();
      done(text);
    });
    this.element.classList.add("edited");
    this.body.before(form);
    area.focus();
  }
}

export class Conversation {
  constructor(log) {
    this.log = log;
    this.turns = [];
  }

  add(turn) {
    this.turns.push(turn);
    this.log.append(turn.element);
    return turn;
  }

  get last() { return this.turns.at(-1); }

  // What the system says, before everything; "": nothing.
  begin(system) {
    const first = this.turns[0]?.role === "system" ? this.turns[0] : null;
    if (first?.text === system || (!first && !system)) return;
    if (first) this.turns.shift().element.remove();
    if (!system) return;
    this.turns.unshift(new Turn("system", system));
    this.log.prepend(this.turns[0].element);
  }

  // Nothing from this turn on.
  cut(turn) {
    const place = this.turns.indexOf(turn);
    for (const gone of place < 0 ? [] : this.turns.splice(place)) gone.element.remove();
  }

  clear() {
    this.turns = [];
    this.log.replaceChildren();
  }

  // The turns that a request sends.
  get sent() { return this.turns.filter((turn) => turn.answered); }
}
