#!/bin/sh
# The gate of pond-recall, the question unknown, into benchmarks/results/gate; then make docs.
#   benchmarks/quality/gate.sh
# Six tasks at 1,024 words: the score and the share that is kept of each, where the gate alone says how much. Samples are
# those of benchmarks/quality/locret.sh, where both have a task. Ten minutes on one core; goes on where it stopped.
# BIN: folder of the programs. SAMPLES, TASKS: what is run. GATE: another file of gates. OUT: another folder of results.
# The samples come from streams that no training reads.
set -eu
cd "$(dirname "$0")/../.."
bin=${BIN:-.venv/bin}
export OMP_NUM_THREADS=1

list=""
for name in ${TASKS:-recall niah_multiquery tracking copy niah_multivalue frequent_words}; do
  list=$list,$name:length=1024
done

"$bin/millpond" eval --model pond-recall --tasks "${list#,}" --protocol agnostic --seed 1301 --threads 1 \
  --method "full,attention_gate${GATE:+:gate=$GATE}" --samples "${SAMPLES:-20}" --out "${OUT:-benchmarks/results/gate}"
