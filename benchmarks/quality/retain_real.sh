#!/bin/sh
# Retaining heads of SmolLM2-135M: texts, training, and what they keep beside methods without training; hours on a CPU.
#   DATA=FOLDER benchmarks/quality/retain_real.sh texts|train|gate|text|newest|recall|gate-recall|tables ...
#     or: lora lora-recall reading
# DATA holds wikitext2_test.txt, bleak_house.txt, great_expectations.txt, and BOOKS (by default DATA) other novels as .txt.
# Everything goes on where it stopped. MODEL: `millpond models get smollm2-135m` first. OUT: folder of heads and results.
# STEPS: of the whole training. MINUTES: of this call's training. SAMPLES: windows and contexts of a row.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
bin=$root/${BIN:-.venv/bin}
quality=$root/benchmarks/quality
out=${OUT:-out/retain}
model=${MODEL:-smollm2-135m}
export OMP_NUM_THREADS=1
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "${DATA:?names a folder with the texts}"

heads=$out/heads.safetensors
short=context_len=1024:continuation_len=64:stride=1088
facts=prose_facts:essay=great_expectations.txt:length=1024:facts=3:questions=3
evaluate() {
  to=$1
  shift
  "$bin/millpond" eval --model "$model" --seed 7 --threads 1 --batch-size 4 --samples "${SAMPLES:-20}" --out "$out/$to" "$@"
}

for part in "$@"; do
  case $part in
    texts)
      "$bin/python" "$quality/retain_real_texts.py" --books "${BOOKS:-.}" --out "$out/texts.jsonl"
      ;;
    train)
      "$bin/millpond" train retain --model "$model" --data "$out/texts.jsonl" --length 640,1024 --steps "${STEPS:-500}" \
        --max-minutes "${MINUTES:-120}" --threads 1 --card --out "$heads"
      ;;
    gate)
      # begins with the heads
      "$bin/millpond" train gate --model "$model" --data "$out/texts.jsonl" --length 640,1024 --start "$heads" \
        --target-keep 20% --steps 150 --max-minutes "${MINUTES:-120}" --threads 1 --card --out "$out/gate.safetensors"
      ;;
    gate-recall)
      evaluate recall --protocol agnostic --tasks "$facts" --dtype bf16 \
        --method "attention_gate:gate=$out/gate.safetensors"
      ;;
    lora)
      # gates with an adapter of the attention projections, and the adapter alone, for as many steps
      for seed in 0 1 2; do
        adapter="--model $model --data $out/texts.jsonl --length 640,1024 --lora 8 --steps 40 --seed $seed --threads 1"
        "$bin/millpond" train gate $adapter --window 4096 --target-keep 99% --out "$out/lora-$seed.safetensors"
        "$bin/millpond" train gate $adapter --start "$heads" --target-keep 40% --out "$out/gated-$seed.safetensors"
      done
      ;;
    lora-recall)
      # in the folder of the files, so that rows name these alone
      (
        task=prose_facts:essay=$PWD/great_expectations.txt:length=1024:facts=3:questions=3
        cd "$out"
        for seed in 0 1 2; do
          evaluate lora --protocol agnostic --tasks "$task" --dtype bf16 \
            --method "full,attention_gate:gate=gated-$seed.safetensors,attention_gate:gate=lora-$seed.safetensors:window=4096"
        done
        "$bin/python" "$quality/real_recall.py" lora --out gate-lora.json
      )
      ;;
    reading)
      # beside what the paper has in its table, at 4,096 tokens
      (
        essay=$PWD/great_expectations.txt
        own=locret:heads=heads.safetensors:prefill=chunks
        cd "$out"
        "$bin/python" -W ignore "$quality/reading_table.py" "$model" full full/int4 full/rotated4 minference:ratio=0.2 \
          infllm@20% sirllm@20% sirllm@5% $own@20% $own@5% $own@20%/rotated4 \
          merge_on_evict:score=locret/heads=heads.safetensors@20% --essay "$essay" --out reading-table.json
      )
      ;;
    text)
      tasks=text:path=wikitext2_test.txt:$short,text:path=bleak_house.txt:$short
      evaluate text --tasks "$tasks" --method full
      evaluate text --tasks "$tasks" --budget 20%,10% --method "h2o,snapkv,locret:heads=$heads"
      ;;
    newest)
      # a larger share of the budget for the newest entries
      share=locret:heads=$heads:recent
      evaluate newest --tasks "text:path=wikitext2_test.txt:$short,text:path=bleak_house.txt:$short" --budget 20% \
        --method "full,h2o,locret:heads=$heads,$share=0.3,$share=0.5,$share=0.7"
      ;;
    recall)
      evaluate recall --protocol agnostic --tasks "$facts" --dtype bf16 --method full
      evaluate recall --protocol agnostic --tasks "$facts" --dtype bf16 --budget 20%,10% \
        --method "h2o,snapkv,keydiff,kvzip,locret:heads=$heads"
      # a fifth and a tenth of the bytes
      evaluate recall --protocol agnostic --tasks "$facts" --dtype bf16 --budget 60%,30% --codec rotated4 \
        --method "kvzip,locret:heads=$heads"
      ;;
    tables)
      "$bin/python" "$quality/real_text.py" "$out/text" --windows "${SAMPLES:-20}" --out "$out/text.json"
      "$bin/python" "$quality/real_recall.py" "$out/recall" --out "$out/recall.json"
      if [ -d "$out/newest" ]; then
        "$bin/python" "$quality/real_text.py" "$out/newest" --windows "${SAMPLES:-20}" --out "$out/newest.json"
        sed -i "s#$out/##g" "$out"/newest.json "$out"/newest.md
      fi
      sed -i "s#$out/##g" "$out"/text.json "$out"/text.md "$out"/recall.json "$out"/recall.md
      ;;
    *)
      echo "no part '$part': texts, train, gate, lora, lora-recall, reading, text, newest, recall, gate-recall or tables" >&2
      exit 2
      ;;
  esac
done
