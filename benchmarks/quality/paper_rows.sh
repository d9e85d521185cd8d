#!/bin/sh
# The committed rows on SmolLM2 about what papers do otherwise, into benchmarks/results; then make docs-pages.
#   DATA=FOLDER benchmarks/quality/paper_rows.sh PART ...    of: codecs tiers turns fastgen merging values
#                                                      bytes masks rules ladder endings
#                                                      alike known early obeyed
# DATA: folder with wikitext2_valid.txt, on which all calibrations are made, and with the judged texts, which are
# wikitext2_test.txt, gutenberg/emma.txt and cpp_docs.md.txt. WINDOWS: of each text. BIN: folder of the programs.
# MODEL: smollm2-135m by default. OUT: folder of results. SAMPLES: of a task. WORK: folder of the answers that tables of
# tasks are made of, by default out.
# shellcheck disable=SC2086  # one word for each option
set -eu
cd "$(dirname "$0")/../.."
python=${BIN:-.venv/bin}/python
out=${OUT:-benchmarks/results}
data=${DATA:?names a folder with wikitext2_valid.txt, wikitext2_test.txt, gutenberg/emma.txt and cpp_docs.md.txt}
model=${MODEL:-smollm2-135m}
windows=${WINDOWS:-2}
size="--windows $windows --prompt 512"
texts="--text wiki=$data/wikitext2_test.txt --text novel=$data/gutenberg/emma.txt --text cpp=$data/cpp_docs.md.txt"

measure() {
  script=$1
  shift
  "$python" "benchmarks/quality/$script.py" "$model" "$@" $texts
}

# answered SAMPLES NAME OPTION ...: questions of a task, into the folder NAME of WORK; goes on where it stopped
answered() {
  samples=$1 name=$2
  shift 2
  "${BIN:-.venv/bin}/millpond" eval --model "$model" --seed 7 --threads 1 --samples "${SAMPLES:-$samples}" \
    --out "${WORK:-out}/$name" "$@"
}

# asked NAME: the table of what `answered` wrote there
asked() {
  "$python" benchmarks/quality/real_recall.py "${WORK:-out}/$1" --out "$out/$1.json"
}

# few_bits COMMAND ...: with MiKV's formats for what h2o would evict, and with h2o in no fewer bytes
few_bits() {
  for setting in "full" "h2o --budget 20%,29%,36%" "h2o --budget 20% --codec int8_mikv,int8_mikv3,int8_mikv4"; do
    "$@" --method $setting
  done
}

for part in "$@"; do
  case $part in
    codecs)
      # ThinK's shares of channels, and KVQuant with ranges of a head and of a token
      measure codec_texts think think:0.5 think:0.25:0.25 think:0.5:0.25 think_kivi2 kivi2 --windows 4 --prompt 1024 \
        --out "$out/codec-papers.json"
      measure codec_texts kvquant4 kvquant4_paper kvquant3 kvquant3_paper kvquant2 kvquant2_paper $size \
        --calibrate "$data/wikitext2_valid.txt" --calibration-windows 8 --calibration-length 512 \
        --out "$out/codec-papers.json"
      ;;
    tiers)
      # MiKV beside H2O without it
      measure codec_texts bf16 mikv mikv3 mikv4 int8_mikv int8_mikv3 int8_mikv4 $size \
        --method h2o --budget 20% --out "$out/codec-papers.json"
      ;;
    turns)
      # FastGen that measures its heads in each of three turns, or in the first alone
      for profile in turn once; do
        measure codec_texts auto --windows "$windows" --prompt 768 --turns 3 --method fastgen \
          --option "profile=$profile" --out "$out/fastgen-profiles.json"
      done
      ;;
    fastgen)
      # FastGen without a budget, by the attention that its heads keep, and H2O in about as many bytes
      for threshold in 0.91 0.93 0.95 0.98; do
        measure codec_texts auto --windows 4 --prompt 1024 --method fastgen --option "threshold=$threshold" \
          --out "$out/fastgen-thresholds.json"
      done
      ;;
    merging)
      # KVMerger's thresholds of layers on texts that they were not measured on
      measure merge_thresholds $size --calibrate "$data/wikitext2_valid.txt" \
        --text "tales=$data/grimms_fairy_tales.txt" --out "$out/merge-thresholds.json"
      ;;
    values)
      # FlexGen's sparse attention
      measure sparse_values 1 0.5 0.25 0.1 $size --scored 16 --out "$out/sparse-values.json"
      ;;
    bytes)
      # methods and ThinK's formats in as many bytes, on the same windows
      fastgen=fastgen:threshold
      measure setting_texts $fastgen=0.91 $fastgen=0.95 $fastgen=0.98 h2o@=$fastgen=0.91 h2o@=$fastgen=0.95 \
        h2o@=$fastgen=0.98 streaming@=$fastgen=0.95 h2o@512 kvmerger@512 cam@512 h2o@352 kvmerger@352 cam@352 \
        --windows 4 --prompt 1024 --out "$out/setting-texts.json"
      measure setting_texts snapkv@512/think snapkv@448 snapkv@512/think:0.5 snapkv@384 \
        h2o@512/think h2o@448 h2o@512/think:0.5 h2o@384 --windows 4 --prompt 1024 --out "$out/setting-texts.json"
      ;;
    masks)
      # some of these a second time, without a cache
      measure masked_kl fastgen:threshold=0.95 h2o@=fastgen:threshold=0.95 streaming@=fastgen:threshold=0.95 --windows "$windows" \
        --rows "$out/setting-texts.json" --out "$out/masked-kl.json"
      ;;
    rules)
      # whether heads keep the rule that FastGen gives them
      "$python" benchmarks/quality/fastgen_persistence.py --model "$model" --out "$out/fastgen-persistence.json" \
        "$data/wikitext2_test.txt" "$data/gutenberg/emma.txt" "$data/cpp_docs.md.txt"
      ;;
    ladder)
      # KVQuant's steps
      measure kvquant_ladder --windows 3 --prompt 512 --calibrate "$data/wikitext2_valid.txt" \
        --out "$out/kvquant-ladder.json"
      ;;
    endings)
      # a choice of the form of COPA and OpenBookQA
      for setting in "full" "h2o,streaming --budget 4%,10%,20%,50%"; do
        answered 100 endings --dtype f32 --batch-size 16 --protocol aware \
          --tasks "endings:path=$data/wikitext2_test.txt" --method $setting
      done
      asked endings
      ;;
    alike)
      # neighbouring keys, over texts and over layers
      measure key_similarity --windows 4 --prompt 1024 --out "$out/key-similarity.json"
      ;;
    known)
      # facts, the question known: heads that compete, layers with budgets of their own, merging
      task=prose_facts:length=2048:facts=3:essay=$data/gutenberg/emma.txt
      for setting in "full" "snapkv,ada,pyramidkv,h2o,ems,streaming --budget 3%,6%,20%"; do
        answered 40 known-facts --dtype bf16 --batch-size 4 --protocol aware --tasks "$task" --method $setting
      done
      asked known-facts
      ;;
    early)
      # MiKV: facts in the first twentieth of a text that is evicted from, or stored in few bits
      task=prose_facts:length=1024:facts=3:questions=3:within=0.05:essay=$data/gutenberg/emma.txt
      few_bits answered 20 early --dtype bf16 --batch-size 4 --protocol agnostic --tasks "$task"
      asked early
      ;;
    obeyed)
      # MiKV: rules of a system message; of a model that obeys rules, which MODEL names
      task=instructions:length=1024:rules=3:questions=3:examples=2:essay=$data/gutenberg/emma.txt
      few_bits answered 20 obeyed --dtype bf16 --batch-size 4 --protocol agnostic --tasks "$task"
      asked obeyed
      ;;
    *)
      echo "no part called $part; there are: codecs tiers turns fastgen merging values bytes masks rules ladder endings alike known early obeyed" >&2
      exit 2
      ;;
  esac
done
