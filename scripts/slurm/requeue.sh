#!/usr/bin/env bash
# Decides whether a job is requeued after its training ended. Prints the reason; exit code 0 if it is, 1 if not.
#
#     requeue.sh RUN_DIR begin               before the training: records the run's last save
#     requeue.sh RUN_DIR end STOPPING        after it. STOPPING: 1 if Slurm asked the job to stop, otherwise 0
#
# RUN_ID identifies this start; the run writes it to state.json. A run that was stopped is requeued, except by the file
# STOP. A run that crashed or hung is requeued if it has saved a checkpoint since the start, and without one at most
# three times in a row. A run that is finished, was refused, diverged or computes wrong numbers is not, because the same
# would happen again. File times do not matter: hosts and disks have clocks of their own.

set -uo pipefail

run_dir="$1"
mark="$run_dir/.slurm_start" # the save index when this start began, and the number of crashes in a row

# The value of a key of state.json; a number is 0 if there is none.
text() { sed -n "s/^ *\"$1\": \"\\(.*\\)\",\{0,1\}$/\\1/p" "$run_dir/state.json" 2>/dev/null; }
number() {
    local value
    value="$(sed -n "s/^ *\"$1\": \\([0-9]*\\),\{0,1\}$/\\1/p" "$run_dir/state.json" 2>/dev/null)"
    echo "${value:-0}"
}

index=0 failures=0
[ -f "$mark" ] && read -r index failures <"$mark"
failures="${failures:-$index}" # earlier versions wrote only this

if [ "$2" = begin ]; then
    mkdir -p "$run_dir" && echo "$(number save_index) $failures" >"$mark"
    exit
fi

how="" reason=""
if [ "$(text start)" = "$RUN_ID" ]; then how="$(text state)" reason="$(text reason)"; fi
case "$how" in
finished | refused | diverged | wrong_numbers)
    echo "the run is $how: not requeued. $reason"
    exit 1
    ;;
stopped)
    if [ "$reason" = "the file STOP" ]; then
        echo "stopped by the file STOP: not requeued"
        exit 1
    fi
    ;;
esac

name=none
[ "$(number checkpoint)" = 0 ] || printf -v name 'step_%08d' "$(number checkpoint)"
if [ "$how" = stopped ] || [ "$3" = 1 ]; then
    echo "$index 0" >"$mark"
    echo "stopped on request, the newest checkpoint is $name: requeued"
elif [ "$(number save_index)" -gt "$index" ]; then
    echo "$index 0" >"$mark"
    echo "crashed (${how:-before it held run.dir}), but had saved $name: requeued"
elif [ "$failures" -lt 3 ]; then
    echo "$index $((failures + 1))" >"$mark"
    echo "crashed (${how:-before it held run.dir}) without a new checkpoint, the $((failures + 1)). time in a row of at most 3: requeued"
else
    echo "$index 0" >"$mark"
    echo "crashed (${how:-before it held run.dir}) for the fourth time in a row without a new checkpoint: not requeued"
    exit 1
fi
