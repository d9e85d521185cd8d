// The server's answers: one request out, pieces of text in.

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function checked(answer) {
  if (answer.ok) return answer;
  let message = `the server answered ${answer.status}`;
  try {
    message = (await answer.json()).error.message;
  } catch { /* not ours: the status must do */ }
  throw new Refused(answer.status, message);
}

export async function get(path, key) {
  return (await checked(await fetch(path, { headers: headers(key) }))).json();
}

// Every event of a chat completion, until [DONE].
export async function* events(body, key, signal) {
  const sent = { ...body, stream: true, stream_options: { include_usage: true } };
  const answer = await checked(await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers(key) },
    body: JSON.stringify(sent),
    signal,
  }));
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
