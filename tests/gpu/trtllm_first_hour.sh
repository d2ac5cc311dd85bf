#!/usr/bin/env bash
# Answers what the target on TensorRT-LLM takes from documents, on a real node: pass or fail for each.
#
#   tests/gpu/trtllm_first_hour.sh ENGINE [ENGINE16]
#
# ENGINE is the directory of a built target engine (`saguaro build llama-3.1-8b-h100`, or one with tp 4). ENGINE16, if
# given, is the same with tokens_per_block 16, to compare the time of a round. Runs inside the image of docs/deployment,
# with the package installed. Prints everything to the terminal and to first_hour.log; exit status 1 if a check failed.
set -uo pipefail

engine=${1:?usage: $0 ENGINE [ENGINE16]}
engine16=${2:-}
here=$(dirname "$0")
python=${PYTHON:-python3}
mpirun=${MPIRUN:-mpirun}
log=first_hour.log
failed=0
: >"$log"

[ -f "$engine/config.json" ] || { echo "$engine holds no engine: run saguaro build first" >&2; exit 2; }
tp=$("$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["pretrained_config"]["mapping"]["tp_size"])' \
    "$engine/config.json") || exit 2
options=()
[ "$(id -u)" = 0 ] && "$mpirun" --version 2>/dev/null | grep -qi "open mpi\|openrte" && options=(--allow-run-as-root)

step() { # title, limit in seconds, command
    local title=$1 limit=$2
    shift 2
    printf '\n== %s\n' "$title" | tee -a "$log"
    timeout --kill-after=20 "$limit" "$@" 2>&1 | tee -a "$log"
    local status=${PIPESTATUS[0]}
    case $status in
        0) ;;
        124 | 137) echo "FAIL  $title: not done within $limit s" | tee -a "$log"; failed=1 ;;
        *) echo "FAIL  $title: status $status" | tee -a "$log"; failed=1 ;;
    esac
}

job() { # title, ranks, engine, further options of the script
    local title=$1 ranks=$2 directory=$3
    shift 3
    step "$title" 1800 "$mpirun" "${options[@]}" -n "$ranks" "$python" "$here/trtllm_first_hour.py" run "$directory" "$@"
}

step "names, parameters and defaults" 300 "$python" "$here/trtllm_first_hour.py" api
job "the Executor: orchestrator and $tp workers" $((1 + tp)) "$engine"
job "a rank more, without an Executor" $((2 + tp)) "$engine"
job "without partial reuse" $((1 + tp)) "$engine" --no-partial-reuse
[ -n "$engine16" ] && job "blocks of 16 tokens" $((1 + tp)) "$engine16"
# The plugins' own checks: aliased pools, PTX kernels.
for script in "$here"/tensorrt*.py; do
    [ -f "$script" ] && step "$(basename "$script")" 1800 "$python" "$script"
done

printf '\n== in short\n' | tee -a "$log"
grep -h '^FAIL' "$log" | sort -u || echo "no check failed"
echo "everything is in $log"
exit $failed
