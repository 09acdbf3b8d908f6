#!/usr/bin/env bash
# Decides whether a job is requeued after its training ended. Prints the reason; exit code 0 if it is, 1 if not.
#
#     requeue.sh RUN_DIR begin               before the training: records when this start began
#     requeue.sh RUN_DIR end STOPPING        after it. STOPPING: 1 if Slurm asked the job to stop, otherwise 0
#
# A run that was stopped is requeued, except by the file STOP. A run that crashed or hung is requeued if it has saved a
# checkpoint since the start, and without one at most three times in a row. A run that is finished, was refused,
# diverged or computes wrong numbers is not, because the same would happen again.

set -uo pipefail

run_dir="$1"
mark="$run_dir/.slurm_start" # its time is the begin of this start; its text is the number of crashes in a row

# The manifest of the checkpoint that was saved last; empty if there is none. This is not always the highest step: if
# the newest checkpoints are damaged, a run goes back and saves lower steps again.
newest() {
    local newest="" folder
    for folder in "$run_dir"/checkpoints/step_*/; do
        if [[ "$(basename "$folder")" =~ ^step_[0-9]+$ ]] && [ "${folder}manifest.json" -nt "$newest" ]; then
            newest="${folder}manifest.json"
        fi
    done
    echo "$newest"
}

# The value of a key of state.json, if this start wrote the file.
state() {
    if [ "$run_dir/state.json" -nt "$mark" ]; then
        sed -n "s/^ *\"$1\": \"\\(.*\\)\",\{0,1\}$/\\1/p" "$run_dir/state.json"
    fi
}

failures=0
[ -f "$mark" ] && read -r failures <"$mark"
failures="${failures##* }" # earlier versions wrote a step before it

if [ "$2" = begin ]; then
    mkdir -p "$run_dir" && echo "$failures" >"$mark"
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

last="$(newest)"
name=none
[ -n "$last" ] && name="$(basename "$(dirname "$last")")"
if [ "$how" = stopped ] || [ "$3" = 1 ]; then
    echo 0 >"$mark"
    echo "stopped on request, the newest checkpoint is $name: requeued"
elif [ "$last" -nt "$mark" ]; then
    echo 0 >"$mark"
    echo "crashed (${how:-before it held run.dir}), but had saved $name: requeued"
elif [ "$failures" -lt 3 ]; then
    echo "$((failures + 1))" >"$mark"
    echo "crashed (${how:-before it held run.dir}) without a new checkpoint, the $((failures + 1)). time in a row of at most 3: requeued"
else
    echo 0 >"$mark"
    echo "crashed (${how:-before it held run.dir}) for the fourth time in a row without a new checkpoint: not requeued"
    exit 1
fi
