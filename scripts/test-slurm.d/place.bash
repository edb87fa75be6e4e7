# Where tasks of real steps stand, as internal/launch/place sees it.

# places prints the place of each task of a step, in the order of ranks: rank/agents workers local/of host hosts at.
places() {
  srun --quiet --input=none "$@" "$WORK/place.test" -as task | jq -r '"\(.Rank)/\(.MaxAgents) \(.Workers) \(.LocalRank)/\(.LocalAgents) \(.Node) \(.Hosts // [] | join(",")) \(.Rendezvous | sub(":.*"; ""))"' | sort -n
}

case_host_lists() { python3 "$TREE/scripts/oracle/hostlist.py" "$WORK/place.test" "${LISTS:-1000}"; }

case_task_per_node() {
  is "two nodes" "$(places -N2 --ntasks-per-node=1)" "0/2 0 0/1 node01 node01,node02 node01
1/2 0 0/1 node02 node01,node02 node01"
}

case_task_per_gpu() {
  local gpus=(--gpus-per-node=2)
  [ "$SITE" = gpus ] || gpus=()
  is "two tasks on each of two nodes" "$(places -N2 --ntasks-per-node=2 "${gpus[@]}")" "0/4 1 0/2 node01 node01,node02 node01
1/4 1 1/2 node01 node01,node02 node01
2/4 1 0/2 node02 node01,node02 node01
3/4 1 1/2 node02 node01,node02 node01"
  is "two tasks on one node" "$(places -N1 -n2 -w node02)" "0/2 1 0/2 node02 node02 127.0.0.1
1/2 1 1/2 node02 node02 127.0.0.1"
}

case_uneven_tasks() {
  is "three tasks on two nodes" "$(places -N2 -n3 --distribution=block)" "0/3 1 0/2 node01 node01,node02 node01
1/3 1 1/2 node01 node01,node02 node01
2/3 1 0/1 node02 node01,node02 node01"
}

case_cyclic_tasks() {
  is "ranks of a node follow each other" "$(places -N2 --ntasks-per-node=2 --distribution=cyclic)" "$(places -N2 --ntasks-per-node=2 --distribution=block)"
}

# srun sets the variables of MPI's launchers, too, where it is asked to; Slurm's own count.
case_tasks_with_pmi() {
  has "variables" "$(srun --quiet -N2 -n2 --mpi=pmi2 env)" "PMI_RANK="
  is "places" "$(places -N2 --ntasks-per-node=2 --mpi=pmi2)" "$(places -N2 --ntasks-per-node=2)"
}

# Notes and refusals.

case_batch_shell_is_alone() {
  local job text
  job=$(submit -N2 --ntasks-per-node=2 -o shell.out --wrap "$WORK/place.test -as task; srun -n1 -N1 $WORK/place.test -as task")
  finish "$job"
  text=$(cat "$JOBS/shell.out")
  is "sources" "$(jq -r '"\(.Source) \(.Job)"' <<<"$text")" "alone slurm:$job:0
alone slurm:$job.0:0"
  has "notice" "$text" "start it with srun"
}

# refuses WHAT PART COMMAND... runs tasks that must be refused with status 2.
refuses() {
  local what=$1 part=$2 text got=0
  shift 2
  text=$("$@" 2>&1) || got=$?
  is "$what: status" "$got" 2
  has "$what" "$text" "$part"
}

case_lost_environment() {
  refuses "no job" "SLURM_JOB_ID" srun --quiet -N2 -n2 env -u SLURM_JOB_ID "$WORK/place.test" -as task
  refuses "no step" "SLURM_STEP_ID" srun --quiet -n2 -N1 env -u SLURM_STEP_ID "$WORK/place.test" -as task
  refuses "RANK exported before srun" "env -u RANK" env RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 srun --quiet -n2 -N2 bash -c "[ \$SLURM_PROCID = 0 ] && exit 2; exec $WORK/place.test -as task"
  refuses "two components" "SLURM_HET_SIZE=2" srun --quiet -n2 -N1 "$WORK/place.test" -as task : -n2 -N1 "$WORK/place.test" -as task
  is "alone on request" "$(srun --quiet -n2 -N2 env -u SLURM_PROCID "$WORK/place.test" -as task | jq -r .Source | sort -u)" alone
}

case_steps_beside_each_other() {
  local job
  job=$(submit -N2 --ntasks-per-node=2 -o steps.out --wrap "for i in 1 2; do srun --exact -N2 -n2 --mem=100 $WORK/place.test -as task & done; wait")
  finish "$job"
  is "addresses" "$(jq -r .Rendezvous "$JOBS/steps.out" | sort -u | wc -l)" 2
}

case_reserved_ports() {
  local at
  at=$(srun --quiet -N2 -n2 --resv-ports=1 "$WORK/place.test" -as task | jq -r .Rendezvous | sort -u)
  case $at in node01:120[0-9][0-9]) ;; *) fail "rendezvous $at, want node01:120.." ;; esac
}

case_restarts_have_other_names() {
  local job
  job=$(submit -N2 -n2 --requeue --open-mode=append -o restart.out --wrap "srun $WORK/place.test -as task; [ -n \"\${SLURM_RESTART_COUNT:-}\" ] || { scontrol requeue \$SLURM_JOB_ID; sleep 20; }")
  finish "$job" 90
  is "names" "$(grep '^{' "$JOBS/restart.out" | jq -r .Job | sort -u)" "slurm:$job.0:0
slurm:$job.0:1"
}
