#!/usr/bin/env bash
# Runs every fuzzer of the tree, one after the other, for a time or a number of inputs each:
# scripts/fuzz.sh 30s, scripts/fuzz.sh 2000x. With --list it prints them, and a test of the tree
# compares the list with what the Go sources have.
set -euo pipefail
cd "$(dirname "$0")/.."
list() {
  grep -rlE '^func Fuzz' --include='*_test.go' . | sort | while read -r file; do
    grep -oE '^func Fuzz[A-Za-z0-9_]*' "$file" | sed "s|^func |$(dirname "$file") |"
  done
}
if [ "${1:-}" = --list ]; then list; exit; fi
time=${1:-30s}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
list | while read -r dir name; do
  echo "== $dir $name ($time)"
  if ! go test "$dir" -run '^$' -fuzz "^$name\$" -fuzztime "$time" -fuzzminimizetime 1x </dev/null >"$log" 2>&1; then
    # Go's fuzzer sometimes reports the end of its own time as a failure. A real one says
    # which input it has written.
    if grep -q 'Failing input written' "$log" || ! grep -q 'context deadline exceeded' "$log"; then
      cat "$log"
      exit 1
    fi
  fi
  grep -oE 'execs: [0-9]+' "$log" | tail -n 1 || tail -n 1 "$log"
done
