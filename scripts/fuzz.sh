#!/usr/bin/env bash
# Runs every fuzzer of the tree, one after the other: scripts/fuzz.sh 30s
set -euo pipefail
cd "$(dirname "$0")/.."
time=${1:-30s}
grep -rlE '^func Fuzz' --include='*_test.go' . | sort | while read -r file; do
  dir=$(dirname "$file")
  grep -oE '^func Fuzz[A-Za-z0-9_]*' "$file" | sed 's/^func //' | while read -r name; do
    echo "== $dir $name ($time)"
    go test "$dir" -run '^$' -fuzz "^$name\$" -fuzztime "$time" </dev/null
  done
done
