"""`millpond serve`, and OpenAI's client: a text that streams, with what its cache held at the end.

Needs: pip install 'millpond[server]' openai
"""

import argparse
import re
import subprocess
import sys

from facts import story
from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="pond-recall", help="a bundled model, a folder, or a name on the hub")
    parser.add_argument("--method", default="snapkv", help="of the server; a request may name another")
    parser.add_argument("--budget", default="20%", help="a share of each prompt, entries per head, or bytes")
    args = parser.parse_args()

    serve = [sys.executable, "-m", "millpond", "serve", "--port", "0", "--model", args.model, "--kv-memory", "64MiB"]
    serve += ["--method", args.method, "--budget", args.budget]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            found = next(filter(None, (re.search(r"http://[\w.]+:\d+", line) for line in server.stdout or ())), None)
            if found is None:
                raise SystemExit("the server ended before it listened")
            with OpenAI(base_url=f"{found[0]}/v1", api_key="none") as client:
                ask(client, args.model)
        finally:
            server.terminate()


def ask(client: OpenAI, name: str) -> None:
    model = client.models.list().data[0].id
    text, questions = story(name)
    for question, thing in questions[:2]:
        print(f"{question.strip()!r} (it should be {thing!r}):", end=" ", flush=True)
        stream = client.completions.create(
            model=model,
            prompt=text + question,
            max_tokens=4,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        for part in stream:
            print("".join(choice.text for choice in part.choices), end="", flush=True)
            if part.usage is not None:
                print(f"\n  {part.usage.prompt_tokens} tokens of prompt, {part.usage.completion_tokens} written")


if __name__ == "__main__":
    main()
