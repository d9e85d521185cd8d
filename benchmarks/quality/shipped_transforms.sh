#!/bin/bash
# The transform files of millpond-models: calibrated on WikiText-2 (valid), ten novels and the first part of the C++
# documentation; what is judged (WikiText-2 test, Emma, the last part of the C++ documentation, the Rust book,
# Shakespeare, GSM8K) is in none of them.
#
#   shipped_transforms.sh DATA NAME=MODEL...
#
# DATA holds text/; each NAME.safetensors.xz goes into packages/millpond-models. WINDOWS of each kind are read, in DTYPE: a
# CPU without instructions for bf16 is faster with f32. HEAD_BITS are 0 for the second model: for caches that evict it
# needs a file of the user's own.
set -euo pipefail
cd "$(dirname "$0")/../.."
data=$1
shift
texts=$(mktemp -d)
trap 'rm -rf "$texts"' EXIT
whole() { iconv -c -f utf-8 -t utf-8 || true; } # without the half of a letter at an end
head -c 2600000 "$data/text/cpp_docs.md.txt" | whole >"$texts/cpp.txt"
for novel in bleak_house crime_and_punishment dracula moby_dick great_expectations middlemarch vanity_fair ulysses \
	anna_karenina the_adventures_of_sherlock_holmes; do
	head -c 400000 "$data/text/gutenberg/$novel.txt" | tail -c 200000 | whole >>"$texts/novels.txt"
done
for given in "$@"; do
	out=packages/millpond-models/src/millpond_models/transforms/${given%%=*}.safetensors
	mkdir -p "$(dirname "$out")"
	millpond calibrate --model "${given#*=}" --codec transform --no-default-text --windows "${WINDOWS:-16}" \
		--text "$data/text/wikitext2_valid.txt" --text "$texts/novels.txt" --text "$texts/cpp.txt" \
		--dtype "${DTYPE:-auto}" --most-bits "${MOST_BITS:-2}" --most-head-bits "${HEAD_BITS:-1.5}" --out "$out"
	xz -6 --lzma2=preset=6,lc=3,lp=1,pb=1 "$out"
done
