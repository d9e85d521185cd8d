#!/usr/bin/env bash
# Build llama.cpp's own server (`llama-server`: slots, continuous batching, prefix reuse) for this machine's processor.
# The sources come with the package llama-cpp-python; the server in that package itself answers one request at a time.
# Usage: benchmarks/engines/llamacpp_server.sh [FOLDER]     then: benchmarks/engines/serve.py --llama FOLDER/bin/llama-server
# About half an hour on two cores; JOBS=2 compiles two files at once.
set -euo pipefail
folder=${1:-build/llama-server}
version=${LLAMA_CPP_PYTHON:-0.3.36}
python=${PYTHON:-python3}
mkdir -p "$folder/source"
if [ ! -d "$folder/source/llama_cpp_python-$version" ]; then
    "$python" -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest "$folder/source" \
        "llama-cpp-python==$version"
    tar -xzf "$folder/source/llama_cpp_python-$version.tar.gz" -C "$folder/source"
fi
cmake -S "$folder/source/llama_cpp_python-$version/vendor/llama.cpp" -B "$folder" -DCMAKE_BUILD_TYPE=Release \
    -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_COMMON=ON -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=ON \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF \
    -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
cmake --build "$folder" --target llama-server llama-quantize -j "${JOBS:-1}"
"$folder/bin/llama-server" --version
