// Command mutate-rules proves that every rule of package attention/backends is held by a test: it runs
// the package's tests with one rule removed, and with its condition inverted, and ends with
// status 1 if any such change goes unnoticed. Run it as
//
//	go run ./scripts/mutate-rules
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/cprun/cprun/attention/backends"
)

// Almost every mutation falls to the tables, which take a tenth of a second; what gets past
// them meets the whole suite but for tests that no rule can change.
const (
	tables    = "^(TestSelectTable|TestBothSidesOfEveryVersion)$"
	unrelated = "Layout|Fuzz|Gradient|Reference|Whole|Allocates"
)

func main() {
	only := flag.String("only", "", "mutate the rules whose id contains this")
	flag.Parse()
	if err := run(*only); err != nil {
		fmt.Fprintln(os.Stderr, "mutate-rules:", err)
		os.Exit(1)
	}
}

func run(only string) error {
	start := time.Now()
	dir, err := os.MkdirTemp("", "mutate-rules-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	suite, err := build(dir)
	if err != nil {
		return err
	}
	// Without these two, a suite that fails in any case or ignores the flag would look perfect.
	if out, err := suite.with("", "."); err != nil {
		return fmt.Errorf("the tests without a mutation: %w\n%s", err, out)
	}
	if _, err := suite.with("no-such-rule:remove", tables); err == nil {
		return errors.New("the tests pass with -mutate=no-such-rule:remove, so they do not read the flag")
	}
	var mutations []string
	for _, r := range backends.Rules() {
		if strings.Contains(r.ID, only) {
			mutations = append(mutations, r.ID+":remove", r.ID+":invert")
		}
	}
	if len(mutations) == 0 {
		return fmt.Errorf("no rule has %q in its id", only)
	}
	survived := suite.all(mutations)
	fmt.Printf("%d mutations of %d rules, %d survived (%.0f s)\n", len(mutations), len(mutations)/2, len(survived), time.Since(start).Seconds())
	if len(survived) > 0 {
		return fmt.Errorf("no test notices these; add a row to the table of attention's selection tests:\n  %s", strings.Join(survived, "\n  "))
	}
	return nil
}

// suite is the compiled tests of package attention/backends.
type suite struct{ binary, dir string }

func build(dir string) (suite, error) {
	root, err := exec.Command("go", "list", "-f", "{{.Dir}}", "github.com/cprun/cprun/attention/backends").Output()
	if err != nil {
		return suite{}, fmt.Errorf("package attention/backends, from here: %w", err)
	}
	s := suite{binary: filepath.Join(dir, "backends.test"), dir: strings.TrimSpace(string(root))}
	if out, err := exec.Command("go", "test", "-c", "-o", s.binary, "github.com/cprun/cprun/attention/backends").CombinedOutput(); err != nil {
		return s, fmt.Errorf("the tests do not compile: %w\n%s", err, out)
	}
	return s, nil
}

// with runs the tests of those names under one mutation; the error is theirs.
func (s suite) with(mutation, names string) ([]byte, error) {
	c := exec.Command(s.binary, "-test.short", "-test.failfast", "-test.timeout=60s", "-test.run="+names, "-test.skip="+unrelated, "-mutate="+mutation)
	c.Dir = s.dir
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	err := c.Run()
	return out.Bytes(), err
}

// all runs every mutation, a few at once, and returns those that no test noticed.
func (s suite) all(mutations []string) (survived []string) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	queue := make(chan string)
	for range max(1, runtime.NumCPU()) {
		wg.Go(func() {
			for m := range queue {
				if _, err := s.with(m, tables); err != nil {
					continue
				}
				if _, err := s.with(m, "."); err == nil {
					mu.Lock()
					survived = append(survived, m)
					mu.Unlock()
				}
			}
		})
	}
	for _, m := range mutations {
		queue <- m
	}
	close(queue)
	wg.Wait()
	return survived
}
