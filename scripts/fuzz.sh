#!/usr/bin/env bash
# Runs every fuzzer of the tree for a time or a number of inputs each: scripts/fuzz.sh 30s, scripts/fuzz.sh 2000x.
# --list prints the fuzzers; fuzz_test.go compares the list with the Go sources. With a time, each fuzzer runs alone and is
# guided by coverage of this module. With a number of inputs, coverage would take most of the time to build, so inputs
# change at random, and two packages run at the same time.
set -euo pipefail
cd "$(dirname "$0")/.."
list() {
  grep -rlE '^func Fuzz' --include='*_test.go' . | sort | while read -r file; do
    grep -oE '^func Fuzz[A-Za-z0-9_]*' "$file" | sed "s|^func |$(dirname "$file") |"
  done
}
if [ "${1:-}" = --list ]; then list; exit; fi

# fuzz DIR TIME: the fuzzers of a package, with one binary.
fuzz() {
  local dir=$1 time=$2 binary log name cache
  binary=$(mktemp) log=$(mktemp)
  # shellcheck disable=SC2064 # these files, not those of the next call
  trap "rm -f '$binary' '$log'" EXIT
  local cover=()
  # The flags that -fuzz sets, for this module only: -fuzz itself also recompiles the standard library.
  [[ $time == *x ]] || cover=(-gcflags="$(go list -m)/...=-d=libfuzzer")
  go test -c -ldflags="-s -w" -o "$binary" "${cover[@]}" "$dir"
  cache=$(go env GOCACHE)/fuzz/$(go list "$dir")
  for name in $(list | sed -n "s|^$dir ||p"); do
    if ! (cd "$dir" && "$binary" -test.run '^$' -test.fuzz "^$name\$" -test.fuzztime "$time" -test.fuzzminimizetime 1x \
      -test.fuzzcachedir "$cache" -test.timeout 0 </dev/null >"$log" 2>&1); then
      # Go's fuzzer sometimes reports the end of its own time as a failure. A real one says
      # which input it has written.
      if grep -q 'Failing input written' "$log" || ! grep -q 'context deadline exceeded' "$log"; then
        echo "== $dir $name ($time)" && cat "$log"
        exit 1
      fi
    fi
    echo "== $dir $name ($time): $(grep -oE 'execs: [0-9]+' "$log" | tail -n 1 || tail -n 1 "$log")"
  done
}
export -f list fuzz
time=${1:-30s} beside=1
[[ $time != *x ]] || beside=2
list | cut -d' ' -f1 | sort -u | xargs -P "$beside" -I{} bash -euo pipefail -c 'fuzz "$@"' fuzz {} "$time"
