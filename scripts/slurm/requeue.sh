#!/usr/bin/env bash
# Whether a job whose training has ended goes back into the queue: says why on stdout; exit code 0 if it does, 1 if not.
#
#     requeue.sh RUN_DIR begin               before the training: remembers when this start began
#     requeue.sh RUN_DIR end STOPPING        after it. STOPPING: 1 if Slurm asked the job to stop, else 0
#
# A run that was stopped goes on, unless by the file STOP. One that crashed does too, as long as the newest checkpoint
# has got newer since the start, or not more than three times in a row without that. One that is finished, was refused,
# diverged or computes wrong numbers does not: the same would happen again.

set -uo pipefail

run_dir="$1"
mark="$run_dir/.slurm_start" # its time: when this start began; its text: the checkpoint then, and starts without a newer one

# The step of the newest checkpoint, 0 if there is none.
newest() {
    local newest=0 folder step
    for folder in "$run_dir"/checkpoints/step_*/; do
        step="$(basename "$folder")"
        step="${step#step_}"
        if [[ "$step" =~ ^[0-9]+$ ]] && [ -f "$folder/manifest.json" ] && [ "$((10#$step))" -gt "$newest" ]; then
            newest="$((10#$step))"
        fi
    done
    echo "$newest"
}

# A key of state.json, if this start wrote it.
state() {
    if [ "$run_dir/state.json" -nt "$mark" ]; then
        sed -n "s/^ *\"$1\": \"\\(.*\\)\",\{0,1\}$/\\1/p" "$run_dir/state.json"
    fi
}

failures=0
[ -f "$mark" ] && read -r before failures <"$mark"

if [ "$2" = begin ]; then
    mkdir -p "$run_dir" && echo "$(newest) $failures" >"$mark"
    exit
fi

how="$(state state)"
case "$how" in
finished | refused | diverged | wrong_numbers)
    echo "the run is $how: not requeued. $(state reason)"
    exit 1
    ;;
stopped)
    if [ "$(state reason)" = "the file STOP" ]; then
        echo "stopped by the file STOP: not requeued"
        exit 1
    fi
    ;;
esac

now="$(newest)"
if [ "$how" = stopped ] || [ "$3" = 1 ]; then
    echo "$now 0" >"$mark"
    echo "stopped on request, the newest checkpoint is of step $now: requeued"
elif [ "$now" -gt "$before" ]; then
    echo "$now 0" >"$mark"
    echo "crashed (${how:-before it held run.dir}), but the newest checkpoint rose from step $before to $now: requeued"
elif [ "$failures" -lt 3 ]; then
    echo "$now $((failures + 1))" >"$mark"
    echo "crashed (${how:-before it held run.dir}) without a new checkpoint, the $((failures + 1)). time in a row of at most 3: requeued"
else
    echo "$now 0" >"$mark"
    echo "crashed (${how:-before it held run.dir}) for the fourth time in a row without a new checkpoint: not requeued"
    exit 1
fi
