package cprun_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The version of a build names the last tag, the commit and whether files differ from it.
func TestVersion(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	run := func(env string, args ...string) string {
		t.Helper()
		c := exec.Command(args[0], args[1:]...)
		c.Dir = dir
		c.Env = append(os.Environ(), "VERSION=", "GIT_CONFIG_GLOBAL=/dev/null", env)
		out, err := c.Output()
		if err != nil {
			t.Fatalf("%v: %v", args, err)
		}
		return strings.TrimSpace(string(out))
	}
	version := func(env, want string) {
		t.Helper()
		if got := run(env, "scripts/version"); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
	script, err := os.ReadFile("scripts/version")
	if err != nil {
		t.Fatal(err)
	}
	for _, at := range []string{"scripts", "unpacked/scripts"} {
		if err := os.MkdirAll(filepath.Join(dir, at), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, at, "version"), script, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	version("", "dev")
	version("VERSION=v1.0.0", "v1.0.0")
	commit := []string{"git", "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-q", "--allow-empty", "-m", "a"}
	run("", "git", "init", "-q")
	run("", "git", "add", ".")
	run("", commit...)
	version("", "v0.0.0+"+run("", "git", "rev-parse", "--short=12", "HEAD"))
	run("", "git", "tag", "v0.4.0")
	run("", commit...)
	run("", "git", "tag", "other")
	head := run("", "git", "rev-parse", "--short=12", "HEAD")
	version("", "v0.4.0+"+head)
	version("VERSION=v1.0.0", "v1.0.0")
	if err := os.WriteFile(filepath.Join(dir, "new.go"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	version("", "v0.4.0+"+head+".changes")
	// The version of a release unpacked in a checkout is not the checkout's.
	if got := run("", "unpacked/scripts/version"); got != "dev" {
		t.Errorf("%s, want dev", got)
	}
}
