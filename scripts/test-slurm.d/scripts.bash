# The batch scripts of scripts/slurm, and what Slurm's signals do to a run: first with a stand-in for cprun, so that
# the scripts and Slurm are tested alone. cprun.bash runs the same with cprun.

# The cluster is small: less time than the scripts ask for, and GPUs where there are any.
small=(--time=5)
small_node=("${small[@]}")
[ "$SITE" != gpus ] || small_node+=(--gpus-per-node=2)
stand_in=$TREE/scripts/test-slurm.d/stand-in

# start PROGRAM SCRIPT CONFIG [FLAGS...] -- [ARGUMENTS OF SBATCH...] submits a script, and waits until it trains.
start() {
  local program=$1 script=$2 flags=()
  shift 2
  while [ "$1" != -- ]; do flags+=("$1"); shift; done
  shift
  job=$(CPRUN=$program submit -o job-%j.out "${small_node[@]}" "$@" "$TREE/scripts/slurm/$script.sbatch" "${flags[@]}") || { fail "sbatch"; return 1; }
  out=$JOBS/job-$job.out
  trains || { scancel "$job"; return 1; }
}

# trains waits until a step is in the output of $job.
trains() {
  eventually 40 grown "$out" 'step [0-9]' || { fail "job $job does not train: $(tail -n 20 "$out")"; return 1; }
}

# again JOB starts one that has ended once more.
again() {
  scontrol requeue "$1"
  finish "$1"
}

# stops_and_goes_on PROGRAM SCRIPT TASKS ... as start: a signal to the steps stops the job at a checkpoint with 75, the
# same command goes on after a requeue.
stops_and_goes_on() {
  local program=$1 script=$2 tasks=$3
  shift 3
  start "$program" "$script" "$@" || return 0
  scancel --signal=USR1 "$job"
  finish "$job" || return 0
  is "status of the stopped job" "$(status "$job")" 75:0
  has "output" "$(cat "$out")" "checkpoint of step"
  is "steps" "$(grep -c "JobId=$job " "$LOGS/jobs.txt")" 1
  has "accounting" "$(grep "JobId=$job " "$LOGS/jobs.txt")" "ExitCode=75:0"
  again "$job" || return 0
  is "status at the end" "$(status "$job")" 0:0
  has "output" "$(cat "$out")" "going on from"
  [ "$tasks" = any ] || is "tasks" "$(grep -o '^task [0-9]* of [0-9]* on node0[0-9]' "$out" | sort | uniq -c | wc -l)" "$tasks"
}

# requeues PROGRAM ... as start: a job that is stopped before its limit goes back into the queue by itself, and on. Slurm looks at
# limits every 30 s, so that a run must not end by itself.
requeues() {
  local program=$1 end
  shift
  start "$program" requeue "$@" --time=1 --signal=B:USR1@45 || return 0
  end=$((SECONDS + 180))
  until grown "$out" "going on from"; do
    [ "$SECONDS" -lt "$end" ] || { fail "it does not go on: $(tail -n 20 "$out")"; break; }
    start_soon "$job"
    sleep 0.5
  done
  [ "$(field "$job" Restarts)" -ge 1 ] || fail "it was not started again"
  has "output" "$(cat "$out")" "back into the queue"
  scancel "$job"
  finish "$job"
}

# The line of the README, from a checkout: bin/cprun of it is found, though Slurm runs a copy of the script.
case_script_in_a_checkout() {
  local checkout=$WORK/checkout
  mkdir -p "$checkout/bin"
  ln -sf "$WORK/cprun" "$checkout/bin/cprun"
  job=$(cd "$checkout" && sbatch --parsable --nodes=2 "${small[@]}" -o job-%j.out "$TREE/scripts/slurm/nodes.sbatch" "$TREE/scripts/test-slurm.d/train.yaml" --set train.steps=5)
  finish "$job" || return 0
  is "status" "$(status "$job")" 0:0
  is "steps" "$(wc -l <"$checkout/runs/cprun-$job/metrics.jsonl")" 5
}

# Without cprun every script ends with 2 and the fix, before it starts a step.
case_script_without_cprun() {
  local script array
  for script in one-node nodes tasks requeue array; do
    array=()
    [ "$script" != array ] || array=(--array=0)
    job=$(submit "${small_node[@]}" "${array[@]}" --ntasks-per-node=1 -o "none-$script.out" "$TREE/scripts/slurm/$script.sbatch" train.yaml 1K)
    finish "$job" || continue
    is "status of $script" "$(status "$job")" 2:0
    has "output of $script" "$(cat "$JOBS/none-$script.out")" "CPRUN="
  done
}

four_tasks() { [ "$(grep -c '^task [0-9]* of 4 on node0' "$out")" = 4 ]; }

# Where nobody says how many tasks a node has, its GPUs do; without those it is an error.
case_script_tasks_of_gpus() {
  if [ "$SITE" = gpus ]; then
    start "$stand_in" tasks train.yaml -- || return 0
    eventually 20 four_tasks || fail "tasks: $(grep ^task "$out")"
    scancel "$job"
    return
  fi
  job=$(CPRUN=$stand_in submit "${small[@]}" -o tasks.out "$TREE/scripts/slurm/tasks.sbatch" train.yaml)
  finish "$job" || return 0
  is "status" "$(status "$job")" 2:0
  has "output" "$(cat "$JOBS/tasks.out")" "--ntasks-per-node"
}

# makes_way PROGRAM ... as start: a job of an urgent partition takes its nodes. Within the partition's GraceTime it writes
# a checkpoint. A job that ends by itself in that time Slurm does not requeue, so the script does.
makes_way() {
  local program=$1 urgent
  shift
  start "$program" requeue "$@" || return 0
  urgent=$(submit -p urgent -N2 --exclusive --time=1 --mem=1500 -o urgent.out --wrap 'sleep 2') || { fail "sbatch"; return 0; }
  finish "$urgent" 60 || return 0
  has "output" "$(cat "$out")" "checkpoint of step"
  finish "$job" 90 || return 0
  is "status" "$(status "$job")" 0:0
  is "restarts" "$(field "$job" Restarts)" 1
  has "output" "$(cat "$out")" "going on from"
}

case_script_one_node() { stops_and_goes_on "$stand_in" one-node 1 train.yaml --; }
case_script_nodes() { stops_and_goes_on "$stand_in" nodes 2 train.yaml --; }
case_script_tasks() { stops_and_goes_on "$stand_in" tasks 4 train.yaml -- --ntasks-per-node=2; }
case_script_requeue() { requeues "$stand_in" train.yaml --; }
case_script_preempted() { makes_way "$stand_in" train.yaml --; }

# A step has all GPUs of nodes that are the job's alone, however they were asked for, also by nothing.
case_script_has_gpus() {
  local want=2 request
  [ "$SITE" = gpus ] || want=''
  for request in --exclusive --gres=gpu:2 --gpus-per-node=2; do
    [ "$SITE" = gpus ] || request=--exclusive
    job=$(CPRUN=$TREE/scripts/test-slurm.d/gpus submit "${small[@]}" "$request" -o gpus.out "$TREE/scripts/slurm/nodes.sbatch" train.yaml)
    finish "$job" || continue
    is "GPUs of the tasks with $request" "$(grep ^GPUs "$JOBS/gpus.out" | sort -u)" "GPUs $want"
    rm "$JOBS/gpus.out"
  done
}

case_script_array() {
  local job k
  job=$(CPRUN=$stand_in submit -o array-%a.out "${small_node[@]}" --array=0-2 "$TREE/scripts/slurm/array.sbatch" train.yaml 16K 32K)
  for k in 0 1; do
    eventually 40 grown "$JOBS/array-$k.out" 'step [0-9]' || fail "task $k does not train: $(cat "$JOBS/array-$k.out")"
    scancel --signal=USR1 "${job}_$k"
    finish "${job}_$k"
    is "status of task $k" "$(status "${job}_$k")" 75:0
  done
  finish "${job}_2"
  is "status of the task without a length" "$(status "${job}_2")" 2:0
  is "run directories" "$(cd "$JOBS" && ls -d "runs/scaling-$job"/*)" "runs/scaling-$job/16K
runs/scaling-$job/32K"
}

# Of what tasks end with, Slurm makes the status of the job: that is what cprun relies on.
case_status_of_steps() {
  local job got
  for got in 0 1 2 75; do
    job=$(submit -N2 -n2 "${small[@]}" -o status.out --wrap "srun --kill-on-bad-exit=0 bash -c '[ \$SLURM_PROCID = 0 ] || sleep 1; exit $got'")
    finish "$job"
    is "status" "$(status "$job")" "$got:0"
    has "accounting" "$(grep "JobId=$job " "$LOGS/jobs.txt")" "ExitCode=$got:0"
  done
}
