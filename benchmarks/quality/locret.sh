#!/bin/sh
# Retaining heads of pond-recall beside keydiff, the question unknown, into benchmarks/results/locret; then make docs.
#   benchmarks/quality/locret.sh [once] [chunks]
# once: four tasks at 1,024 words. chunks: eviction while 4,096 words are read, 205 entries per KV head. A quarter of an
# hour on one core; goes on where it stopped. BIN: folder of the programs. SAMPLES, CHUNK_SAMPLES, TASKS: what is run.
# OUT: another folder of results. The samples come from streams that no training reads.
set -eu
cd "$(dirname "$0")/../.."
bin=${BIN:-.venv/bin}
out=${OUT:-benchmarks/results/locret}
export OMP_NUM_THREADS=1

tasks=${TASKS:-recall niah_multiquery tracking copy}

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
      "$bin/millpond" eval --model pond-recall --tasks "$(tasks_of 1024 $tasks)" --protocol agnostic --seed 1301 \
        --method full,locret,keydiff --budget 2.5%,5%,10% --samples "${SAMPLES:-20}" --threads 1 --out "$out/once"
      ;;
    chunks)
      "$bin/millpond" eval --model pond-recall --tasks "$(tasks_of 4096 $tasks)" \
        --protocol agnostic --seed 1302 --budget 205 --samples "${CHUNK_SAMPLES:-8}" --threads 1 --out "$out/chunks" \
        --method full,locret:prefill=chunks,keydiff:prefill=chunks
      ;;
    *)
      echo "no part '$part': once or chunks" >&2
      exit 2
      ;;
  esac
done
