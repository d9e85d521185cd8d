// What is gone of each message of the chat: a line under it, and the share in words.

const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

// Some templates hide where a message lies: such a server cannot tell, and a chat goes on without.
export const cannotTell = (error) => error.status === 400 && ["millpond.forgotten", "messages"].includes(error.param);

// told: of each message, as `usage.millpond.forgotten` has it. boxes: where the messages are shown.
export function mark(told, boxes, legend) {
  for (const { message, tokens, share, fewer_than_half: few } of told ?? []) {
    const box = boxes[message];
    if (!box || !tokens) continue;
    box.dataset.gone = few ? `${percent(share)} forgotten` : "nothing forgotten";
    box.title = `${percent(share)} of this message is held by no head, ${percent(few)} by fewer than half of the heads`;
    box.style.setProperty("--gone", share);
    box.style.setProperty("--few", few);
    legend.hidden = false;
  }
}
