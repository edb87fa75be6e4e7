#!/usr/bin/env bash
# Runs every fuzzer of the tree, one after the other, for a time or a number of inputs each:
# scripts/fuzz.sh 30s, scripts/fuzz.sh 2000x
set -euo pipefail
cd "$(dirname "$0")/.."
time=${1:-30s}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
grep -rlE '^func Fuzz' --include='*_test.go' . | sort | while read -r file; do
  dir=$(dirname "$file")
  grep -oE '^func Fuzz[A-Za-z0-9_]*' "$file" | sed 's/^func //' | while read -r name; do
    echo "== $dir $name ($time)"
    if ! go test "$dir" -run '^$' -fuzz "^$name\$" -fuzztime "$time" -fuzzminimizetime 1x </dev/null >"$log" 2>&1; then
      # Go's fuzzer sometimes reports the end of its own time as a failure. A real one says
      # which input it has written.
      if grep -q 'Failing input written' "$log" || ! grep -q 'context deadline exceeded' "$log"; then
        cat "$log"
        exit 1
      fi
    fi
    tail -n 1 "$log"
  done
done
