#!/bin/sh
# Tests on aarch64, emulated by qemu on another machine: Debian's Python and PyTorch's wheels in a folder of their own.
#   tools/test_aarch64.sh FOLDER [PYTEST ARGUMENTS]      DYNAMOTOR_ISA=neon or sve; QEMU_CPU=cortex-a72 has no SVE
# Needs root, debootstrap, g++-aarch64-linux-gnu and qemu-user 8 or newer, which binfmt_misc knows (Debian's qemu-user-binfmt).
# The C++ compiler in the folder is the cross compiler of this machine, since an emulated one takes twenty times as long.
set -eu
folder=$(realpath -m "${1:?usage: tools/test_aarch64.sh FOLDER [PYTEST ARGUMENTS]}"); shift
project=$(realpath "$(dirname "$0")/..")
root=$folder/root
export QEMU_CPU="${QEMU_CPU:-max}" DYNAMOTOR_ISA="${DYNAMOTOR_ISA:-neon}"
PYTHON=${PYTHON:-python3.11}
if ! test -e "$folder/.made"; then
    mkdir -p "$folder"
    debootstrap --arch=arm64 --variant=minbase --include=python3,libpython3.11-dev,libgomp1,libstdc++6 bookworm "$root"
    tags=$(seq -f "--platform manylinux_2_%g_aarch64" 17 39)
    # shellcheck disable=SC2086
    "$PYTHON" -m pip install -q --no-compile --target "$folder/site" --python-version 311 --implementation cp --abi cp311 --abi abi3 \
        --abi none $tags --only-binary=:all: torch==2.13.0 torchvision==0.28.0 timm==1.0.31 numpy transformers==5.23.0 pytest \
        hypothesis safetensors scikit-learn
    cp -d /usr/bin/aarch64-linux-gnu-* "$root/usr/bin"
    ln -sf aarch64-linux-gnu-g++ "$root/usr/bin/g++"
    mkdir -p "$root/lib64" "$root$project" "$root$folder/site"
    cp -d /lib64/ld-linux-x86-64.so.2 "$root/lib64"
    touch "$folder/.made"
fi
"aarch64-linux-gnu-gcc" -O2 -fvisibility=hidden -fPIC -shared -I"$root/usr/include/python3.11" -I"$root/usr/include" \
    "$project"/dynamotor/csrc/*.c "$project"/dynamotor/csrc/*.cpp -o "$project/dynamotor/_C.cpython-311-aarch64-linux-gnu.so" -lstdc++ -ldl
# Mounts of a name space of their own: they end with the tests.
exec unshare --mount sh -c '
    root=$1 folder=$2 project=$3; shift 3
    for shared in /usr/lib/x86_64-linux-gnu /usr/lib/gcc-cross /usr/aarch64-linux-gnu /proc /sys /dev /tmp "$project" "$folder/site"; do
        mkdir -p "$root$shared" && mount --rbind "$shared" "$root$shared"
    done
    exec chroot "$root" env PYTHONPATH="$project:$folder/site" OMP_NUM_THREADS=1 sh -c "cd \"\$0\" && exec python3 -m pytest \"\$@\"" "$project" "$@"
' sh "$root" "$folder" "$project" -p no:cacheprovider "$@"
