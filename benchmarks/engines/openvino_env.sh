#!/usr/bin/env bash
# Make an environment for OpenVINO GenAI, with what converts a model for it.
# Usage: benchmarks/engines/openvino_env.sh [FOLDER]     then: millpond bench engines --openvino FOLDER/bin/python
set -euo pipefail
folder=${1:-build/openvino}
python=${PYTHON:-python3}
"$python" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet "torch==2.13.0"
"$folder/bin/python" -m pip install --quiet "torch==2.13.0" openvino-genai "optimum-intel[openvino]"
"$folder/bin/python" -m pip uninstall --quiet --yes torchvision  # of another build than torch; nothing here needs it
"$folder/bin/python" -c "import openvino_genai; print('openvino-genai', openvino_genai.__version__)"
