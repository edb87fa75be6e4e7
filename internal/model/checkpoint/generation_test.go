package checkpoint

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
)

// beginner returns a saver of one rank.
func beginner(t *testing.T, dir, run string, generation int64) *fleet {
	t.Helper()
	f := fleetOf(t, 1, Options{Dir: rooted(dir), RunID: run, Start: Start{Generation: generation}})
	t.Cleanup(func() { f.close() })
	return f
}

// A start that is suspended after its check for a newer start still fails: the newer start has removed the directory
// that it is about to rename.
func TestCutOff(t *testing.T) {
	for _, point := range []string{"manifest written", "set aside", "latest written"} {
		dir := t.TempDir()
		old := beginner(t, dir, "old", 1)
		old.mustSave(t, 1)
		var next *fleet
		old.savers[0].at = func(p string) error {
			if p == point && next == nil {
				next = beginner(t, dir, "new", 2)
			}
			return nil
		}
		step := int64(2)
		if point == "set aside" {
			step = 1
		}
		var retry *RetryError
		if err := old.save(t, step); err == nil || errors.Is(err, ErrSuperseded) && errors.As(err, &retry) {
			t.Errorf("%s: a save of the old start: %v; it may be tried again: %t", point, err, retry != nil)
		}
		if got, reasons := latestStep(t, dir, old.params); got != 1 {
			t.Errorf("%s: latest step is %d, want 1 (passed over: %q)", point, got, reasons)
		}
		if err := old.save(t, 3); !errors.Is(err, ErrSuperseded) || !strings.Contains(err.Error(), "job new, process") {
			t.Errorf("%s: the save after that: %v", point, err)
		}
		next.mustSave(t, 2)
		checkSteps(t, point, dir, 1, 2)
	}
}

// The second start with a generation number is refused. Generation 0 takes the next number.
func TestGenerations(t *testing.T) {
	dir := t.TempDir()
	beginner(t, dir, "first", 3)
	next, err := NextGeneration(rooted(dir))
	if err != nil || next != 4 {
		t.Fatalf("NextGeneration = %d, %v, want 4", next, err)
	}
	for generation, want := range map[int64]string{2: "number 3, by job first",
		3: "generation 3 has been taken by job first"} {
		_, err := NewSaver(world(1)[0], Options{Dir: rooted(dir), RunID: "other", Start: Start{Generation: generation}})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("a start with number %d: %v, want %q", generation, err, want)
		}
	}
	if s := beginner(t, dir, "second", 0).savers[0]; s.fence.start.Generation != 4 {
		t.Errorf("the start after 3 is number %d", s.fence.start.Generation)
	}
	if _, err := os.Stat(filepath.Join(dir, generationName(3))); err == nil {
		t.Error("the record of an older start was left")
	}
	must.Do(t, os.Remove(filepath.Join(dir, generationName(4))))
	late := beginner(t, dir, "third", 6)
	must.Do(t, os.Remove(filepath.Join(dir, generationName(6))))
	if err := late.save(t, 1); !errors.Is(err, ErrSuperseded) ||
		!strings.Contains(err.Error(), "no such file or directory") {
		t.Errorf("without the record of the start: %v", err)
	}
}

// For any record of a start, the error has bounded length and no control characters.
func FuzzOrigin(f *testing.F) {
	f.Add(append(encode(newOrigin()), '\n'))
	f.Add([]byte(`{"host":"` + strings.Repeat("x", 3000) + "\\u001b\"}\n"))
	f.Add([]byte("{}\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		var o origin
		err := json.Unmarshal(data[:min(len(data), maxOrigin)], &o)
		text := fmt.Sprint(o)
		if err == nil && (len(text) > 4000 || strings.ContainsAny(text, "\x1b\n\r")) {
			t.Errorf("%q: %q", data, text)
		}
	})
}

// A job that a newer job has replaced stays replaced when its workers restart.
func TestJobsDoNotFight(t *testing.T) {
	dir := t.TempDir()
	begin := func(job string, first, restart int64) error {
		s, err := NewSaver(world(1)[0], Options{
			Dir: rooted(dir), RunID: fmt.Sprintf("%s-%d", job, restart),
			Start: Start{Job: job, First: first, Generation: first + restart},
		})
		if err == nil {
			err = s.Close()
		}
		return err
	}
	must.Do(t, errors.Join(begin("old", 1, 0), begin("old", 1, 1), begin("new", 3, 0)))
	for restart := range int64(5) {
		if err := begin("old", 1, restart); !errors.Is(err, ErrSuperseded) && !errors.Is(err, os.ErrExist) {
			t.Errorf("start %d of the old job: %v", 1+restart, err)
		}
	}
	if err := begin("new", 3, 1); err != nil {
		t.Errorf("the second start of the new job: %v", err)
	}
}

// A second name of the lock file may be that of a file which is not cprun's.
func TestLockWritesNoHardLink(t *testing.T) {
	dir, precious := rooted(t.TempDir()), filepath.Join(t.TempDir(), "precious")
	must.Do(t, errors.Join(os.WriteFile(precious, []byte("precious"), 0o600),
		os.Link(precious, filepath.Join(dir.Name(), lockName))))
	f := must.Have(Lock(dir, ""))
	defer f.Close()
	if text, err := os.ReadFile(precious); string(text) != "precious" {
		t.Errorf("it contains %q now, %v", text, err)
	}
	if _, err := Lock(dir, ""); !errors.Is(err, errLocked) {
		t.Errorf("a second lock: %v", err)
	}
}

// The error of a second lock names the holder.
func TestLockNamesItsHolder(t *testing.T) {
	dir := rooted(t.TempDir())
	first := must.Have(Lock(dir, "mine"))
	host, _ := os.Hostname()
	_, err := Lock(dir, "")
	if want := fmt.Sprintf("is in use by job mine, process %d on host %s", os.Getpid(), host); !errors.Is(err,
		errLocked) || !strings.Contains(err.Error(), want) {
		t.Errorf("a second lock: %v, want %q", err, want)
	}
	if _, err := Lock(dir, "other"); !errors.Is(err, errLocked) {
		t.Errorf("the lock of another job: %v", err)
	}
	if f, err := Lock(dir, "mine"); f != nil || err != nil {
		t.Errorf("a second lock of the same job: %v, %v, want none, and no error", f, err)
	}
	must.Do(t, first.Close())
	again := must.Have(Lock(dir, ""))
	defer again.Close()
	for text, want := range map[string]string{"": "is in use by a process that it does not name: ",
		`{"host":"h","pid":7}`: "is in use by process 7 on host h, since "} {
		must.Do(t, os.WriteFile(again.Name(), []byte(text), 0o600))
		if _, err := Lock(dir, "other"); !errors.Is(err, errLocked) || !strings.Contains(err.Error(), want) {
			t.Errorf("a lock with %q: %v, want %q", text, err, want)
		}
	}
}

// An old start that removes a checkpoint of its own finds that a newer start has replaced it, also if the reply of the
// file server is lost. It puts it back.
func TestRemovalPutsBackANewerCheckpoint(t *testing.T) {
	dir := t.TempDir()
	old := beginner(t, dir, "old", 1)
	beginner(t, dir, "new", 2).mustSave(t, 1)
	s := old.savers[0]
	for _, lost := range []bool{false, true} {
		if lost {
			fault := error(syscall.EIO) // of the first one
			s.dir = &hooked{store: s.dir, hook: func(call string) (err error) {
				if call == "renamed" {
					err, fault = fault, nil
				}
				return err
			}}
		}
		if err := s.remove(dirName(1)); err != nil {
			t.Errorf("reply lost: %t: %v", lost, err)
		}
		if step, reasons := latestStep(t, dir, old.params); step != 1 {
			t.Errorf("reply lost: %t: latest step is %d (passed over: %q)", lost, step, reasons)
		}
	}
}
