#!/usr/bin/env bash
# Make an environment for kvpress, which needs an older transformers than Millpond does.
# Usage: benchmarks/peers/kvpress_env.sh [FOLDER]     then: millpond bench generate --kvpress FOLDER/bin/python
set -euo pipefail
folder=${1:-build/kvpress}
python=${PYTHON:-python3}
"$python" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet "torch==2.13.0"
"$folder/bin/python" -m pip install --quiet kvpress "transformers<5.3"
"$folder/bin/python" -c "import kvpress, torch, transformers; print('torch', torch.__version__, 'transformers', transformers.__version__)"
