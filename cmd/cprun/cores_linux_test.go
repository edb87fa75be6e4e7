//go:build !portable

package main

import (
	"errors"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// cprun warns once if a batch system binds the ranks to fewer cores than ranks.
func TestCrowdedRanks(t *testing.T) {
	t.Parallel()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var all, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		t.Fatal(err)
	}
	for core := 0; one.Count() == 0; core++ {
		if all.IsSet(core) {
			one.Set(core)
		}
	}
	c := process(t, "--device", "cpu", "--nproc", "2", "--run-dir", filepath.Join(t.TempDir(), "run"), small(t, 2))
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		t.Fatal(err)
	}
	said, err := c.CombinedOutput()
	if err := errors.Join(err, unix.SchedSetaffinity(0, &all)); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	cores, err := filepath.Glob("/sys/devices/system/cpu/cpu[0-9]*")
	want := min(1, len(cores)-1) // a host with one core has no fix
	if n := strings.Count(string(said), "--cpus-per-task=2"); n != want || err != nil {
		t.Errorf("%d warnings, want %d, %v\n%s", n, want, err, said)
	}
}
