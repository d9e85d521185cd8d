// Text to the clipboard, and buttons that put it there.

const SHOWN_MS = 1500;

// Browsers keep their own clipboard from pages that come unencrypted from another machine: there a selection is copied.
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { /* the old way */ }
  const area = Object.assign(document.createElement("textarea"), { value: text, className: "hidden" });
  const before = document.activeElement;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  before?.focus();
  return done;
}

// text: gives what is copied.
export function copyButton(label, text) {
  const button = Object.assign(document.createElement("button"), { type: "button", className: "tool", textContent: "Copy" });
  button.setAttribute("aria-label", label);
  button.addEventListener("click", async () => {
    const said = (await copied(text())) ? "Copied" : "Not copied";
    button.textContent = said;
    document.getElementById("status").textContent = said;
    setTimeout(() => { button.textContent = "Copy"; }, SHOWN_MS);
  });
  return button;
}
