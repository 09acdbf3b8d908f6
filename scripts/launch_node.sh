#!/usr/bin/env bash
# Runs the training processes of one node under a scheduler: one torchrun, and this shell, which forwards requests to
# stop. scripts/slurm/pretrain.sbatch and scripts/kubernetes/jobset.yaml run it on every node, from the root of this
# project:
#
#     launch_node.sh preflight FOLDER      creates a file with this node's name in FOLDER if its GPUs work
#     launch_node.sh check OVERRIDES...    only `pretrain.py --check`, for the number of processes of all nodes
#     launch_node.sh train OVERRIDES...    exit code: pretrain.py's, if run.dir/state.json has it, otherwise torchrun's
#
# Environment variables; the defaults come from Slurm's variables:
#     NNODES, MASTER_ADDR, MASTER_PORT, RUN_ID    the number of torchruns, and their rendezvous
#     PROCESSES_PER_NODE    default: the GPUs of the job step on this node, or else all that nvidia-smi lists; required
#                           to train on CPUs
#     NUMA_BINDING          torchrun's --numa-binding (node, socket, exclusive, core-complex): binds each rank to CPU
#                           cores near its GPU. Default: no binding; Slurm's step has all cores of the node
#     OMP_NUM_THREADS       default: the cores of this node divided by its processes, at most 8
#     PYTHON                default: the first of .venv/bin/python, python and python3 that exists
#     WANDB_API_KEY_FILE, HF_TOKEN_FILE    files with these secrets; other users could read them in arguments
#
# TERM, USR1 and USR2 ask the workers, once, to save a checkpoint and end. torchrun must not get them: USR1 and USR2
# would kill it, and after TERM it gives its workers 30 seconds, too few for a large checkpoint. Some schedulers signal
# every process of a job, torchrun included (Slurm with ProctrackType=linuxproc), others only this shell.

set -uo pipefail

action="${1:?launch_node.sh: preflight, check or train}"
shift
fail() {
    echo "launch_node.sh: $1" >&2
    exit 2
}

python="${PYTHON:-}"
for candidate in "$PWD/.venv/bin/python" python python3; do
    [ -n "$python" ] || python="$(command -v "$candidate")"
done
[ -n "$python" ] || fail "there is no Python: run make setup here, or set PYTHON"
[ -f pretrain.py ] || fail "there is no pretrain.py in $PWD: start in the root of this project"

for name in WANDB_API_KEY HF_TOKEN; do
    file="${name}_FILE"
    [ -n "${!file:-}" ] || continue
    [ -r "${!file}" ] || fail "$file=${!file} cannot be read"
    export "$name=$(<"${!file}")"
done

nodes="${NNODES:-${SLURM_NNODES:-1}}"
# SLURM_GPUS_ON_NODE is the requested number in a job step, but all GPUs in the batch script of an --exclusive job.
processes="${PROCESSES_PER_NODE:-${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}}"
[ -n "$processes" ] || processes="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')"
[ "$processes" != 0 ] || fail "this job has no GPU on $(hostname): ask for some, or set PROCESSES_PER_NODE to train on CPUs"
[[ "$nodes$processes" =~ ^[0-9]+$ ]] || fail "NNODES=$nodes or PROCESSES_PER_NODE=$processes is not a number"

# An all-reduce with a known result between the GPUs of this node.
all_reduce='
import os, torch, torch.distributed as dist
rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
total = torch.full((1 << 24,), rank + 1.0, device="cuda")
dist.all_reduce(total)
assert bool((total == size * (size + 1) / 2).all()), "the GPUs of this node add up wrongly"
dist.destroy_process_group()'
if [ "$action" = preflight ]; then
    if command -v dcgmi >/dev/null; then timeout 300 dcgmi diag -r 1 || fail "dcgmi diag fails on $(hostname)"; fi
    timeout 300 "$python" -m torch.distributed.run --standalone --nproc-per-node "$processes" --no-python \
        "$python" -c "$all_reduce" || fail "an all-reduce fails on $(hostname)"
    timeout 600 "$python" scripts/prove_backend.py --precision nvfp4 || fail "prove_backend.py fails on $(hostname)"
    touch "$1/${SLURMD_NODENAME:-$(hostname)}"
    exit
fi

if [ "$action" = check ]; then
    WORLD_SIZE=$((nodes * processes)) exec "$python" pretrain.py --check "$@"
fi

run_dir=""
for override in "$@"; do
    case "$override" in run.dir=*) run_dir="${override#run.dir=}" ;; esac
done
if [ -z "${OMP_NUM_THREADS:-}" ]; then
    threads=$(($(nproc) / processes))
    export OMP_NUM_THREADS=$((threads > 8 ? 8 : threads < 1 ? 1 : threads))
fi

# Sends USR1 to torchrun's workers that handle it already; fails if none does. One is enough: in the next step it tells
# all ranks on all nodes.
ask_workers() {
    local status pid key value parent caught asked=1
    for status in /proc/[0-9]*/status; do
        pid="${status//[^0-9]/}" parent="" caught=0
        while read -r key value _; do
            case "$key" in
            PPid:) parent="$value" ;;
            SigCgt:) caught="$value" ;;
            esac
        done 2>/dev/null <"$status"
        # Bit 9 of the mask is signal 10, SIGUSR1.
        if [ "$parent" = "$launcher" ] && ((16#$caught & 16#200)) && kill -USR1 "$pid"; then asked=0; fi
    done
    return "$asked"
}

before="$(cat "$run_dir/state.json" 2>/dev/null)"
asked=no
trap 'if [ "$asked" = no ]; then asked=now; fi' TERM USR1 USR2
(
    trap "" TERM USR1 USR2 # torchrun inherits this; the workers install their own handlers
    exec setsid "$python" -m torch.distributed.run --nnodes "$nodes" --nproc-per-node "$processes" \
        ${NUMA_BINDING:+--numa-binding "$NUMA_BINDING"} \
        --rdzv-backend c10d --rdzv-endpoint "${MASTER_ADDR:-localhost}:${MASTER_PORT:-29400}" \
        --rdzv-id "${RUN_ID:-${SLURM_JOB_ID:-0}-${SLURM_RESTART_COUNT:-0}}" \
        --signals-to-handle SIGINT,SIGHUP,SIGQUIT pretrain.py "$@"
) &
launcher=$!
while kill -0 "$launcher" 2>/dev/null; do
    # Only once: after a second request within seconds they end without saving.
    if [ "$asked" = now ] && ask_workers; then asked=told; fi
    (trap "" TERM USR1 USR2 && exec sleep 1)
done
wait "$launcher"
code=$?

# torchrun turns every exit code of its workers into 1.
after="$(cat "$run_dir/state.json" 2>/dev/null)"
if [ "$code" != 0 ] && [ "$after" != "$before" ]; then
    case "$(sed -n 's/^ *"state": "\(.*\)",\{0,1\}$/\1/p' <<<"$after")" in
    refused) code=2 ;;
    diverged) code=3 ;;
    wrong_numbers) code=4 ;;
    hung) code=5 ;;
    stopped) code=75 ;;
    esac
fi
exit "$code"
