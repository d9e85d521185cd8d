#!/bin/sh
# The board: which tasks the models solve, and what settings of the cache keep of the answers. Goes on where it stopped.
#
#   benchmarks/quality/board.sh quick            # one model, 1,024 tokens, two contexts: minutes
#   benchmarks/quality/board.sh tasks            # which tasks are solved, 25 contexts each
#   benchmarks/quality/board.sh default          # settings that a default could have, and the choice
#   benchmarks/quality/board.sh chosen stored evicting formats equal writing
#   benchmarks/quality/board.sh kvpress          # its own presses, after benchmarks/peers/kvpress_env.sh
#
# MODELS: names and places, "smollm2-135m=smollm2-135m qwen2.5-coder-0.5b=FOLDER". DTYPE: of the models; f32 where the
# CPU has no bf16. Each runs on one core.
set -eu
cd "$(dirname "$0")/../.."
BIN=${BIN:-.venv/bin}
DTYPE=${DTYPE:-bf16}
MODELS=${MODELS:-"smollm2-135m=smollm2-135m"}
OUT=${OUT:-out/board}
ROWS=${ROWS:-benchmarks/results}
export OMP_NUM_THREADS=1

# a script with the same options for each model
each() {
    script=$1
    shift
    for pair in $MODELS; do
        "$BIN/python" -W ignore "benchmarks/quality/$script" \
            --name "${pair%%=*}" --model "${pair#*=}" --dtype "$DTYPE" --out "$OUT" "$@"
    done
}

for part in "${@:-quick}"; do
    case $part in
    quick)
        to=$OUT/quick
        mkdir -p "$to"
        each board_tasks.py --out "$to" --contexts 2 --longest 1024 --families "facts in prose;chat facts" \
            --rows "$to/tasks.json"
        each board.py --out "$to" --contexts 2 --tasks "$to/tasks.json" --settings default --rows "$to/board.json"
        "$BIN/python" benchmarks/quality/default_choice.py --rows "$to/board.json" --out "$to/choice.json"
        ;;
    tasks) each board_tasks.py --rows "$ROWS/board-tasks.json" ;;
    default | chosen | stored | evicting | formats | equal | writing)
        each board.py --tasks "$ROWS/board-tasks.json" --settings "$part" --rows "$ROWS/board.json"
        "$BIN/python" benchmarks/quality/default_choice.py --rows "$ROWS/board.json" --out "$ROWS/default-choice.json"
        ;;
    kvpress) each board_peer.py --tasks "$ROWS/board-tasks.json" --rows "$ROWS/board.json" ;;
    *)
        echo "board.sh: $part is none of quick, tasks, default, chosen, stored, evicting, formats, equal, writing, kvpress" >&2
        exit 2
        ;;
    esac
done
