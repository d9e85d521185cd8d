#!/bin/sh
# Retaining heads of pond-recall beside keydiff, the question unknown, into benchmarks/results/locret; then make docs.
#   benchmarks/quality/locret.sh [once] [chunks]
# once: the ten tasks at 1,024 words. chunks: eviction while 4,096 words are read, 205 entries per KV head, and chunks of
# several sizes. Half an hour on one core; goes on where it stopped. BIN: folder of the programs. SAMPLES, CHUNK_SAMPLES: of
# each task. OUT: another folder of results. The samples come from streams that no training reads.
set -eu
cd "$(dirname "$0")/../.."
bin=${BIN:-.venv/bin}
out=${OUT:-benchmarks/results/locret}
export OMP_NUM_THREADS=1

all="recall overwritten niah_single niah_multikey niah_multivalue niah_multiquery tracking copy frequent_words common_words"

tasks_of() {
  length=$1
  shift
  list=""
  for name in "$@"; do
    list=$list,$name:length=$length
  done
  echo "${list#,}"
}

for part in ${*:-once chunks}; do
  case $part in
    once)
      "$bin/millpond" eval --model pond-recall --tasks "$(tasks_of 1024 $all)" --protocol agnostic --seed 1301 \
        --method full,locret,keydiff --budget 2.5%,5%,10% --samples "${SAMPLES:-30}" --threads 1 --out "$out/once"
      ;;
    chunks)
      "$bin/millpond" eval --model pond-recall --tasks "$(tasks_of 4096 recall niah_multiquery tracking copy)" \
        --protocol agnostic --seed 1302 --budget 205 --samples "${CHUNK_SAMPLES:-12}" --threads 1 --out "$out/chunks" \
        --method "full,locret,locret:prefill=chunks,locret:prefill=chunks:chunk=128,\
keydiff,keydiff:prefill=chunks"
      ;;
    *)
      echo "no part '$part': once or chunks" >&2
      exit 2
      ;;
  esac
done
