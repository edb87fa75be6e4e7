package key

import (
	"context"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestSharedIsNotSeen checks that the wait for a file that never appears, like one of another host, ends with its
// context. In /proc no name ever appears.
func TestSharedIsNotSeen(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 3*pause)
	defer cancel()
	for _, path := range []string{"/proc/.key", "/proc/run/.key"} {
		if _, err := Shared(ctx, path); err == nil || !strings.Contains(err.Error(), path) || ctx.Err() == nil {
			t.Errorf("%v, and the wait has ended: %v", err, ctx.Err())
		}
	}
}

// TestSharedWithoutPermission checks that an agent without permission for the directory or the key ends at once. root
// has all permissions, so another user tries.
func TestSharedWithoutPermission(t *testing.T) {
	dir, err := os.MkdirTemp("", "key")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, ".key")
	try := func(mode fs.FileMode, made string) {
		t.Helper()
		if err := os.Chmod(dir, mode); err != nil {
			t.Fatal(err)
		}
		c := exec.Command("/proc/self/exe", "-as", "share", path) // which another user may run, wherever it lies
		if os.Geteuid() == 0 {
			c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		}
		out, err := c.CombinedOutput()
		if c.ProcessState.ExitCode() != 2 || !strings.Contains(string(out), "permission denied") ||
			!strings.Contains(string(out), path) {
			t.Errorf("a directory of mode %v: %v, %s", mode, err, out)
		}
		if got := names(t, dir); got != made {
			t.Errorf("left: %s", got)
		}
	}
	try(0o555, "")
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	share(t, path)
	if err := os.Chmod(path, 0); err != nil {
		t.Fatal(err)
	}
	try(0o755, ".key")
}
