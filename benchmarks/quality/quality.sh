#!/bin/sh
# The committed results about quality, into benchmarks/results/quality. Hours on two cores; goes on where it stopped.
#   benchmarks/quality/quality.sh PART ...    of: aware agnostic trained parts picture text text-long codecs codecs-text codecs-text-papers
#                                     peers curves curve-peers curve-merge needles needle-map text-pairs fidelity-text orderings
#                                     orderings-text bytes orderings-bytes pools; then make docs
# BIN: folder of the programs. SAMPLES: of each task; PART_SAMPLES, TEXT_SAMPLES: of those parts. THREADS: of torch.
# METHODS: of aware and agnostic, beside full, TEXT_METHODS: of text, PICTURED: of the picture, ABLATIONS: of parts and
# text, LEADING: of peers. DATA: folder with texts, for the parts on text. OUT: another folder of results.
# CURVE_SAMPLES, CURVE_METHODS, VARIANTS, BUDGETS, PRESSES, PROTOCOLS, TASKS: what curves and curve-peers cross.
#
# Two processes share the work by tasks, each in a folder of its own; curve-merge puts them together and summarises:
#   OUT=out/one TASKS=recall:length=1024,copy:length=1024 benchmarks/quality/quality.sh curves curve-peers &
#   OUT=out/two TASKS=niah_multiquery:length=1024,tracking:length=1024 benchmarks/quality/quality.sh curves curve-peers & wait
#   PARTS="out/one out/two" benchmarks/quality/quality.sh curve-merge orderings
# curves and curve-peers write into the same folders: run them in one folder one after the other.
set -eu
cd "$(dirname "$0")/../.."
bin=${BIN:-.venv/bin}
out=${OUT:-benchmarks/results/quality}
samples=${SAMPLES:-200}
threads=${THREADS:-1}
export OMP_NUM_THREADS="$threads"

tasks=""
for name in recall overwritten niah_single niah_multikey niah_multivalue niah_multiquery tracking copy frequent_words \
  common_words; do
  tasks=$tasks,$name:length=1024
done
tasks=${tasks#,}
methods=${METHODS:-h2o,h2o:decay=0.9,ada,snapkv,pyramidkv,criticalkv,tova,keydiff,compactor,chunkkv,\
expected_attention,streaming,window,random}
text_methods=${TEXT_METHODS:-full,oracle,h2o,ada,snapkv,tova,streaming,window,random}
ablations=${ABLATIONS-h2o:recent=0:sinks=0,h2o:sinks=0,h2o:average=true,h2o:decay=0.9,h2o:decay=0.99,\
h2o:prefill=greedy,no_heavy,strided,fixed}

# The curves: every method but full, which is their measure, and minference, which stores everything whatever the
# budget. layer_table has a table; duo_attention and qfilters take heads and filters from the prompt, elastic a text
# without images. What dms, duo_attention, infllm and simlayerkv always keep by default is more than 5% of 1,024: here
# it is less.
curve_tasks=${TASKS:-recall:length=1024,niah_multiquery:length=1024,tracking:length=1024,copy:length=1024}
curve_samples=${CURVE_SAMPLES:-40}
budgets=${BUDGETS:-5%,10%,20%,50%}
curve_methods=${CURVE_METHODS:-window,ada,attention_gate,attention_matching,cake,cam,chunkkv,compactor,criticalkv,d2o,defensivekv,dms:window=32,duo_attention:recent=32,\
elastic,ems,expected_attention,fastgen,finch,fixed,h2o,infllm:sinks=4:block=8,keydiff,knorm,kvmerger,kvzip,lagkv,lava,locret,\
layer_table:table=3;1,merge_on_evict,no_heavy,pyramidkv,qfilters,random,random_attention:recent=32,rkv,simlayerkv:recent=32,sirllm,snapkv,\
streaming,strided,tova,triattention,vase:window=32}
# The other sides of pairs that papers speak of (packages/millpond-lab/src/millpond_lab/evals/report/claims.py), and ours in the settings of presses
# (counterparts.py there); their curves are on no page.
variants=${VARIANTS-h2o:decay=0.9,h2o:recent=0:sinks=0:average=true,snapkv:kernel=7,snapkv:pool=avg:kernel=7,ada:score=snapkv/kernel=7,chunkkv:score=snapkv/kernel=7,\
criticalkv:score=snapkv/kernel=7,merge_on_evict:score=snapkv/kernel=7,pyramidkv:score=snapkv/kernel=7,ada:score=h2o,ada:score=pyramidkv,\
merge_on_evict:score=h2o,h2o:recent=0.34:sinks=0,ems:threshold=1.1,streaming:positions=absolute,elastic:merge=none,\
merge_on_evict:mass_bias=true,kvmerger:mass_bias=true,d2o:mass_bias=true,ems:mass_bias=true,cam:mass_bias=true,\
h2o:recent=0:sinks=0:average=true:decode=once,snapkv:pool=avg:kernel=7:decode=once,streaming:positions=absolute:decode=once,\
tova:pin_newest=true:decode=once,knorm:decode=once,keydiff:decode=once,expected_attention:decode=once,\
random:recent=0:sinks=0:decode=once,\
kvzip:across=false,kvzip:ask=Repeat the previous context exactly.:across=false,ada:alpha=0.6,merge_on_evict:threshold=0.9}
# kvpress's side of our methods (counterparts.py says which have none), and snapkv as it comes there.
snapkv=window_size=32:kernel_size=7
presses=${PRESSES:-SnapKVPress,SnapKVPress:$snapkv,AdaKVPress(SnapKVPress):$snapkv,PyramidKVPress:$snapkv,\
CriticalKVPress(SnapKVPress):$snapkv,ChunkKVPress(SnapKVPress):chunk_length=10:$snapkv,\
MergingPress(SnapKVPress):$snapkv,ObservedAttentionPress,TOVAPress,StreamingLLMPress,KnormPress,KeyDiffPress,\
LagKVPress,ExpectedAttentionPress,CompactorPress,KVzipPress,KVzipPress:layerwise=true,RandomPress}
# Those that stand on the leaderboard.
leading=${LEADING:-SnapKVPress:$snapkv,AdaKVPress(SnapKVPress):$snapkv,ObservedAttentionPress,TOVAPress,KeyDiffPress,\
StreamingLLMPress}
protocols=${PROTOCOLS:-aware agnostic}
codecs=${CODECS:-int8,fp8,int4,kivi4,rotated4,int3,int2,kivi2,rotated2}

evaluate() {
  "$bin/millpond" eval --seed 7 --batch-size 16 --threads "$threads" "$@"
}

for part in "$@"; do
  case $part in
    aware)
      evaluate --samples "$samples" --tasks "$tasks" --method "full,oracle,$methods" --out "$out/aware"
      ;;
    parts)
      # H2O without some of its parts, and what it does to others to keep the first token or to lose it
      on=recall:length=1024,niah_multivalue:length=1024,tracking:length=1024,copy:length=1024,frequent_words:length=1024
      evaluate --samples "${PART_SAMPLES:-100}" --tasks $on --out "$out/../h2o-parts" \
        --method "full,h2o${ablations:+,$ablations},window,window:sinks=4,random,random:sinks=0"
      evaluate --samples "${PART_SAMPLES:-100}" --tasks $on --out "$out/../h2o-parts" --method full,h2o --codec int4
      evaluate --samples "${PART_SAMPLES:-100}" --tasks $on --out "$out/../h2o-parts-agnostic" --protocol agnostic \
        --method h2o,h2o:decay=0.9,h2o:decay=0.99,window,snapkv
      ;;
    agnostic)
      # the oracle looks at the question, so it bounds only those who see it
      evaluate --samples "$samples" --tasks "$tasks" --method "full,$methods" --protocol agnostic --out "$out/agnostic"
      ;;
    trained)
      # heads that were trained for the model, on texts of the same families
      evaluate --samples "$samples" --tasks "$tasks" --method "${TRAINED:-locret}" --protocol agnostic --out "$out/trained"
      ;;
    picture)
      # of the curves, those of the leaderboard
      "$bin/millpond" plot "$out/curves-aware" --method "${PICTURED:-full,oracle,keydiff,compactor,pyramidkv,ada,snapkv,\
tova,h2o,streaming,window,random}" --out docs/images --format svg
      ;;
    peers)
      # kvpress on the leaderboard
      for protocol in $protocols; do
        "$bin/millpond" eval-peer --tasks "$tasks" --samples "$samples" --seed 7 --threads "$threads" \
          --protocol "$protocol" --method "$leading" --out "$out/$protocol"
      done
      ;;
    text | text-long)
      mkdir -p out
      cp "${DATA:?names a folder with great_expectations.txt, which pond-text has not read}/great_expectations.txt" out
      text=text:path=out/great_expectations.txt
      evaluate --samples "${TEXT_SAMPLES:-60}" --model "pond-$part" \
        --tasks $text:context_len=1024:stride=1280,$text:context_len=3584:stride=4096 \
        --method "$text_methods${ablations:+,$ablations},h2o:recent=0.8" --out "$out/$part"
      ;;
    codecs)
      evaluate --samples "${CODEC_SAMPLES:-50}" --tasks recall:length=1024,tracking:length=1024,copy:length=1024 \
        --budget 10%,20%,50% --method full,keydiff --dtype bf16 --codec "bf16,$codecs" --out "$out/../codecs"
      "$bin/millpond" plot "$out/../codecs" --out docs/images --format svg
      ;;
    codecs-text)
      mkdir -p out
      cp "${DATA:?names a folder with great_expectations.txt, which pond-text has not read}/great_expectations.txt" out
      evaluate --samples "${CODEC_SAMPLES:-32}" --model pond-text \
        --tasks text:path=out/great_expectations.txt:context_len=1024:stride=1280 --method full,ada --budget 20%,50% \
        --dtype bf16 --codec "bf16,$codecs" --out "$out/../codecs-text"
      # formats that are made for the model: of another novel than is scored
      "$bin/millpond" calibrate --model pond-text --text "$DATA/bleak_house.txt" --out out/pond-text.safetensors --q-norm 2
      evaluate --samples "${CODEC_SAMPLES:-32}" --model pond-text \
        --tasks text:path=out/great_expectations.txt:context_len=1024:stride=1280 --method full,ada --budget 20%,50% \
        --dtype bf16 --codec "${CALIBRATED:-kvquant4,kvquant3,kvquant2}" --calibration out/pond-text.safetensors \
        --out "$out/../codecs-text"
      "$bin/millpond" plot "$out/../codecs-text" --out docs/images --format svg
      ;;
    codecs-text-papers)
      # formats of papers, and MiKV's tiers beside h2o without them
      mkdir -p out
      cp "${DATA:?names a folder with great_expectations.txt, which pond-text has not read}/great_expectations.txt" out
      novel=text:path=out/great_expectations.txt:context_len=1024:stride=1280
      evaluate --samples "${CODEC_SAMPLES:-32}" --model pond-text --tasks "$novel" --method full \
        --codec "${PAPER_CODECS:-bf16,rotated3}" --out "$out/../codecs-text-papers"
      evaluate --samples "${CODEC_SAMPLES:-32}" --model pond-text --tasks "$novel" --method h2o --budget 20% \
        --codec "${TIERS:-bf16,mikv,mikv3,mikv4}" --out "$out/../codecs-text-papers"
      ;;
    curves)
      for protocol in $protocols; do
        case $protocol in aware) references=full,oracle ;; *) references=full ;; esac
        evaluate --samples "$curve_samples" --tasks "$curve_tasks" --budget "$budgets" --protocol "$protocol" \
          --method "$references,$curve_methods${variants:+,$variants}" --out "$out/curves-$protocol"
      done
      ;;
    curve-peers)
      for protocol in $protocols; do
        "$bin/millpond" eval-peer --samples "$curve_samples" --seed 7 --threads "$threads" --tasks "$curve_tasks" \
          --budget "$budgets" --protocol "$protocol" --method "$presses" --out "$out/curves-$protocol"
      done
      ;;
    bytes)
      # beside kvpress at equal bytes: budgets of whole pages, so that equal entries are equal bytes
      own=snapkv,snapkv:kernel=7,snapkv:pool=avg:kernel=7
      for name in ada pyramidkv criticalkv chunkkv merge_on_evict; do
        own=$own,$name,$name:score=snapkv/pool=avg/kernel=7
      done
      for protocol in $protocols; do
        evaluate --samples "${BYTES_SAMPLES:-10}" --tasks "$curve_tasks" --budget 64,224 --protocol "$protocol" \
          --method "full,$own,kvmerger,h2o:recent=0.34:sinks=0:decode=grow,h2o,random:recent=0.5" \
          --out "$out/bytes-$protocol"
        "$bin/millpond" eval-peer --samples "${BYTES_SAMPLES:-10}" --seed 7 --threads "$threads" --budget 64,224 \
          --tasks "$curve_tasks" --protocol "$protocol" --out "$out/bytes-$protocol" \
          --method "SnapKVPress:$snapkv,AdaKVPress(SnapKVPress):$snapkv,PyramidKVPress:$snapkv,\
CriticalKVPress(SnapKVPress):$snapkv,ChunkKVPress(SnapKVPress):chunk_length=10:$snapkv,\
MergingPress(SnapKVPress):$snapkv"
      done
      ;;
    orderings-bytes)
      folders=""
      for protocol in $protocols; do folders="$folders $out/bytes-$protocol"; done
      # shellcheck disable=SC2086  # one word for each folder
      "$bin/python" benchmarks/quality/orderings.py $folders --renew --out "$out/orderings.json"
      ;;
    pools)
      # how wide SnapKV's pool should be, on a real model: MODEL names its folder
      "$bin/python" benchmarks/quality/pool_widths.py --model "${MODEL:?names a folder with a real model}" --samples 40 \
        --text "${DATA:?names a folder with wikitext2_test.txt}/wikitext2_test.txt" --out "$out/../pool-widths.json"
      # the leading ones again on other samples, and both kinds of pool on pond-recall
      "$bin/python" benchmarks/quality/pool_widths.py --model "$MODEL" --samples 60 --seed 11 \
        --pools "max 7,max 21,avg 13,avg 21" --text "$DATA/grimms_fairy_tales.txt" --out "$out/../pool-widths-seed-11.json"
      evaluate --samples 40 --budget 64,224 --out "$out/../pool-kinds" \
        --tasks recall:length=1024,tracking:length=1024,niah_multivalue:length=1024,copy:length=1024 \
        --method snapkv:kernel=7,snapkv,snapkv:pool=avg,snapkv:pool=avg:kernel=7
      ;;
    curve-merge)
      # A run goes on from the samples of both, finds every question answered, and writes run.json and the summary.
      for protocol in $protocols; do
        into=$out/curves-$protocol
        mkdir -p "$into"
        for folder in ${PARTS:?names the folders of results to put together}; do
          [ -e "$into/run.json" ] || cp "$folder/curves-$protocol/run.json" "$into"
          cat "$folder/curves-$protocol/samples.jsonl" >> "$into/samples.jsonl"
        done
      done
      PARTS="" OUT="$out" benchmarks/quality/quality.sh curves curve-peers
      ;;
    text-pairs)
      # what the claims compare, on text
      mkdir -p out
      cp "${DATA:?names a folder with great_expectations.txt, which pond-text has not read}/great_expectations.txt" out
      evaluate --samples "${TEXT_SAMPLES:-32}" --model pond-text --budget 10%,20%,50% \
        --tasks text:path=out/great_expectations.txt:context_len=1024:stride=1280 \
        --method "full,window,streaming,h2o,snapkv,ada,pyramidkv,criticalkv,merge_on_evict,kvmerger,d2o,ems,cam,\
elastic${variants:+,$variants}" --out "$out/pairs-text"
      ;;
    fidelity-text)
      # why competition helps one score and not another: the attention that a plan misses
      mkdir -p out
      cp "${DATA:?names a folder with great_expectations.txt, which pond-text has not read}/great_expectations.txt" out
      evaluate --samples "${TEXT_SAMPLES:-32}" --model pond-text --budget 10%,20%,50% \
        --tasks fidelity:path=out/great_expectations.txt:context_len=1024:stride=1280 \
        --method "full,h2o,ada:score=h2o,ada:score=h2o:every=0,ada:score=h2o:alpha=0.6,snapkv,ada" \
        --out "$out/../fidelity-text"
      ;;
    needles)
      # ten depths, round and round
      for protocol in $protocols; do
        evaluate --samples "${NEEDLE_SAMPLES:-100}" --tasks needle:lengths=1024 --budget "$budgets" \
          --protocol "$protocol" --method full,snapkv,streaming,h2o,window --out "$out/needles-$protocol"
      done
      ;;
    needle-map)
      # the picture: ten depths of four lengths
      evaluate --samples "${NEEDLE_SAMPLES:-120}" --tasks needle:lengths=512+1024+2048+4096 --budget 20% \
        --method full,snapkv,h2o,streaming --out "$out/needle-map"
      "$bin/millpond" plot "$out/needle-map" --out docs/images --format svg
      ;;
    orderings)
      folders=""
      for protocol in $protocols; do folders="$folders $out/curves-$protocol $out/needles-$protocol"; done
      folders="$folders $out/pairs-text"
      # shellcheck disable=SC2086  # one word for each folder
      "$bin/python" benchmarks/quality/orderings.py $folders --out "$out/orderings.json"
      ;;
    orderings-text)
      "$bin/python" benchmarks/quality/orderings.py "$out/pairs-text" --renew --out "$out/orderings.json"
      ;;
    *)
      echo "no part called $part; there are: aware agnostic trained parts picture text text-long codecs codecs-text" \
        "codecs-text-papers peers curves curve-peers curve-merge needles needle-map text-pairs fidelity-text orderings orderings-text bytes" \
        "orderings-bytes pools" >&2
      exit 2
      ;;
  esac
done
