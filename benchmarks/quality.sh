#!/bin/sh
# The committed results about quality, into benchmarks/results/quality. Hours on two cores; goes on where it stopped.
#   benchmarks/quality.sh PART ...    of: aware agnostic budgets text peers; then make docs
# BIN: folder of the programs. SAMPLES: of each task. THREADS: of torch. METHODS, ABLATIONS: others than here.
# DATA: folder with a text, for the part text.
set -eu
cd "$(dirname "$0")/.."
bin=${BIN:-.venv/bin}
out=benchmarks/results/quality
samples=${SAMPLES:-200}
threads=${THREADS:-1}
export OMP_NUM_THREADS="$threads"

tasks=""
for name in recall overwritten niah_single niah_multikey niah_multivalue niah_multiquery tracking copy frequent_words \
  common_words; do
  tasks=$tasks,$name:length=1024
done
tasks=${tasks#,}
methods=${METHODS:-full,oracle,h2o,ada,snapkv,pyramidkv,tova,keydiff,compactor,chunkkv,streaming,window,random}
ablations=${ABLATIONS-h2o:recent=0:sinks=0,h2o:sinks=0,h2o:average=true,h2o:prefill=greedy,no_heavy,strided,fixed}

evaluate() {
  "$bin/millpond" eval --samples "$samples" --seed 7 --batch-size 16 --threads "$threads" "$@"
}

for part in "$@"; do
  case $part in
    aware) evaluate --tasks "$tasks" --method "$methods${ablations:+,$ablations}" --out "$out/aware" ;;
    agnostic) evaluate --tasks "$tasks" --method "$methods" --protocol agnostic --out "$out/agnostic" ;;
    budgets)
      evaluate --tasks recall:length=1024,tracking:length=1024,copy:length=1024 --budget 5%,10%,20%,40%,60% \
        --method full,oracle,h2o,ada,snapkv,window,random --out "$out/budgets"
      "$bin/millpond" plot "$out/budgets" --out "docs/images"
      ;;
    peers)
      "$bin/millpond" eval-peer --tasks "$tasks" --samples "$samples" --seed 7 --threads "$threads" --out "$out/aware" \
        --method "SnapKVPress,ObservedAttentionPress,TOVAPress,StreamingLLMPress,AdaKVPress(SnapKVPress)"
      ;;
    text)
      mkdir -p out
      cp "${DATA:?names a folder with great_expectations.txt, which pond-text has not read}/great_expectations.txt" out
      evaluate --model pond-text --tasks text:path=out/great_expectations.txt:context_len=1024:stride=1280 \
        --method "$methods${ablations:+,$ablations}" --out "$out/text"
      ;;
    *)
      echo "no part called $part; there are: aware agnostic budgets text peers" >&2
      exit 2
      ;;
  esac
done
