#!/usr/bin/env bash
# tritonserver for a GPU machine without a network, for stage "serve" of scripts/gpu_session.py (10 minutes, then 3)
#   scripts/gpu_prepare_triton.sh PREFIX      of a Python 3.12 with a libpython, such as pyenv's
# One archive, unpacked at /: that Python, where it was built to lie, for tritonserver embeds a libpython, and that machine's has perhaps none;
# and /tmp/gpu_session/triton, an environment of it with what serving needs and numpy 1. torch and the rest are that machine's own.
# In two parts, one for each of two calls: .lease/triton2 has what fits beside the tree, .lease/triton1 the rest, for a call before that one.
set -euo pipefail
cd "$(dirname "$0")/.."
prefix=$1
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
home=$root/tmp/gpu_session/triton
site=$home/lib/python3.12/site-packages
pinned() { grep -iE "^($1)==" constraints.txt; }

if ! ls .cache/numpy-*-cp312-*.whl > /dev/null 2>&1; then  # without BLAS, which nothing here needs: 5 MB less
    "$prefix/bin/python3.12" -m pip wheel -q --no-deps --no-binary numpy -w .cache "$(pinned numpy)" -Csetup-args=-Dblas= \
        -Csetup-args=-Dlapack= -Csetup-args=-Dallow-noblas=true -Csetup-args=-Dcpu-dispatch= -Csetup-args=-Ddisable-optimization=true
fi
"$prefix/bin/python3.12" -m venv --without-pip "$home"
wheels=$(pinned 'nvidia-pytriton|tritonclient|grpcio|protobuf|python-rapidjson|ml_dtypes|pydantic|pydantic_core|annotated-types|typing-inspection|llguidance')
platforms=$(for n in 2_35 2_31 2_28 2_24 2_17; do echo "--platform manylinux_${n}_x86_64"; done)
# shellcheck disable=SC2086
python3 -m pip install -q --no-deps --no-compile --only-binary=:all: --python-version 3.12 --implementation cp $platforms \
    --platform manylinux2014_x86_64 --platform linux_x86_64 --target "$site" $wheels .cache/numpy-*-cp312-*.whl
tar c -C / --exclude={__pycache__,site-packages,test,idlelib,tkinter,turtledemo,pydoc_data,ensurepip,lib2to3,'config-3.12*','_test*','_codecs_*'} \
    "${prefix#/}"/{lib/python3.12,lib/libpython3.12.so.1.0,bin/python3.12} | tar x -C "$root"

find "$site" -name tests -type d -prune -exec rm -r {} +
rm -r "$site"/pytriton/tritonserver/python_backend_stubs/3.{8,9,10,11,13} "$site"/nvidia_pytriton.libs/libpython3*
data=$(basename "$site"/nvidia_pytriton.libs/libicudata*)  # 29 MB of alphabets, for XML that nobody reads
echo 'char icudt70_dat[16];' | cc -shared -Wl,-soname,"$data" -o "$site/nvidia_pytriton.libs/$data" -xc -
find "$root" \( -name '*.so' -o -name '*.so.*' -o -name tritonserver -type f -o -name '*_stub' \) -print0 |
    xargs -0 strip --strip-unneeded

rm -rf .lease/triton .lease/triton1 .lease/triton2 && mkdir -p .lease/triton1 .lease/triton2
packed=.lease/triton1/triton.tar.xz
tar c -C "$root" --owner=0 --group=0 . | xz --x86 --lzma2=preset=9e,dict=64MiB > $packed
tree=$(git ls-files -z | xargs -0 stat -c %s | awk '{ all += $1 } END { print all }')
first=$(($(stat -c %s $packed) - 62 * 2**20 + tree)) # a call carries 64 MiB with the tree, 2 of them that nobody counted
first=$((first > 0 ? first : 1))
head -c $first $packed > $packed.00
tail -c +$((first + 1)) $packed > .lease/triton2/triton.tar.xz.01
rm $packed
du -k .lease/triton[12]
