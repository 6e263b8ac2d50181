#!/bin/sh
# Measures the bridge to XLA on the GPU of this machine: the ten models' training (or inference) in every way, one short call.
#   tools/xla_check.sh OUT.json [phase [models]]          phase: train (default) or infer; models: names, or seed (default)
# XLA tunes convolutions for minutes. So each model is compiled by a process of its own first, all at once, into jax's cache on disk;
# the process that measures finds everything there. Products go to cuBLAS: tuning Triton's for them takes longer than all the rest.
set -e
cd "$(dirname "$0")/.."
out=${1:-xla-gpu.json}
phase=${2:-train}
models=${3:-resnet18,resnet50,resnext50_32x4d,alexnet,mobilenet_v2,mnasnet1_0,vgg16,squeezenet1_1,BERT_pytorch,timm_vision_transformer}
python=${PYTHON:-python3}
$python setup.py -q build_ext --inplace
export PYTHONPATH="$PWD:$PWD/xla" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$(mktemp -d)} JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
export XLA_FLAGS="${XLA_FLAGS:---xla_gpu_enable_triton_gemm=false}"
bench() { "$@" $python -m dynamotor bench --xla --precision high --phase "$phase" $options; }
scratch=$(mktemp -d)
for model in $(echo "$models" | tr , ' '); do
    options="--models $model --seconds 0 --json $scratch/$model.json"
    bench env XLA_PYTHON_CLIENT_PREALLOCATE=false timeout "${COMPILE_LIMIT:-300}" > "$scratch/$model.log" 2>&1 &
done
wait
cat "$scratch"/*.log
options="--models $models --seconds ${SECONDS_EACH:-5} --json $out"
bench env
