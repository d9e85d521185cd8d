// The server's answers: one request out, pieces of text in.

export class Refused extends Error {
  constructor(status, message, param) {
    super(message);
    this.status = status;
    this.param = param; // the field that it is about
  }
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function checked(answer) {
  if (answer.ok) return answer;
  let message = `the server answered ${answer.status}`, param = null;
  try {
    ({ message, param } = (await answer.json()).error);
  } catch { /* not ours: the status must do */ }
  throw new Refused(answer.status, message, param);
}

// Some templates hide where a message lies: such a server cannot tell what is held of each, and a chat goes on without.
export const cannotTell = (error) => error.status === 400 && ["millpond.forgotten", "messages"].includes(error.param);

// null: there is nothing yet.
export async function get(path, key) {
  const answer = await checked(await fetch(path, { headers: headers(key) }));
  return answer.status === 204 ? null : answer.json();
}

function post(path, body, key, signal) {
  const sent = { "Content-Type": "application/json", ...headers(key) };
  return fetch(path, { method: "POST", headers: sent, body: JSON.stringify(body), signal });
}

// Markdown as HTML that the server has sanitised.
export async function rendered(text, key) {
  return (await (await checked(await post("page/markdown", { text }, key))).json()).html;
}

// Every event of a chat completion, until [DONE]; the first ones tell how far the prompt is read.
export async function* events(body, key, signal) {
  const sent = { ...body, stream: true, stream_options: { include_usage: true }, return_progress: true };
  const answer = await checked(await post("v1/chat/completions", sent, key, signal));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(500, event.error.message);
      yield event;
    }
  }
}
