# What the cases use. Sourced by cluster.

failed=''

# fail says what is wrong in the case that runs.
fail() {
  echo "  $*" >&2
  wrong=yes
}

# eventually SECONDS COMMAND... waits until a command succeeds.
eventually() {
  local end=$((SECONDS + $1))
  shift
  until "$@"; do
    [ "$SECONDS" -lt "$end" ] || return 1
    sleep 0.2
  done
}

# is WHAT GOT WANT compares.
is() { [ "$2" = "$3" ] || fail "$1: got
$2
  want
$3"; }

# has WHAT TEXT PART looks for a part of a text.
has() { case $2 in *"$3"*) ;; *) fail "$1: no '$3' in
$2" ;; esac }

# submit ARGUMENTS... of sbatch, prints the number of the job.
submit() { sbatch --parsable --chdir="$JOBS" "$@" | cut -d ';' -f 1; }

# field JOB NAME prints what scontrol says of a job.
field() { scontrol -o show job "$1" | tr ' ' '\n' | sed -n "s/^$2=//p" | head -n 1; }

# over JOB tells whether it has ended, in any way. A state that nobody tells is no end: the
# controller may be busy.
over() { case $(field "$1" JobState) in COMPLETED | FAILED | CANCELLED | TIMEOUT | NODE_FAIL | OUT_OF_MEMORY | DEADLINE | BOOT_FAIL) ;; *) return 1 ;; esac }

# status JOB prints the status and signal with which a job ended.
status() { field "$1" ExitCode; }

# start_soon JOB starts one that was requeued: Slurm would wait for two minutes. At once would be too soon, since the nodes still
# know the job as one that was killed.
moved=0
start_soon() {
  if [ "$(field "$1" JobState)" = PENDING ] && [ "$1-$(field "$1" Restarts)" != "$moved" ] && [ "$(field "$1" Restarts)" != 0 ]; then
    sleep 3
    scontrol update "JobId=$1" StartTime=now 2>/dev/null || true
    moved=$1-$(field "$1" Restarts)
  fi
}

# finish JOB [SECONDS] waits for its end, and has it started soon where it was requeued.
finish() {
  local end=$((SECONDS + ${2:-60}))
  until over "$1"; do
    [ "$SECONDS" -lt "$end" ] || { fail "job $1 is still $(field "$1" JobState) after ${2:-60} s"; scancel "$1"; return 1; }
    start_soon "$1"
    sleep 0.5
  done
}

# grown FILE PART tells whether a file has a line with that part.
grown() { grep -q -- "$2" "$1" 2>/dev/null; }

# run_cases NAMES... runs those, or all; the status is 1 where one failed.
run_cases() {
  local name start count=0
  [ $# -gt 0 ] || mapfile -t names < <(compgen -A function case_)
  [ $# -eq 0 ] || names=("${@/#/case_}")
  for name in "${names[@]}"; do
    wrong='' start=$SECONDS count=$((count + 1))
    "$name" || fail "status $?"
    if [ -n "$wrong" ]; then failed="$failed ${name#case_}"; fi
    printf '%s  %s  %d s\n' "$([ -z "$wrong" ] && echo PASS || echo FAIL)" "${name#case_}" $((SECONDS - start))
  done
  [ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
  echo "$count cases passed, Slurm $(slurmctld -V | cut -d ' ' -f 2)"
}
