#!/usr/bin/env bash
# The commands on the device that is here: an engine of a bundled checkpoint is built, looked into, asked, and measured with its tokens
# compared; then one of real dimensions without weights. Lines that say what came out begin with "|".
#   [ARCH=cpu] [GPU_ENGINES=FOLDER] PYTHONPATH=. bash scripts/gpu_commands.sh
set -euo pipefail
arch=${ARCH:-$(python3 -c 'from hemiola.runtime.arch import arch_here; print(arch_here())')}
engine=${GPU_ENGINES:-$(mktemp -d)}/commands-$arch
run() {
    echo "\$ $*"
    python3 -m "$@" || { echo "| $1 $2 | failed |"; exit 1; }
    echo "| $1 $2 | passed |"
}
[ -e "$engine/manifest.json" ] ||
    run hemiola.builder demo/qwen3.5-code --engine-dir "$engine" --arch "$arch" --max-len 1024 --max-rows 8
run hemiola.runtime inspect --engine-dir "$engine"
run hemiola.runtime generate --engine-dir "$engine" --prompt "def " --max-tokens 40 --temperature 0
run hemiola.runtime bench --engine-dir "$engine" --num-requests 24 --input-len 200 --output-len 40 --check \
    --compare drafts=ngram --compare drafts=none
run hemiola.runtime bench --random-weights "${CONFIG:-benchmarks/configs/qwen3.5-0.8b}" --num-requests 16 \
    --input-len 500 --output-len 40 --max-rows 8 --max-len 1024 --check
