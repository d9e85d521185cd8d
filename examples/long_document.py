"""A long text that is read and compressed once, kept in a file, and used for two questions without being read again."""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from facts import story

import millpond as mp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="pond-recall", help="a bundled model, a folder, or a name on the hub")
    parser.add_argument("--method", default="keydiff", help="one that needs no question: keydiff, kvzip, compactor")
    parser.add_argument("--budget", default="30%", help="a share of the text, entries per head, or bytes")
    args = parser.parse_args()

    model, tokenizer = mp.load_model(args.model), mp.load_tokenizer(args.model)
    text, questions = story(args.model, words=1500)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    file = Path(tempfile.mkdtemp()) / "text.kv"

    start = time.perf_counter()
    with torch.no_grad(), mp.compress(model, args.method, args.budget, tokenizer=tokenizer) as cache:
        model(ids, cache=cache, logits_to_keep=1)
        mp.save_document(cache, ids, file)
    took = time.perf_counter() - start
    print(f"{ids.shape[1]} tokens read once in {took:.2f} s; {file.stat().st_size / 1e6:.2f} MB in {file.name}\n")

    document, ids = mp.restore_document(model, file, tokenizer=tokenizer)
    with document:
        for question, thing in (questions[1], questions[6]):
            start = time.perf_counter()
            asked = tokenizer(question, add_special_tokens=False, return_tensors="pt")["input_ids"]
            fork = document.fork()  # shares the pages; what a question adds is its own
            prompt = torch.cat([ids, asked], 1)
            out = model.generate(prompt, cache=fork, max_new_tokens=4, do_sample=False)
            answer = tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True).strip()
            took = time.perf_counter() - start
            print(f"{question.strip()!r}: {answer!r} in {took:.2f} s (it should be {thing!r})")


if __name__ == "__main__":
    main()
