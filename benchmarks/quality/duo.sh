#!/bin/sh
# Trained head classes of pond-recall beside those that duo_attention profiles, into benchmarks/results/duo.
#   benchmarks/quality/duo.sh
# Trains the numbers (120 texts, five minutes on a shared core) unless HEADS names a file of them, and scores both at
# half of the entries, the question unknown, 1,024 words. BIN: folder of the programs. SAMPLES, TASKS: what is run.
# OUT: another folder of results.
set -eu
cd "$(dirname "$0")/../.."
bin=${BIN:-.venv/bin}
out=${OUT:-benchmarks/results/duo}
export OMP_NUM_THREADS=1
mkdir -p "$out"

if [ -z "${HEADS:-}" ]; then
  run=$(mktemp -d)
  "$bin/millpond" train duo --model pond-recall --data recall --steps 120 --threads 1 --out "$run/heads.json"
  cp "$run/heads.json" "$out/heads.json"
  HEADS=$out/heads.json
fi

list=""
for name in ${TASKS:-recall copy}; do
  list=$list,$name:length=1024
done

"$bin/millpond" eval --model pond-recall --tasks "${list#,}" --protocol agnostic --seed 1301 --threads 1 --budget 50% \
  --method "full,duo_attention:across=true,duo_attention:across=true:heads=$HEADS" --samples "${SAMPLES:-12}" --out "$out"
