#!/bin/sh
# A causal gate and a global one of pond-recall, trained alike, into benchmarks/results/gate-global; then make docs.
#   benchmarks/quality/gate_global.sh
# Both begin with the gate of the package, which is causal, read the same texts with flags inside the prompt and are
# calibrated on the same sparse ones; then ten tasks as in gate.sh. Half an hour on one core; goes on where it stopped.
# BIN: folder of the programs. STEPS: of the training. SAMPLES, TASKS: what is run. WORK: folder of the gates.
set -eu
cd "$(dirname "$0")/../.."
root=$PWD bin=$(cd "${BIN:-.venv/bin}" && pwd)
export OMP_NUM_THREADS=1
mkdir -p "${WORK:-build/gate-global}"
cd "${WORK:-build/gate-global}"

for kind in causal global; do
  [ -e "$kind.safetensors" ] && continue
  whole=""
  [ "$kind" = global ] && whole=--global
  "$bin/millpond" train gate --model pond-recall --data recall:mixed --start bundled-gate --lr 3e-4 --target-keep 10% \
    --steps "${STEPS:-200}" $whole --threads 1 --card --out "$kind-trained.safetensors"
  cp "$kind-trained.md" "$kind.md"
  "$bin/millpond" train calibrate-gate --model pond-recall --gate "$kind-trained.safetensors" --data recall:sparse \
    --target-keep 10% --texts 56 --threads 1 --card "$kind.md" --out "$kind.safetensors"
done

list=""
tasks="recall overwritten niah_single niah_multikey niah_multivalue niah_multiquery tracking copy frequent_words"
for name in ${TASKS:-$tasks common_words}; do
  list=$list,$name:length=1024
done
"$bin/millpond" eval --model pond-recall --tasks "${list#,}" --protocol agnostic --seed 1301 --threads 1 \
  --method "full,attention_gate:gate=causal.safetensors,attention_gate:gate=global.safetensors" \
  --samples "${SAMPLES:-60}" --out "${OUT:-$(realpath --relative-to=. "$root/benchmarks/results/gate-global")}"
