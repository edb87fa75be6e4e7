# The key of a job between tasks of real steps, with the munge of the cluster.

# share ARGUMENTS... of srun: prints how many tasks got a key, and how many keys there are.
share() {
  srun --quiet --input=none "$@" "$WORK/key.test" -as share >"$JOBS/share.out" 2>&1 || fail "status $?: $(cat "$JOBS/share.out")"
  echo "$(grep -c '^rank' "$JOBS/share.out") tasks, $(sed -n 's/^rank .* key //p' "$JOBS/share.out" | sort -u | wc -l) key"
}

case_key_by_munge() {
  is "a task on each node" "$(share -N2 -n2)" "2 tasks, 1 key"
  is "four tasks on each node" "$(share -N2 -n8 --overcommit)" "8 tasks, 1 key"
  has "output" "$(cat "$JOBS/share.out")" "rank 7 key"
}

# Tasks of one node need no munge: the kernel vouches, and for another user it does not.
case_key_on_one_node() {
  is "two tasks" "$(share -N1 -n2 env PATH=/nowhere)" "2 tasks, 1 key"
  srun --quiet -N1 -n2 bash -c "
    if [ \$SLURM_PROCID = 1 ]; then
      $WORK/key.test -as share
      python3 $TREE/scripts/test-slurm.d/knock.py
      python3 $TREE/scripts/test-slurm.d/knock.py 65534
    else
      $WORK/key.test -as share
    fi" >"$JOBS/knock.out" 2>&1 || fail "status $?: $(cat "$JOBS/knock.out")"
  is "the same user, and another one" "$(grep '^got' "$JOBS/knock.out")" "got 32 bytes
got 0 bytes"
  has "the first agent" "$(cat "$JOBS/knock.out")" "is of user 65534"
}

case_key_of_another_job() {
  local first
  share -N2 -n2 >/dev/null
  first=$(sed -n 's/^rank 0 key //p' "$JOBS/share.out")
  share -N2 -n2 >/dev/null
  [ "$(sed -n 's/^rank 0 key //p' "$JOBS/share.out")" != "$first" ] || fail "two jobs have one key"
}

case_key_by_file() {
  local file=$JOBS/key
  (umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$file")
  is "two tasks" "$(CPRUN_KEY_FILE=$file share -N2 -n2)" "2 tasks, 1 key"
  chmod 644 "$file"
  CPRUN_KEY_FILE=$file refuses "a file that all can read" "mode is 0644" srun --quiet -N2 -n2 "$WORK/key.test" -as share
  refuses "neither munge nor a file" "CPRUN_KEY_FILE" srun --quiet -N2 -n2 env PATH=/nowhere "$WORK/key.test" -as share
}

# Another user of the same node, with all variables of the second task, gets no key, and the first agent says who asked.
case_key_for_another_user() {
  srun --quiet -N2 -n2 bash -c "
    if [ \$SLURM_PROCID = 1 ]; then
      setpriv --reuid=65534 --regid=65534 --clear-groups $WORK/key.test -as share >$JOBS/thief.out 2>&1
      echo \"status \$?\" >>$JOBS/thief.out
      exit 0
    fi
    $WORK/key.test -as share" >"$JOBS/victim.out" 2>&1 || fail "status $?"
  has "the other user" "$(cat "$JOBS/thief.out")" "status 2"
  has "the first agent" "$(cat "$JOBS/victim.out")" "did not get it"
  case $(cat "$JOBS/thief.out") in *" key "[0-9a-f]*) fail "another user got the key" ;; esac
}
