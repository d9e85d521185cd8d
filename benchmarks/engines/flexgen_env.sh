#!/usr/bin/env bash
# Fetch FlexGen's code and what it imports into a folder of its own; nothing is compiled.
# Usage: benchmarks/engines/flexgen_env.sh [FOLDER]     then: millpond bench offload --flexgen FOLDER
# SOURCE: a clone of it, or where git fetches it.
set -euo pipefail
folder=${1:-build/flexgen}
python=${PYTHON:-python3}
source=${SOURCE:-https://github.com/FMInference/FlexLLMGen}
commit=004ffef
part=$(mktemp -d)
git clone --quiet "$source" "$part/code"
git -C "$part/code" checkout --quiet "$commit"
rm -rf "$folder"
mkdir -p "$folder"
mv "$part/code/flexllmgen" "$folder/"
rm -rf "$part"
"$python" -m pip install --quiet --no-deps --target "$folder/packages" attrs tqdm
echo "flexgen $commit in $folder"
