#!/usr/bin/env bash
# Make an environment for llama.cpp, built for this machine's processor: about ten minutes on two cores.
# Usage: benchmarks/engines/llamacpp_env.sh [FOLDER]     then: millpond bench engines --llamacpp FOLDER/bin/python
set -euo pipefail
folder=${1:-build/llamacpp}
python=${PYTHON:-python3}
"$python" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet gguf
export CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF ${CMAKE_ARGS:-}"
"$folder/bin/python" -m pip install --quiet --no-binary llama-cpp-python llama-cpp-python
"$folder/bin/python" -c "import llama_cpp; print('llama-cpp-python', llama_cpp.__version__)"
