#!/bin/sh
# Heads and gates of pond-text and pond-text-long: texts, training, and what they keep of running text and of facts.
#   MODEL=pond-text-long DATA=FOLDER BOOKS=FOLDER benchmarks/quality/retain_pond.sh texts|train|gate|newest|text|recall|tables ...
# DATA holds great_expectations.txt, which is evaluated on, and the_adventures_of_sherlock_holmes.txt, which chooses the
# newest share; BOOKS (by default DATA) the novels to train on, from which both and the other held-out ones are left out.
# Everything goes on where it stopped. OUT: folder of heads and results. HEADS: file of heads to evaluate, by default
# those that are found by the model's mark; GATE likewise. STEPS, MINUTES: of a training. SAMPLES: windows of a row.
# CONTEXTS: with six questions each. RECENT, WINDOW: newest share of locret, newest entries of the gate, in running text.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
bin=$root/${BIN:-.venv/bin}
quality=$root/benchmarks/quality
model=${MODEL:-pond-text-long}
out=${OUT:-out/retain-pond}/$model
export OMP_NUM_THREADS=1
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "${DATA:?names a folder with the texts}"

heads=${HEADS:+:heads=$HEADS}
gates=${GATE:+:gate=$GATE}
share=${RECENT:-0.7}
window=${WINDOW:-102}
judged=text:path=great_expectations.txt:context_len=1024:stride=1280
chosen=text:path=the_adventures_of_sherlock_holmes.txt:context_len=1024:stride=1280
facts=pond_facts:questions=6:essay=great_expectations.txt
evaluate() {
  to=$1
  shift
  "$bin/millpond" eval --model "$model" --seed 7 --threads 1 --batch-size 12 --out "$out/$to" "$@"
}

for part in "$@"; do
  case $part in
    texts)
      "$bin/python" "$quality/retain_real_texts.py" --books "${BOOKS:-.}" --facts pond --texts 2400 --out "$out/texts.jsonl"
      ;;
    train)
      "$bin/millpond" train retain --model "$model" --data "$out/texts.jsonl" --length 896,1152 --width 384 \
        --steps "${STEPS:-1600}" --max-minutes "${MINUTES:-60}" --threads 1 --card --out "$out/$model.safetensors"
      ;;
    gate)
      # begins with the heads; a tenth of 1,024 tokens are the newest
      "$bin/millpond" train gate --model "$model" --data "$out/texts.jsonl" --length 896,1152 \
        --start "$out/$model.safetensors" --hidden 384 --window 102 --target-keep 20% --steps "${STEPS:-400}" \
        --max-minutes "${MINUTES:-60}" --threads 1 --card --out "$out/$model-gate.safetensors"
      ;;
    newest)
      # which newest share running text takes: chosen on another book than it is judged on
      for recent in 0.1 0.3 0.5 0.6 0.7 0.8 0.9; do
        list=${list:+$list,}locret$heads:recent=$recent,locret$heads:decode=evict:recent=$recent
      done
      for newest in 16 64 102 144; do
        list=$list,attention_gate$gates:decode=grow:window=$newest,attention_gate$gates:window=$newest
      done
      evaluate newest --samples "${SAMPLES:-60}" --tasks "$chosen" --budget 20% --method "full,$list"
      ;;
    text)
      # ada and snapkv grow behind the prompt, window, streaming and h2o do not: locret and the gate both ways
      evaluate text --samples "${SAMPLES:-60}" --tasks "$judged" --budget 20% \
        --method "full,ada,snapkv,ada:score=snapkv/decode=evict,window,streaming,h2o:recent=0.8,locret$heads,\
locret$heads:recent=$share,locret$heads:decode=evict:recent=$share,\
attention_gate$gates:decode=grow:window=$window,attention_gate$gates:window=$window"
      ;;
    recall)
      evaluate recall --samples "${CONTEXTS:-60}" --protocol agnostic --tasks "$facts" --method full
      evaluate recall --samples "${CONTEXTS:-60}" --protocol agnostic --tasks "$facts" --budget 20%,10% \
        --method "window,h2o,snapkv,ada,keydiff,kvzip,kvzip:across=true,locret$heads,locret$heads:recent=$share"
      evaluate recall --samples "${CONTEXTS:-60}" --protocol agnostic --tasks "$facts" \
        --method "attention_gate$gates,attention_gate$gates:window=$window"
      ;;
    *)
      echo "no part '$part': texts, train, gate, newest, text, recall or tables" >&2
      exit 2
      ;;
  esac
done
