#!/bin/sh
# The gate of pond-recall, the question unknown, into benchmarks/results/gate; then make docs.
#   benchmarks/quality/gate.sh
# Ten tasks at 1,024 words: the score and the share that is kept of each, where the gate alone says how much; and with a
# lower threshold, which keeps twice as much. Twenty minutes on one core; goes on where it stopped.
# BIN: folder of the programs. SAMPLES, TASKS, METHODS: what is run. GATE: another file of gates. OUT: another folder of
# results. The samples come from streams that no training reads.
# The rows of benchmarks/results/gate are those of flags that act at a prompt's end (METHODS with acts=end: the default
# then); METHODS=attention_gate OUT=benchmarks/results/gate-inside gave those of flags inside it.
set -eu
cd "$(dirname "$0")/../.."
bin=${BIN:-.venv/bin}
export OMP_NUM_THREADS=1

list=""
tasks="recall overwritten niah_single niah_multikey niah_multivalue niah_multiquery tracking copy frequent_words"
for name in ${TASKS:-$tasks common_words}; do
  list=$list,$name:length=1024
done
gate=attention_gate${GATE:+:gate=$GATE}

"$bin/millpond" eval --model pond-recall --tasks "${list#,}" --protocol agnostic --seed 1301 --threads 1 \
  --method "${METHODS:-full,$gate,$gate:threshold=0.42}" --samples "${SAMPLES:-60}" --out "${OUT:-benchmarks/results/gate}"
