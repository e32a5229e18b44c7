#!/usr/bin/env bash
# What a GPU machine without a network needs for scripts/gpu_session.py, into .lease/ (which git ignores):
#   scripts/gpu_prepare.sh [VLLM_PEER_FOLDER]
# base/: wheels that its Python 3.12 lacks, and the commit's name; sanitizer/: a compute-sanitizer that knows
# Hopper's warp groups, 18 MB. With a folder that holds vLLM's make_bundle.sh (10 minutes): vllm1/ and vllm2/,
# 17 MB and the rest, one for each of two calls, since a call carries 64 MiB; the first has room for compiled/
# beside them: compiled.tar.xz, Triton's cache, from the logs.tar.gz of a session that ran the stage "compiled".
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
if [ $# -gt 0 ]; then
    rm -rf .lease/vllm .lease/vllm1 .lease/vllm2
    bash "$1/make_bundle.sh" .lease/vllm
    mkdir .lease/vllm2
    head -c 17M .lease/vllm/site.tar.xz > .lease/vllm/site.tar.xz.00
    tail -c +$((17 * 2**20 + 1)) .lease/vllm/site.tar.xz > .lease/vllm/site.tar.xz.01
    rm .lease/vllm/site.tar.xz
    mv .lease/vllm/site.tar.xz.01 .lease/vllm2/
    mv .lease/vllm .lease/vllm1
fi
du -sm .lease/*
