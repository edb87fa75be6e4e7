# shellcheck disable=SC2154 # small, small_node, job and out are of scripts.bash
# The same as scripts.bash, with cprun.

cprun=$WORK/cprun
config=$TREE/scripts/test-slurm.d/train.yaml

# losses RUN prints the step and the loss of each line of its metrics.
losses() { jq -r 'select(.loss != null) | "\(.step) \(.loss)"' "$1/metrics.jsonl"; }

# same_curve RUN RANKS compares a run's losses with those of as many processes in one task: the same steps, each once, the
# losses within 1e-4.
same_curve() {
  local one=$JOBS/one-$2
  [ -e "$one/metrics.jsonl" ] || srun --quiet -N1 -n1 -c4 "$cprun" --quiet --nproc "$2" --run-dir "$one" "$config" || fail "one node"
  paste -d ' ' <(losses "$1") <(losses "$one") | awk '
    { d = $2 - $4; if (d < 0) d = -d; if ($1 != $3 || d > 1e-4) { print "line " NR ": " $0; bad = 1; exit } }
    END { exit bad || NR < 200 }' || fail "the curve of $1 is not that of $one"
}

case_cprun_one_node() {
  stops_and_goes_on "$cprun" one-node any "$config" --nproc 2 --
  same_curve "$JOBS/runs/cprun-$job" 2
}

case_cprun_nodes() {
  stops_and_goes_on "$cprun" nodes any "$config" --nproc 2 --
  same_curve "$JOBS/runs/cprun-$job" 4
}

case_cprun_tasks() {
  stops_and_goes_on "$cprun" tasks any "$config" -- --ntasks-per-node=2
  same_curve "$JOBS/runs/cprun-$job" 4
}

case_cprun_uneven_tasks() {
  srun --quiet -N2 -n3 "$cprun" --quiet --run-dir "$JOBS/uneven" --set data.seq_len=516 "$config" || fail "status $?"
  is "steps" "$(losses "$JOBS/uneven" | wc -l)" 200
}

case_cprun_requeue() {
  requeues "$cprun" "$config" --nproc 1 --set train.steps=1000000 --
}

case_cprun_preempted() {
  makes_way "$cprun" "$config" --nproc 1 --set train.steps=1000 --
}

case_cprun_array() {
  local job k
  job=$(CPRUN=$cprun submit -o lengths-%a.out "${small_node[@]}" --nodes=2 --array=0-1%1 "$TREE/scripts/slurm/array.sbatch" "$config" 512 1K)
  for k in 0 1; do
    finish "${job}_$k" 120 || continue
    is "status of task $k" "$(status "${job}_$k")" 0:0
  done
  is "run directories" "$(cd "$JOBS" && ls -d "runs/scaling-$job"/*)" "runs/scaling-$job/1K
runs/scaling-$job/512"
}

# A rank that dies is status 1 at every task, and the last lines name it and Slurm's name of its node.
case_cprun_failure() {
  start "$cprun" nodes "$config" --nproc 1 -- || return 0
  kill -KILL "$(worker_on node02)"
  finish "$job" 30 || return 0
  is "status" "$(status "$job")" 1:0
  has "report" "$(tail -n 15 "$out")" "rank 1 failed on host node02"
}

# worker_on NODE prints a worker's process on a node.
worker_on() {
  local p
  for p in $(pgrep -f "$cprun worker"); do
    if tr '\0' '\n' <"/proc/$p/environ" | grep -q "^SLURMD_NODENAME=$1$"; then echo "$p"; return; fi
  done
}

# A config that is wrong is status 2 at every task, before any trains.
case_cprun_wrong_config() {
  local job
  job=$(submit -N2 -n2 "${small[@]}" -o wrong.out --wrap "srun --kill-on-bad-exit=0 $cprun --set train.stepz=1 $config")
  finish "$job"
  is "status" "$(status "$job")" 2:0
}

# short ARGUMENTS... of srun, -- and of cprun trains for two steps.
short() {
  local of_srun=()
  while [ "$1" != -- ]; do of_srun+=("$1"); shift; done
  (cd "$JOBS" && srun --quiet --input=none "${of_srun[@]}" "$cprun" --set train.steps=2 --set data.seq_len=64 "${@:2}" "$config") >"$JOBS/short.out" 2>&1
}

# The key of a job needs no munge, and is a private file: in the run directory, or without one in runs with the job's number.
case_key_is_a_file() {
  short -N2 -n2 -- --run-dir runs/keyed || fail "status $?: $(cat "$JOBS/short.out")"
  is "mode and owner" "$(stat -c '%a %u' "$JOBS/runs/keyed/.key")" "600 0"
  is "left" "$(find "$JOBS/runs/keyed" -maxdepth 1 -name '.*' -type f)" "$JOBS/runs/keyed/.key"
  short -N2 -n8 --overcommit -- || fail "status $?: $(cat "$JOBS/short.out")"
  is "keys of jobs" "$(find "$JOBS/runs" -maxdepth 1 -name '.job-*.key' -perm 600 | wc -l)" 1
  short -N1 -n2 -- || fail "status $?: $(cat "$JOBS/short.out")"
  is "keys of jobs" "$(cd "$JOBS/runs" && cat .job-*.key | sort -u | wc -l)" 2
}

# A key that exists is used again, and a file of the user's own in the place of it.
case_key_again() {
  local was
  short -N2 -n2 -- --run-dir runs/again || fail "status $?: $(cat "$JOBS/short.out")"
  was=$(cat "$JOBS/runs/again/.key")
  short -N2 -n2 -- --run-dir runs/again --set train.steps=4 || fail "status $?: $(cat "$JOBS/short.out")"
  is "key" "$(cat "$JOBS/runs/again/.key")" "$was"
  (umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$JOBS/key")
  CPRUN_KEY_FILE=$JOBS/key short -N2 -n2 -- --run-dir runs/named || fail "status $?: $(cat "$JOBS/short.out")"
  [ ! -e "$JOBS/runs/named/.key" ] || fail "CPRUN_KEY_FILE is set, and a key was made"
}

# What is wrong with a key ends every task with 2, the path and the fix; so does another user with all variables of a task.
case_key_refused() {
  local dir=$JOBS/runs/refused
  mkdir -p "$dir"
  head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$dir/.key"
  chmod 644 "$dir/.key"
  refuses "a file that all can read" "$dir/.key: its mode is 0644" srun --quiet --input=none -N2 -n2 "$cprun" --run-dir "$dir" "$config"
  chmod 600 "$dir/.key" && chown 65534 "$dir/.key"
  refuses "a file of another user" "$dir/.key: it belongs to user 65534" srun --quiet --input=none -N2 -n2 "$cprun" --run-dir "$dir" "$config"
  chown 0 "$dir/.key"
  refuses "another user" "$dir/.key: permission denied" srun --quiet --input=none -N2 -n2 \
    setpriv --reuid=65534 --regid=65534 --clear-groups "$cprun" --run-dir "$dir" "$config"
}

# An experiment is one array, whose tasks run the cells on one node and on two, and a job behind it that gathers. The same
# command then has nothing left to run, and writes the results again.
case_cprun_scale() {
  local file=$WORK/lengths.yaml dir=$JOBS/scaled said gather
  printf 'base: %s\nset: {train.steps: 4}\ngrid: {data.seq_len: [64, 128], nnodes: [1, 2], nproc: [1, 2], parallel.context: [auto, 3]}\nskip: [{parallel.context: 3, nproc: 1}, {parallel.context: 3, nnodes: 1}, {parallel.context: 3, data.seq_len: 64}]\nwarmup: 1\n' \
    "$config" >"$file"
  said=$("$cprun" scale --slurm --out "$dir" --sbatch=--time=5 --sbatch=--mem=1500 --sbatch=--cpus-per-task=1 "$file") || fail "scale: status $?"
  gather=$(sed -n 's/.* and job \([0-9]*\) .*/\1/p' <<<"$said")
  has "submission" "$said" "9 tasks for 9 cells"
  refuses "submitted twice" "still runs the cells" "$cprun" scale --slurm --out "$dir" "$file"
  finish "$gather" 240 || { cat "$dir"/slurm-*.out >&2; return 0; }
  is "status" "$(status "$gather")" 0:0
  is "cells" "$(cut -d , -f 1-4,8 "$dir/results.csv" | tail -n +2)" "64,1,1,auto,ok
64,1,2,auto,ok
64,2,1,auto,ok
64,2,2,auto,ok
128,1,1,auto,ok
128,1,2,auto,ok
128,2,1,auto,ok
128,2,2,auto,ok
128,2,2,3,refused"
  is "run again" "$("$cprun" scale --slurm --out "$dir" "$file" | tail -n 1)" "results     $dir"
}

# On a node with two networks cprun takes the faster one, though its own name means loopback; --interface and MASTER_ADDR win.
case_cprun_networks() {
  [ "$SITE" = nets ] || return 0
  short -N2 -n2 -- --run-dir runs/nets || fail "status $?: $(cat "$JOBS/short.out")"
  has "the fastest" "$(cat "$JOBS/short.out")" "network of this node: fast0 10.78.0.1 (10 Gbit/s), towards node02"
  short -N2 -n2 -- --run-dir runs/nets-named --interface mgmt0 || fail "status $?: $(cat "$JOBS/short.out")"
  has "--interface" "$(cat "$JOBS/short.out")" "network of this node: mgmt0 10.77.0.1"
  MASTER_ADDR=10.77.0.1 short -N2 -n2 -- --run-dir runs/nets-meeting || fail "status $?: $(cat "$JOBS/short.out")"
  has "MASTER_ADDR" "$(cat "$JOBS/short.out")" "network of this node: mgmt0 10.77.0.1, towards 10.77.0.1"
}
