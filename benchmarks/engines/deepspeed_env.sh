#!/usr/bin/env bash
# Install DeepSpeed for this Python's torch into a folder of its own, and compile its operators: about five minutes on
# two cores. Without a system's libaio, its package is unpacked into the folder where apt-get can fetch it, with no
# rights of root; otherwise weights in files (deepspeed-nvme) fail with that reason.
# Usage: benchmarks/engines/deepspeed_env.sh [FOLDER]     then: millpond bench offload --deepspeed FOLDER
set -euo pipefail
folder=${1:-build/deepspeed}
python=${PYTHON:-python3}
export DS_BUILD_OPS=0 DS_ACCELERATOR=cpu
"$python" -m pip install --quiet --no-deps --no-build-isolation --upgrade --target "$folder" \
    "deepspeed==0.19.*" einops hjson msgpack ninja packaging psutil py-cpuinfo tqdm
folder=$(cd "$folder" && pwd)
if ! echo '#include <libaio.h>' | "${CXX:-c++}" -E -x c++ - >/dev/null 2>&1 &&
    command -v apt-get >/dev/null && command -v dpkg >/dev/null; then
    part=$(mktemp -d)
    if (cd "$part" && { apt-get download libaio-dev libaio1t64 || apt-get download libaio-dev libaio1; }) >/dev/null 2>&1
    then
        for package in "$part"/*.deb; do dpkg -x "$package" "$part/root"; done
        rm -rf "$folder/libaio"
        mkdir -p "$folder/libaio/include" "$folder/libaio/lib"
        cp "$part/root/usr/include/libaio.h" "$folder/libaio/include/"
        find "$part/root" -name 'libaio.so.1*' -type f -exec cp {} "$folder/libaio/lib/libaio.so.1" \;
        ln -s libaio.so.1 "$folder/libaio/lib/libaio.so"
    else
        echo "no libaio: weights in files will fail; install libaio-dev and run this again" >&2
    fi
    rm -rf "$part"
fi
export TORCH_EXTENSIONS_DIR="$folder/operators" PATH="$folder/bin:$PATH" PYTHONPATH="$folder"
if [ -d "$folder/libaio" ]; then
    export CPATH="$folder/libaio/include" LIBRARY_PATH="$folder/libaio/lib" LD_LIBRARY_PATH="$folder/libaio/lib"
fi
"$python" - <<'EOF'
import deepspeed
from deepspeed.ops.op_builder import AsyncIOBuilder, ShareMemCommBuilder

ShareMemCommBuilder().load()
if AsyncIOBuilder().is_compatible():
    AsyncIOBuilder().load()
print("deepspeed", deepspeed.__version__, "reads files:", AsyncIOBuilder().is_compatible())
EOF
