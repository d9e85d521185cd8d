#!/bin/sh
# Finalists of `search.py` judged by real decoding, on texts that the search has not seen; hours, and it goes on where it
# stopped.
#   DATA=FOLDER benchmarks/quality/budget_bytes.sh fidelity|choice|short|novel|long ...
# DATA holds wikitext2_test.txt, wikitext2_valid.txt and great_expectations.txt. `fidelity` is the divergence from the
# full cache, which needs few windows; the others are perplexity, for `real_text.py`: `choice` for choosing, `short`,
# `novel` and `long` for judging. Entries are given as numbers that fill whole pages of 32.
set -eu
bin=$(cd "$(dirname "$0")/../.." && pwd)/${BIN:-.venv/bin}
out=${OUT:-out/budget-bytes}
model=${MODEL:-smollm2-135m}
export OMP_NUM_THREADS=1
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "${DATA:?names a folder with the texts}"

short=context_len=1024:continuation_len=64:stride=1088
evaluate() {
  to=$1
  shift
  "$bin/millpond" eval --model "$model" --seed 7 --threads 1 --batch-size 2 --samples "${WINDOWS:-60}" --out "$out/$to" "$@"
}
at_1024() {
  evaluate "$@" --method full
  evaluate "$@" --codec rotated4 --method h2o --budget 704,352,160
  evaluate "$@" --codec rotated4 --method ada,h2o,snapkv:pool=avg --budget 512
  evaluate "$@" --codec rotated4+rotated3 --method h2o --budget 800,416,192
  evaluate "$@" --codec rotated3 --method h2o --budget 928
}

for part in "$@"; do
  case $part in
    fidelity)
      for cell in "h2o 704 rotated4" "ada 512 rotated4" "h2o 512 rotated4" "h2o 800 rotated4+rotated3" \
        "h2o 352 rotated4" "h2o 416 rotated4+rotated3"; do
        set -- $cell
        WINDOWS=${WINDOWS:-20} evaluate fidelity --tasks fidelity:path=wikitext2_test.txt:$short --method "$1" \
          --budget "$2" --codec "$3"
      done
      ;;
    short)
      at_1024 short --tasks text:path=wikitext2_test.txt:$short
      ;;
    choice)
      at_1024 choice --tasks text:path=wikitext2_valid.txt:$short
      ;;
    novel)
      at_1024 novel --tasks text:path=great_expectations.txt:$short
      ;;
    long)
      tasks=text:path=wikitext2_test.txt:context_len=4096:continuation_len=256:stride=4352
      evaluate long --tasks $tasks --method full
      evaluate long --tasks $tasks --codec rotated4 --method h2o --budget 2880,1440,704
      evaluate long --tasks $tasks --codec rotated4+rotated3 --method h2o --budget 3264,1632,800
      ;;
    *)
      echo "no part called $part; there are: fidelity choice short novel long" >&2
      exit 2
      ;;
  esac
done
