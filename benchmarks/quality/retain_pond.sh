#!/bin/sh
# Heads and gates of pond-text and pond-text-long: texts, training, and what they keep of running text and of facts.
#   MODEL=pond-text-long DATA=FOLDER BOOKS=FOLDER \
#     benchmarks/quality/retain_pond.sh texts|train|gate|newest|text|recall|tables ...
# DATA holds great_expectations.txt, which is evaluated on, and the_adventures_of_sherlock_holmes.txt, which chooses
# how many of the newest stay; BOOKS (by default DATA) the novels to train on, from which both and the other held-out
# ones are left out.
# Everything goes on where it stopped. OUT: folder of heads and results. HEADS: file of heads to evaluate, by default
# those that are found by the model's mark; GATE likewise. STEPS, MINUTES: of a training. SAMPLES: windows of a row.
# CONTEXTS: with six questions each. RECENT, WINDOW: newest entries in running text, of locret and of the gate.
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
newest=${RECENT:-40}
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
        --start "$out/$model.safetensors" --hidden 384 --window 102 --target-keep 20% --steps "${STEPS:-240}" \
        --max-minutes "${MINUTES:-60}" --threads 1 --card --out "$out/$model-gate.safetensors"
      ;;
    newest)
      # how many of the newest entries running text takes: chosen on another book than it is judged on
      evaluate newest --samples "${SAMPLES:-60}" --tasks "$chosen" --budget 20% --method "full,ada,locret$heads:recent=0.1,\
locret$heads:recent=0.5,locret$heads:recent=0.8,locret$heads:compete=model:recent=20,\
locret$heads:compete=model:recent=40,locret$heads:compete=model:recent=102"
      ;;
    text)
      # ada, snapkv and locret grow behind the prompt unless decode=evict; window, streaming and h2o do not
      evaluate text --samples "${SAMPLES:-60}" --tasks "$judged" --budget 20% \
        --method "full,oracle,ada,snapkv,ada:score=snapkv/decode=evict,window,streaming,h2o:recent=0.8,locret$heads,\
locret$heads:recent=0.8,locret$heads:compete=model:recent=$newest,locret$heads:compete=layer:decode=evict:recent=$window"
      # the gate says itself how much stays, each layer another share
      evaluate text --samples "${SAMPLES:-60}" --tasks "$judged" \
        --method "attention_gate$gates:decode=grow:window=$window,attention_gate$gates:window=$window"
      ;;
    recall)
      evaluate recall --samples "${CONTEXTS:-60}" --protocol agnostic --tasks "$facts" --method full
      evaluate recall --samples "${CONTEXTS:-60}" --protocol agnostic --tasks "$facts" --budget 20%,10% \
        --method "window,h2o,snapkv,ada,keydiff,kvzip:across=false,kvzip,locret$heads,\
locret$heads:compete=model:recent=$newest"
      evaluate recall --samples "${CONTEXTS:-60}" --protocol agnostic --tasks "$facts" \
        --method "attention_gate$gates,attention_gate$gates:window=$window"
      ;;
    tables)
      if [ -d "$out/newest" ]; then
        "$bin/python" "$quality/real_text.py" "$out/newest" --windows "${SAMPLES:-60}" --out "$out/newest.json"
      fi
      "$bin/python" "$quality/real_text.py" "$out/text" --windows "${SAMPLES:-60}" --out "$out/text.json"
      # the same windows beside the best of the methods without training, those that grow and those that do not
      "$bin/python" "$quality/real_text.py" "$out/text" --windows "${SAMPLES:-60}" --against ada 20% \
        --out "$out/text-ada.json"
      "$bin/python" "$quality/real_text.py" "$out/text" --windows "${SAMPLES:-60}" --against streaming 20% \
        --out "$out/text-streaming.json"
      "$bin/python" "$quality/real_recall.py" "$out/recall" --out "$out/recall.json"
      "$bin/python" "$quality/real_recall.py" "$out/recall" --against keydiff 20% --out "$out/recall-keydiff.json"
      ;;
    *)
      echo "no part '$part': texts, train, gate, newest, text, recall or tables" >&2
      exit 2
      ;;
  esac
done
