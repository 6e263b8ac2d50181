#!/bin/sh
# Builds the C extension, then checks and measures on the GPU of this machine: one short call, one JSON file.
#   tools/gpu_check.sh OUT.json [sections [more options]]    sections: kernels,dropout,models,graphs,bandwidth,overhead,bench (all)
# The operator database is a run of its own: python -m dynamotor.tools.gpu_opinfo --json docs/results/gpu-opinfo.json
set -e
cd "$(dirname "$0")/.."
out=${1:-gpu-check.json}
sections=${2:-kernels,dropout,models,graphs,bandwidth,overhead,bench}
python=${PYTHON:-python3}
export DYNAMOTOR_CACHE_DIR=${DYNAMOTOR_CACHE_DIR:-$(mktemp -d)} HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
include=$($python -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
suffix=$($python -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
${CC:-gcc} -shared -fPIC -O2 -std=gnu11 -fvisibility=hidden -I"$include" dynamotor/csrc/*.c -ldl -o "dynamotor/_C$suffix"
if [ $# -gt 2 ]; then shift 2; else set --; fi
$python -X faulthandler -m dynamotor.tools.gpu_check --json "$out" --sections "$sections" "$@"
