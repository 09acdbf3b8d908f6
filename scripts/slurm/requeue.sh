#!/usr/bin/env bash
# Whether a job whose training has ended goes back into the queue: says why on stdout; exit code 0 if it does, 1 if not.
#
#     requeue.sh RUN_DIR begin               before the training: remembers when this start began
#     requeue.sh RUN_DIR end STOPPING        after it. STOPPING: 1 if Slurm asked the job to stop, else 0
#
# A run that was stopped resumes, unless by the file STOP. One that crashed or hung does too, as long as it has saved a
# checkpoint since the start, or not more than three times in a row without that. One that is finished, was refused,
# diverged or computes wrong numbers does not: the same would happen again.

set -uo pipefail

run_dir="$1"
mark="$run_dir/.slurm_start" # its time: when this start began; its text: crashes in a row without a new checkpoint

# The manifest of the checkpoint that was saved last, nothing if there is none. Not of the highest step: a run goes back
# where the newest ones are damaged, and what it then saves is of lower steps than what was moved aside.
newest() {
    local newest="" folder
    for folder in "$run_dir"/checkpoints/step_*/; do
        if [[ "$(basename "$folder")" =~ ^step_[0-9]+$ ]] && [ "${folder}manifest.json" -nt "$newest" ]; then
            newest="${folder}manifest.json"
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
[ -f "$mark" ] && read -r failures <"$mark"
failures="${failures##* }" # earlier versions had a step before it

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
