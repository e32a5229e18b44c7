#!/usr/bin/env bash
# What a GPU machine without a network needs for scripts/gpu_session.py, into .lease/ (which git ignores):
#   scripts/gpu_prepare.sh [VLLM_PEER_FOLDER]
# base/: wheels that its Python 3.12 lacks, and the commit's name; sanitizer/: a compute-sanitizer that knows
# Hopper's warp groups, 18 MB. With a folder that holds vLLM's make_bundle.sh (10 minutes): vllm1/ and vllm2/,
# one for each of two calls, since a call carries 64 MiB with the tree: the first has what room is left beside
# base/ and compiled/ (compiled.tar.xz, Triton's cache, which a session that ran the stage "compiled" brought
# back: put it there before).
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf .lease/base .lease/sanitizer && mkdir -p .lease/base/whl
wheels=$(grep -iE '^(pydantic|pydantic_core|annotated-types|typing-inspection|llguidance)==' constraints.txt)
platforms=$(for n in 2_31 2_28 2_17; do echo "--platform manylinux_${n}_x86_64"; done)
# shellcheck disable=SC2086
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp $platforms \
    --platform manylinux2014_x86_64 -d .lease/base/whl $wheels
python3 -m pip download -q --no-deps --only-binary=:all: --platform manylinux_2_25_x86_64 -d .lease/sanitizer \
    nvidia-cuda-sanitizer-api==13.5.25
git describe --always --dirty > .lease/base/commit
bytes() { { find "$1" -type f -exec cat {} + 2> /dev/null || true; } | wc -c; }
tree=$(git ls-files -z | xargs -0 stat -c %s | awk '{ all += $1 } END { print all }')
room=$((62 * 2**20 - tree)) # of a call, and 2 MiB for what nobody counted: names, ends of blocks
if [ $# -gt 0 ]; then
    rm -rf .lease/vllm .lease/vllm1 .lease/vllm2
    bash "$1/make_bundle.sh" .lease/vllm
    site=.lease/vllm/site.tar.xz
    whole=$(bytes $site)
    first=$((room - $(bytes .lease/base) - $(bytes .lease/compiled) - $(bytes .lease/vllm) + whole))
    [ $first -gt 0 ] || { echo "beside .lease/base and .lease/compiled there is no room for vLLM" >&2; exit 1; }
    first=$((first < whole ? first : whole - 1))
    mkdir .lease/vllm2
    head -c $first $site > $site.00
    tail -c +$((first + 1)) $site > .lease/vllm2/site.tar.xz.01
    rm $site
    mv .lease/vllm .lease/vllm1
fi
du -sm .lease/*
for part in vllm2 triton2; do
    [ "$(bytes .lease/$part)" -le $room ] || echo ".lease/$part and the tree are more than the 64 MiB of a call" >&2
done
