package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/cprun/cprun/internal/model/backends"
)

// The tables catch almost every mutation in a tenth of a second. Mutations that pass them run the other tests of the
// package, except unrelated ones.
const (
	tables    = "^(TestSelectTable|TestBothSidesOfEveryVersion)$"
	unrelated = "Layout|Fuzz|Gradient|Reference|Whole|Allocates"
)

// mutateRules removes and inverts each rule with only in its id. It returns an error if a change survives.
func mutateRules(only string) error {
	start := time.Now()
	dir, err := os.MkdirTemp("", "mutate-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	suite, err := build(dir)
	if err != nil {
		return err
	}
	// a suite that always fails, or ignores the flag, would look perfect
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
	fmt.Printf("%d mutations of %d rules, %d survived (%.0f s)\n", len(mutations), len(mutations)/2, len(survived),
		time.Since(start).Seconds())
	if len(survived) > 0 {
		return fmt.Errorf("no test catches these; add a row to the table of attention's selection tests:\n  %s",
			strings.Join(survived, "\n  "))
	}
	return nil
}

// A suite holds the compiled tests of package internal/model/backends.
type suite struct{ binary, dir string }

func build(dir string) (suite, error) {
	root, err := exec.Command("go", "list", "-f", "{{.Dir}}", "github.com/cprun/cprun/internal/model/backends").Output()
	if err != nil {
		return suite{}, fmt.Errorf("package internal/model/backends, from here: %w", err)
	}
	s := suite{binary: filepath.Join(dir, "backends.test"), dir: strings.TrimSpace(string(root))}
	if out, err := exec.Command("go", "test", "-c", "-o", s.binary,
		"github.com/cprun/cprun/internal/model/backends").CombinedOutput(); err != nil {
		return s, fmt.Errorf("the tests do not compile: %w\n%s", err, out)
	}
	return s, nil
}

// with runs the named tests under one mutation, and returns their output and error.
func (s suite) with(mutation, names string) ([]byte, error) {
	c := exec.Command(s.binary, "-test.short", "-test.failfast", "-test.timeout=60s", "-test.run="+names,
		"-test.skip="+unrelated, "-mutate="+mutation)
	c.Dir = s.dir
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	err := c.Run()
	return out.Bytes(), err
}

// all runs every mutation, several at once, and returns the survivors.
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
