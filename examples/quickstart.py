"""One question about a long text, answered from a full cache and from a fifth of it."""

import argparse

from facts import story

import millpond as mp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="pond-recall", help="a bundled model, a folder, or a name on the hub")
    parser.add_argument("--method", default="snapkv", help="millpond methods lists them")
    parser.add_argument("--budget", default="20%", help="a share of the prompt, entries per head, or bytes")
    args = parser.parse_args()

    model, tokenizer = mp.load_model(args.model), mp.load_tokenizer(args.model)
    text, questions = story(args.model)
    question, thing = questions[2]
    inputs = tokenizer(text + question, return_tensors="pt").to(model.device)
    n = inputs["input_ids"].shape[1]
    print(f"{n} tokens, and the question {question.strip()!r}: it should be {thing!r}.\n")

    for method, budget in (("full", None), (args.method, args.budget)):
        with mp.compress(model, method, budget) as cache:  # the model is as before behind the block
            out = model.generate(**inputs, cache=cache, max_new_tokens=4, do_sample=False)
            stats = cache.stats()
        answer = tokenizer.decode(out[0, n:], skip_special_tokens=True).strip()
        print(f"{method:8} {answer!r}, from {stats.kv_bytes / 1e6:.2f} MB of keys and values")


if __name__ == "__main__":
    main()
