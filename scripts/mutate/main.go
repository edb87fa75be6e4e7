// Command mutate finds code that no test covers. It changes a package in one place, runs the package's tests, and
// reports each change that passes them (a survivor) as file:line. The compiler reads changed files through an overlay,
// so the working tree does not change.
//
//	go run ./scripts/mutate -n 25 -seed 1 ./comm ./ring
//	go run ./scripts/mutate -n 10 -run 'TestSchedule|TestSplit' -only schedule.go ./ring
//	go run ./scripts/mutate -rules
//
// The changes: disable an if that returns, breaks or continues; negate a condition; add or remove the equal sign of a
// comparison; drop the value of an assignment; drop a call without a result. -rules instead removes and inverts each
// rule of package internal/model/backends.
//
// A survivor is a missing test, a line without effect, or a change that tests cannot see, such as one that only costs
// speed. The exit status is 1 if there are survivors.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"time"
)

func main() {
	var o options
	rules := flag.Bool("rules", false, "mutate the rules of package internal/model/backends")
	flag.IntVar(&o.n, "n", 25, "mutants of each package")
	flag.Uint64Var(&o.seed, "seed", 1, "chooses the mutants")
	flag.StringVar(&o.run, "run", ".", "run the tests whose names match")
	flag.StringVar(&o.skip, "skip", "", "skip the tests whose names match")
	flag.StringVar(&o.only, "only", "", "mutate only places or rules that contain this, such as file.go:12:")
	flag.DurationVar(&o.timeout, "timeout", 0,
		"limit of one mutant's tests; 0: 10 s and three times the unchanged tests")
	flag.BoolVar(&o.verbose, "v", false, "also print the other mutants")
	flag.Parse()
	err := errors.New("no packages given")
	switch {
	case *rules:
		err = mutateRules(o.only)
	case flag.NArg() > 0:
		err = mutateSource(o, flag.Args())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutate:", err)
		os.Exit(1)
	}
}

type options struct {
	n               int
	seed            uint64
	run, skip, only string
	timeout         time.Duration
	verbose         bool
}
