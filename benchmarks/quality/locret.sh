#!/bin/sh
# Retaining heads of pond-recall beside keydiff, the question unknown, into benchmarks/results/locret; then make docs.
#   benchmarks/quality/locret.sh [once] [chunks] [seeds] [without] [kvzap]
# once: four tasks at 1,024 words. chunks: eviction while 4,096 words are read, 205 entries per KV head. Both are run
# where nothing is named: a quarter of an hour on one core. seeds: heads of two more seeds are trained, and all three
# compared on 200 questions of each task. without: heads that are trained without a kind of fact answer it.
# kvzap: the same heads in the form of kvpress's KVzapPress, by kvpress (KVPRESS: Python of its environment), as once.
# Goes on where it stopped. BIN: folder of the programs. SAMPLES, CHUNK_SAMPLES, MANY_SAMPLES (of seeds and without), TASKS: what is run. OUT: another folder
# of results. HEADS: folder of the heads that are trained. The samples come from streams that no training reads.
set -eu
cd "$(dirname "$0")/../.."
bin=${BIN:-.venv/bin}
root=$PWD
out=${OUT:-benchmarks/results/locret}
trained=${HEADS:-out/locret-heads}
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

chunks_of() {
  list=""
  for size in "$@"; do
    list=$list,locret:prefill=chunks:chunk=$size
  done
  echo "${list#,}"
}

train() {
  to=$1
  shift
  [ -f "$trained/$to" ] ||
    "$bin/millpond" train retain --data recall --chunked 205,256 --threads 1 --card --out "$trained/$to" "$@"
}

# runs in the folder of the heads, so that rows name files and no folders
evaluate() {
  to=$1
  shift
  (cd "$trained" && "$root/$bin/millpond" eval --model pond-recall --protocol agnostic --seed 1303 --threads 1 \
    --samples "${MANY_SAMPLES:-200}" --out "$root/$out/$to" "$@")
}

for part in ${*:-once chunks}; do
  case $part in
    once)
      "$bin/millpond" eval --model pond-recall --tasks "$(tasks_of 1024 $tasks)" --protocol agnostic --seed 1301 \
        --method full,locret,keydiff --budget 2.5%,5%,10% --samples "${SAMPLES:-20}" --threads 1 --out "$out/once"
      ;;
    chunks)
      "$bin/millpond" eval --model pond-recall --tasks "$(tasks_of 4096 $tasks)" \
        --protocol agnostic --seed 1302 --budget 205 --samples "${CHUNK_SAMPLES:-24}" --threads 1 --out "$out/chunks" \
        --method "full,$(chunks_of 128 256 512),keydiff:prefill=chunks:chunk=256"
      ;;
    seeds)
      mkdir -p "$trained"
      train seed1.safetensors --seed 1
      train seed2.safetensors --seed 2
      for task in $tasks; do
        evaluate "seeds/$task" --tasks "$task:length=1024" --budget 2.5%,5%,10%,20% \
          --method full,locret,locret:heads=seed1.safetensors,locret:heads=seed2.safetensors,keydiff
      done
      ;;
    without)
      mkdir -p "$trained"
      while read -r kinds about; do
        train "without-$kinds.safetensors" --without "$(echo "$kinds" | tr - ,)"
        evaluate "without/$kinds" --tasks "$(tasks_of 1024 $about)" --budget 10% \
          --method "locret,locret:heads=without-$kinds.safetensors,keydiff"
      done <<'END'
pairs-manifold recall niah_multiquery
chains tracking
passages-retold copy
common-frequent common_words frequent_words
END
      ;;
    kvzap)
      "$bin/python" benchmarks/peers/kvzap_weights.py --out "$trained"
      python=$(realpath -s "${KVPRESS:-build/kvpress/bin/python}")
      (cd "$trained" && "$root/$bin/millpond" eval-peer --model pond-recall --tasks "$(tasks_of 1024 $tasks)" \
        --protocol agnostic --seed 1301 --method KVzapPress --budget 2.5%,5%,10% --samples "${SAMPLES:-20}" \
        --threads 1 --python "$python" --out "$root/$out/kvzap")
      ;;
    *)
      echo "no part '$part': once, chunks, seeds, without or kvzap" >&2
      exit 2
      ;;
  esac
done
