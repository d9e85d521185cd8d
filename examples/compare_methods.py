"""The same questions with several methods and budgets: how many are right, and what the cache holds."""

import argparse

from facts import story

import millpond as mp

METHODS = ("window", "h2o", "snapkv", "keydiff")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="pond-recall", help="a bundled model, a folder, or a name on the hub")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="millpond methods lists them")
    parser.add_argument("--budgets", nargs="+", default=("40%", "10%"), help="shares, entries per head, or bytes")
    parser.add_argument("--words", type=int, default=600, help="of the text, about")
    args = parser.parse_args()

    text, questions = story(args.model, args.words)
    prompts = [text + question for question, _ in questions]
    params = mp.SamplingParams(max_tokens=4, temperature=0)
    rows = [("full", None), *((method, budget) for budget in args.budgets for method in args.methods)]
    print(f"{'method':10} {'budget':>6} {'right':>6} {'kB':>8}")
    for method, budget in rows:
        with mp.LLM(args.model, method=method, budget=budget) as llm:
            answers = [out.completions[0] for out in llm.generate(prompts, params)]
        right = sum(thing in one.text for one, (_, thing) in zip(answers, questions, strict=True))
        held = sum(one.kv.kv_bytes for one in answers) / len(answers)
        print(f"{method:10} {budget or 'all':>6} {right:4}/{len(answers)} {held / 1e3:8.1f}")


if __name__ == "__main__":
    main()
