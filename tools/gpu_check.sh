#!/bin/sh
# Builds the C extension for this machine's Python and runs one of the GPU's tools; docs/gpu.md has the commands and their order.
#   tools/gpu_check.sh check  --json OUT.json                     kernels, dropout, CUDA graphs, reduced models: are they right?
#   tools/gpu_check.sh bench  --json OUT.json --modes train       the figures beside eager and torch.compile
#   tools/gpu_check.sh opinfo --json OUT.json --budget 500        PyTorch's operator database
set -e
cd "$(dirname "$0")/.."
tool=$1
shift
python=${PYTHON:-python3}
export DYNAMOTOR_CACHE_DIR=${DYNAMOTOR_CACHE_DIR:-$(mktemp -d)} HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
include=$($python -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
suffix=$($python -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
${CC:-gcc} -shared -fPIC -O2 -fvisibility=hidden -I"$include" dynamotor/csrc/*.c dynamotor/csrc/*.cpp -lstdc++ -ldl -o "dynamotor/_C.$$"
mv "dynamotor/_C.$$" "dynamotor/_C$suffix"  # in one step: another process may have it open
exec $python -X faulthandler -m "bench.gpu_$tool" "$@"
