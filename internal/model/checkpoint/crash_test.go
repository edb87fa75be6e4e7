package checkpoint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/base/must"
)

// points lists the points of a save at which a test kills the process, in order. A save reaches "set aside" if a
// checkpoint of the step exists, and "pruning" if there is one more than Keep.
var points = []string{
	"shard written", "shard synced", "gathered", "manifest written", "set aside", "renamed",
	"best written", "best renamed", "latest written", "latest renamed", "pruning", "pruned",
}

const childSteps = 4

// child resumes from the newest checkpoint and saves the following steps up to childSteps, with two ranks and Keep 2.
// It prints each complete step. At the given point of the step it kills itself with SIGKILL; without a point it saves
// until it is killed.
func child(dir, point string, die int64) error {
	params, ranges := small(2)
	first := int64(1)
	if c, _, err := Latest(context.Background(), dir); err == nil {
		first = c.Manifest.Step + 1
		c.Close()
	} else if !errors.Is(err, ErrNone) {
		return err
	}
	last := int64(childSteps)
	if point == "" {
		last = 1 << 40
	}
	if point == "set aside" {
		first = die // an existing step
	}
	f, err := newFleet(params, ranges, Options{Dir: rooted(dir), RunID: fmt.Sprintf("pid-%d", os.Getpid()), Keep: 2,
		Async: true})
	if err != nil {
		return err
	}
	f.best = true
	step := first
	for _, s := range f.savers {
		s.at = func(p string) error {
			if p == point && step == die {
				if err := syscall.Kill(os.Getpid(), syscall.SIGKILL); err != nil {
					return err
				}
				select {} // SIGKILL is on its way
			}
			return nil
		}
	}
	for ; step <= last; step++ {
		err := f.each(func(rank int, s *Saver) error {
			return errors.Join(s.Save(context.Background(), f.snapshot(rank, step)), s.Wait())
		})
		if err != nil {
			return err
		}
		fmt.Printf("whole %d\n", step)
	}
	return f.close()
}

// lines collects a child's output for a reader on another goroutine.
type lines struct {
	mu  sync.Mutex
	buf bytes.Buffer
	got chan struct{} // one element after each write
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case l.got <- struct{}{}:
	default:
	}
	return l.buf.Write(p)
}

// last returns the step of the last complete line.
func (l *lines) last() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	step := int64(0)
	for line := range strings.Lines(l.buf.String()) {
		fmt.Sscanf(line, "whole %d\n", &step)
	}
	return step
}

func childCommand(t *testing.T, dir, point string, step int64, more ...string) (*exec.Cmd, *lines) {
	t.Helper()
	exe := must.Have(os.Executable())
	c := exec.Command(exe, append(more, "-child-dir="+dir, "-child-point="+point,
		fmt.Sprintf("-child-step=%d", step))...)
	out := &lines{got: make(chan struct{}, 1)}
	c.Stdout, c.Stderr = out, os.Stderr
	return c, out
}

func killed(err error) bool {
	var exit *exec.ExitError
	return errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL
}

// TestKillPoints kills a process at every point of a save. The newest checkpoint is then complete, and no older than
// the last one the process reported. The next process resumes and leaves no remains.
func TestKillPoints(t *testing.T) {
	params, _ := small(2)
	for _, point := range points {
		dir, _ := saved(t, Options{}, 1, 2) // written by the killed run, or by an earlier one
		die := int64(3)
		if point == "set aside" {
			die = 2
		}
		c, out := childCommand(t, dir, point, die)
		if err := c.Run(); !killed(err) {
			t.Fatalf("killed at %q: the child ended with %v", point, err)
		}
		step, reasons := latestStep(t, dir, params)
		if step < max(out.last(), 2) {
			t.Errorf("killed at %q of step %d: latest step is %d, want %d; passed over %q", point, die, step,
				max(out.last(), 2), reasons)
		}
		best, err := Best(t.Context(), dir)
		if named := slices.Index(points, point) >= slices.Index(points, "best renamed"); named != (err == nil) ||
			err != nil && !errors.Is(err, ErrNone) || named && best.Manifest.Step != die {
			t.Errorf("killed at %q of step %d: the best is %+v, %v", point, die, best, err)
		}
		if best != nil {
			best.Close()
		}
		c, out = childCommand(t, dir, "none", 0)
		if err := c.Run(); err != nil || out.last() != childSteps {
			t.Fatalf("after a kill at %q: the next child ended with %v after step %d", point, err, out.last())
		}
		want := []string{"best", "latest", dirName(childSteps - 1), dirName(childSteps)}
		if got := names(t, dir); !slices.Equal(got, want) {
			t.Errorf("after a kill at %q: the directory holds %q, want %q", point, got, want)
		}
	}
}

// TestKillAnywhere kills processes at random moments, again and again in one directory. Each time the newest checkpoint
// is complete, and no older than the last one the process reported.
func TestKillAnywhere(t *testing.T) {
	params, _ := small(2)
	dir := filepath.Join(t.TempDir(), "checkpoints")
	r := rand.New(rand.NewPCG(3, 4))
	reached := int64(0)
	for round := range 8 {
		c, out := childCommand(t, dir, "", 0)
		must.Do(t, c.Start())
		ended := make(chan error, 1)
		go func() { ended <- c.Wait() }()
		select {
		case <-out.got:
		case err := <-ended:
			t.Fatalf("round %d: the child ended by itself: %v", round, err)
		}
		time.Sleep(time.Duration(r.IntN(20000)) * time.Microsecond)
		must.Do(t, c.Process.Kill())
		if err := <-ended; !killed(err) {
			t.Fatalf("round %d: the child ended with %v", round, err)
		}
		step, _ := latestStep(t, dir, params)
		if step < max(out.last(), reached) {
			t.Fatalf("round %d: latest step is %d; step %d was whole", round, step, max(out.last(), reached))
		}
		reached = step
	}
}
