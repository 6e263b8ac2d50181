#!/bin/sh
# Data-parallel training on the GPUs of this machine in one short call: builds the C extension, runs the correctness matrix over
# NCCL, then the bench with all modes interleaved. Everything is written as it becomes known, and it ends within the budget.
#   tools/ddp_check.sh OUT_DIR [--budget 515] [--device cuda|cpu] [--tiny] [--models A,B] [--world 2] [--batch 32] [--cases A,B]
# OUT_DIR gets matrix.json, ddp.json (times), ddp-overlap.json and .svg (communication beside computation), table.txt, log.txt
cd "$(dirname "$0")/.." || exit 1
out=${1:?usage: tools/ddp_check.sh OUT_DIR [options]}; shift
budget=515 device=cuda tiny="" models=resnet50,BertForMaskedLM,GPT2LMHeadModel world=2 batch=32 cases="" amp=bf16 rounds=40
modes=eager,ingraph,inductor,split,off
while [ $# -gt 0 ]; do
    case $1 in
        --tiny) tiny=--small batch=2 rounds=3 models=mlp modes=eager,ingraph,split amp=none ;;
        --budget) budget=$2; shift ;;   --device) device=$2; shift ;; --models) models=$2; shift ;; --world) world=$2; shift ;;
        --batch) batch=$2; shift ;;     --cases) cases=$2; shift ;;   --modes) modes=$2; shift ;;   --rounds) rounds=$2; shift ;;
        *) echo "unknown option $1" >&2; exit 2 ;;
    esac
    shift
done
begin=$(date +%s)
python=${PYTHON:-python3}
mkdir -p "$out"
# NVLink multicast stays off: it can put GPUs that others share out of service.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export DYNAMOTOR_CACHE_DIR=${DYNAMOTOR_CACHE_DIR:-$(mktemp -d)} HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
include=$($python -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
suffix=$($python -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
if [ ! -e "dynamotor/_C$suffix" ] || [ "$device" = cuda ]; then
    ${CC:-gcc} -shared -fPIC -O2 -fvisibility=hidden -I"$include" dynamotor/csrc/*.c dynamotor/csrc/*.cpp -lstdc++ -ldl -o "dynamotor/_C.$$" &&
        mv "dynamotor/_C.$$" "dynamotor/_C$suffix" || exit 1  # in one step: another process may have it open
fi
run() {  # seconds, command: killed when it does not end by itself
    seconds=$1; shift
    timeout -k 5 "$seconds" "$@" >>"$out/log.txt" 2>&1
}
echo "matrix" && run $((budget / 4 + 45)) $python -X faulthandler tools/ddp_matrix.py "$out/matrix.json" --device "$device" \
    --budget $((budget / 4)) --cases "$cases"
matrix=$?
tail -n 1 "$out/log.txt"
left=$((budget - $(date +%s) + begin))
echo "bench, $left s left" && run "$left" $python -m dynamotor bench --ddp --models "$models" --device "$device" --amp "$amp" \
    --batch "$batch" $tiny --world "$world" --modes "$modes" --rounds "$rounds" --timeout "$left" --budget $((left - 15)) \
    --json "$out/ddp.json" --overlap "$out/ddp-overlap"
bench=$?
$python -m bench.ddp "$out/ddp.json" | tee "$out/table.txt"
echo "matrix $matrix, bench $bench, $(($(date +%s) - begin)) s"
[ $matrix -eq 0 ] && [ $bench -eq 0 ]
