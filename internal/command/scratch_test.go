package command

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/cprun/cprun/internal/launch"
)

// What a killed command has left goes with the next of its kind; what a living one has, and what a
// report names, stays.
func TestScratchOfKilledCommands(t *testing.T) {
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	make := func() *scratch {
		t.Helper()
		s, err := newScratch("cprun-test-")
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	killed, failed, done, alive := make(), make(), make(), make()
	killed.lock.Close() // as the kernel does
	failed.end(launch.ExitFailed)
	done.end(launch.ExitDone)
	foreign := filepath.Join(tmp, "cprun-test-of-somebody")
	if err := os.Mkdir(foreign, 0o755); err != nil {
		t.Fatal(err)
	}
	next := make()
	for path, want := range map[string]bool{killed.path: false, failed.path: true, done.path: false, alive.path: true, foreign: true, next.path: true} {
		if _, err := os.Stat(path); (err == nil) != want {
			t.Errorf("%s is there: %t, want %t", path, err == nil, want)
		}
	}
	alive.remove()
	next.remove()
	if left, err := filepath.Glob(filepath.Join(tmp, "*")); err != nil || len(left) != 2 {
		t.Errorf("left: %q, %v; want the failed one and the foreign one", left, err)
	}
}
