#!/bin/sh
# Perplexity of texts and answers about them under methods, budgets and number formats on a real model; hours, and it
# goes on where it stopped.
#   DATA=FOLDER benchmarks/quality/real.sh all|more|others|bits|novels|long|choose|presets|presets-judged|parts ...  then: real.sh table
#   DATA=FOLDER benchmarks/quality/real.sh recall|turns|kvpress|kvzip|xsum|gsm8k|multi-news ... then: real.sh answers
#   DATA=FOLDER benchmarks/quality/real.sh quick          ten minutes on two cores: a few windows, the first five rows
# DATA holds wikitext2_test.txt, wikitext2_valid.txt, bleak_house.txt and great_expectations.txt; for the parts
# of their names xsum_0shot.jsonl, gsm8k_test.jsonl and longbench_multi_news.jsonl. The parts can run next to each other,
# one thread each. SAMPLES: windows or contexts of a row, by default 60 of texts and 20 where answers are scored.
# MODEL: `millpond models get smollm2-135m` first. OUT: folder of results.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
bin=$root/${BIN:-.venv/bin}
results=$(cd "$(dirname "$0")/../results" && pwd)
quality=$(dirname "$results")/quality
out=${OUT:-out/real}
model=${MODEL:-smollm2-135m}
export OMP_NUM_THREADS=1
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "${DATA:?names a folder with the texts}"

short=context_len=1024:continuation_len=64:stride=1088
test=text:path=wikitext2_test.txt:$short
facts=prose_facts:essay=great_expectations.txt:length=1024:facts=3
evaluate() {
  to=$1
  shift
  "$bin/millpond" eval --model "$model" --seed 7 --threads 1 --batch-size 4 --samples "${SAMPLES:-$most}" --out "$out/$to" "$@"
}
# Answers: the full cache, then about a fifth of its bytes: most entries in 3 or 4 bits, or a fifth of them in 16.
# The oracle reads ahead, so it has no place where the question comes after the compression.
answers() {
  to=$1 in_4_bits=$2 in_16_bits=$3
  shift 3
  evaluate "$to" "$@" --dtype bf16 --method full
  evaluate "$to" "$@" --dtype bf16 --budget 60% --codec rotated4 --method "$in_4_bits"
  evaluate "$to" "$@" --dtype bf16 --budget 90% --codec rotated3 --method h2o
  evaluate "$to" "$@" --dtype bf16 --budget 20% --method "$in_16_bits"
}

for part in "$@"; do
  case $part in
    recall | turns | kvpress | kvzip | xsum | gsm8k | multi-news) most=20 ;;
    quick) most=8 ;;
    *) most=60 ;;
  esac
  case $part in
    all)
      evaluate w1-a --tasks "$test" --budget 20% --method "full,oracle,h2o,snapkv,streaming,window,random,tova,keydiff,\
no_heavy,expected_attention,kvmerger,ada,ada:score=h2o,pyramidkv,criticalkv,chunkkv,h2o:recent=0.25"
      ;;
    others)
      evaluate w1-b --tasks "$test" --budget 20% --method "compactor,kvzip,merge_on_evict,merge_on_evict:score=h2o,d2o,\
ems,cam,elastic,fastgen,finch,fixed,strided,knorm,lagkv,rkv,sirllm,qfilters,dms:window=32,duo_attention:recent=32,\
infllm:sinks=4:block=8,simlayerkv:recent=32,layer_table:table=3;1,h2o:decay=0.99,h2o:reduce=max,h2o:recent=0.75,\
snapkv:kernel=7,snapkv:pool=avg,kvmerger:mass_bias=true"
      ;;
    more)
      evaluate w1-more --tasks "$test" --budget 10%,50%,5% \
        --method full,oracle,h2o,snapkv,expected_attention,kvmerger,ada:score=h2o,compactor,streaming,tova
      ;;
    bits)
      evaluate w1-bits --tasks "$test" --budget 50%,33%,20% --codec int4 --method full,h2o,snapkv,expected_attention
      evaluate w1-bits --tasks "$test" --budget 50%,33% --codec int3,rotated4 --method full,h2o
      evaluate w1-bits --tasks "$test" --budget 60%,70% --codec rotated4 --method h2o
      ;;
    novels)
      evaluate g1 --tasks "text:path=bleak_house.txt:$short,text:path=great_expectations.txt:$short" --budget 20% \
        --method "full,oracle,h2o,snapkv,ada:score=h2o,kvmerger,expected_attention,streaming,random,tova,keydiff,\
compactor,h2o:recent=0.75,h2o:recent=0.25,window"
      ;;
    long)
      long=text:path=wikitext2_test.txt:context_len=4096:continuation_len=256:stride=4352
      evaluate w4 --tasks $long --budget 20% --method full,h2o,snapkv
      evaluate w4 --tasks $long --budget 50%,33% --codec int4 --method h2o,snapkv
      evaluate w4 --tasks $long --budget 20% --method streaming,window,oracle
      ;;
    choose)
      evaluate v1 --tasks "text:path=wikitext2_valid.txt:$short" --budget 20% \
        --method full,oracle,h2o,snapkv,ems,kvmerger,expected_attention,ada:score=h2o
      evaluate v1 --tasks "text:path=wikitext2_valid.txt:$short" --budget 60%,70% --codec rotated4 --method h2o
      ;;
    presets | presets-judged)
      # number formats alone and with most entries, for `light` and `balanced`: on the text that chooses, and on one that
      # judges
      text=valid
      test "$part" = presets || text=test
      tasks=text:path=wikitext2_$text.txt:$short
      evaluate "$part" --tasks "$tasks" --method full
      evaluate "$part" --tasks "$tasks" --codec int8,int4,rotated4 --method full
      evaluate "$part" --tasks "$tasks" --budget 70% --codec int8,rotated4 --method h2o
      ;;
    parts)
      # the reference and H2O again, so that the folder can be read alone
      evaluate w1-parts --tasks "$test" --budget 20% --method "full,h2o,h2o:sinks=0,no_heavy:sinks=4,\
h2o:recent=0:sinks=0,h2o:recent=0"
      ;;
    greedy)
      evaluate w1-greedy --samples 12 --tasks "$test" --budget 20% --method full,h2o,h2o:prefill=greedy
      ;;
    table-parts)
      compare="$bin/python $quality/real_text.py $out/w1-parts --windows ${WINDOWS:-60}"
      $compare --out "$results/h2o-parts-real.json"
      $compare --against h2o 20% --out "$results/h2o-parts-real-paired.json"
      ;;
    recall)
      answers r-agnostic h2o,kvzip,keydiff keydiff,h2o,kvzip,snapkv,streaming,window \
        --protocol agnostic --tasks "$facts:questions=3"
      answers r-aware snapkv:pool=avg,h2o snapkv:pool=avg,snapkv,keydiff,h2o,expected_attention,streaming,window,oracle \
        --protocol aware --tasks "$facts"
      # about an eighth of the bytes, for the preset of the smallest cache
      evaluate r-aware --protocol aware --tasks "$facts" --dtype bf16 --budget 512 --codec rotated4 \
        --method ada,h2o,snapkv:pool=avg
      evaluate r-agnostic --protocol agnostic --tasks "$facts:questions=3" --dtype bf16 --budget 512 --codec rotated4 \
        --method ada,h2o,kvzip
      ;;
    turns)
      answers r-turns h2o,kvzip h2o,keydiff,snapkv,kvzip,window --protocol turns --tasks "$facts:questions=3"
      ;;
    kvpress)
      # beside ours in the folders of recall; build/kvpress comes from benchmarks/peers/kvpress_env.sh
      presses="full,SnapKVPress,ExpectedAttentionPress,KeyDiffPress,StreamingLLMPress,KVzipPress,ObservedAttentionPress"
      for protocol in aware agnostic; do
        asked=$facts
        test $protocol = aware || asked=$facts:questions=3
        "$bin/millpond" eval-peer --model "$model" --seed 7 --threads 1 --samples "${SAMPLES:-$most}" --dtype bf16 \
          --out "$out/r-$protocol" --protocol $protocol --tasks "$asked" --budget 20% --method "$presses" \
          --python "$root/build/kvpress/bin/python"
      done
      ;;
    kvzip)
      # layers that compete for the budget, and layers of one size
      evaluate r-kvzip --protocol agnostic --tasks "$facts:questions=3" --dtype bf16 --method full
      evaluate r-kvzip --protocol agnostic --tasks "$facts:questions=3" --dtype bf16 --budget 20%,10% \
        --method kvzip:across=false,kvzip
      "$bin/python" "$quality/real_recall.py" "$out"/r-kvzip --out "$results/real-recall-kvzip.json"
      ;;
    xsum)
      answers t-xsum h2o h2o,snapkv,expected_attention,window --tasks h2o_summary:path=xsum_0shot.jsonl
      ;;
    gsm8k)
      answers t-gsm8k h2o h2o,snapkv,expected_attention,window --tasks gsm8k:path=gsm8k_test.jsonl:shots=8
      ;;
    multi-news)
      answers t-multi-news h2o h2o,snapkv,expected_attention,window \
        --tasks longbench:path=longbench_multi_news.jsonl:max_tokens=7600
      ;;
    quick)
      evaluate quick-bits --tasks "$test" --budget 60% --codec rotated4 --method full,h2o &
      bits=$!
      evaluate quick --tasks "$test" --budget 20% --method full,h2o,expected_attention,snapkv,streaming,window
      wait "$bits"
      "$bin/python" "$quality/real_text.py" "$out"/quick "$out"/quick-bits --windows 8 --out "$out/quick.json"
      head -n 9 "$out/quick.md"
      ;;
    answers)
      "$bin/python" "$quality/real_recall.py" "$out"/r-agnostic "$out"/r-aware "$out"/r-turns "$out"/t-xsum \
        "$out"/t-gsm8k "$out"/t-multi-news --out "$results/real-recall.json"
      ;;
    table)
      "$bin/python" "$quality/real_text.py" "$out"/w1-a "$out"/w1-b "$out"/w1-more "$out"/w1-bits "$out"/g1 \
        "$out"/w4 "$out"/v1 --out "$results/real-text.json"
      ;;
    *)
      echo "no part called $part; there are: all others more bits novels long choose presets presets-judged parts greedy table table-parts \
recall turns kvpress kvzip xsum gsm8k multi-news answers quick" >&2
      exit 2
      ;;
  esac
done
