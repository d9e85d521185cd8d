"""Many requests in one limit of memory: with full caches a few at a time, with compressed ones all of them."""

import argparse
import time

from facts import story

import millpond as mp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="pond-recall", help="a bundled model, a folder, or a name on the hub")
    parser.add_argument("--method", default="snapkv", help="millpond methods lists them")
    parser.add_argument("--budget", default="20%", help="a share of each prompt, entries per head, or bytes")
    parser.add_argument("--kv-memory", default="6MiB", help="for the keys and values of all requests together")
    args = parser.parse_args()

    text, questions = story(args.model)
    prompts = [text + question for question, _ in questions] * 3
    params = mp.SamplingParams(max_tokens=4, temperature=0)
    print(f"{len(prompts)} requests, {args.kv_memory} for their caches\n")
    print(f"{'method':8} {'right':>6} {'seconds':>8} {'kB a request':>13}")
    for method, budget in (("full", None), (args.method, args.budget)):
        with mp.LLM(args.model, method=method, budget=budget, kv_memory=args.kv_memory) as llm:
            start = time.perf_counter()
            done = [out.completions[0] for out in llm.generate(prompts, params)]
            took = time.perf_counter() - start
        right = sum(thing in one.text for one, (_, thing) in zip(done, questions * 3, strict=True))
        held = sum(one.kv.kv_bytes for one in done) / len(done)
        print(f"{method:8} {right:3}/{len(done)} {took:8.2f} {held / 1e3:13.1f}")


if __name__ == "__main__":
    main()
