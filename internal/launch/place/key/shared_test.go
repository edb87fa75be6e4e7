package key

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/cprun/cprun/internal/base/files"
)

// ended returns an ended context, for an agent that tries once.
func ended() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

// share returns the key at a path.
func share(t *testing.T, path string) Key {
	t.Helper()
	k, err := Shared(ended(), path)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// program returns the path of this test binary.
func program(t *testing.T) string {
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// names lists a directory.
func names(t *testing.T, dir string) string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return strings.Join(all, " ")
}

// TestShared checks that the first agent makes the directory and a private file in it, and the others read it.
func TestShared(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, ".key")
	defer syscall.Umask(syscall.Umask(0o277)) // removes bits that the owner needs
	first := share(t, path)
	st, err := os.Stat(path)
	if err != nil || st.Mode() != 0o600 {
		t.Fatalf("mode %v, %v; want 0600", st.Mode(), err)
	}
	if again := share(t, path); again != first || first == (Key{}) {
		t.Error("a key that exists was not used again")
	}
	if named, err := File(path, nil); err != nil || named != first {
		t.Errorf("CPRUN_KEY_FILE with the same file is another key, %v", err)
	}
	if other := share(t, filepath.Join(dir, ".job-7.key")); other == first {
		t.Error("two jobs have one key")
	}
	open := func() int {
		all, err := os.ReadDir("/dev/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(all)
	}
	before := open()
	for range 3 {
		share(t, path)
		if _, err := File(path, nil); err != nil {
			t.Fatal(err)
		}
	}
	if n := open(); n != before {
		t.Errorf("%d files are open, before %d", n, before)
	}
}

func TestDirectoryIsMade(t *testing.T) {
	path := filepath.Join(t.TempDir(), "runs", "mine", ".key")
	share(t, path)
	if got := names(t, filepath.Dir(path)); got != ".key" {
		t.Errorf("the directory has %s", got)
	}
}

// TestManyAtOnce checks that agents that start at the same time get one key.
func TestManyAtOnce(t *testing.T) {
	const agents = 64
	dir := t.TempDir()
	keys := make([]string, agents)
	t.Run("goroutines", func(t *testing.T) {
		concurrently(t, filepath.Join(dir, "goroutines"), keys, func(path string) (string, error) {
			k, err := Shared(t.Context(), path)
			return fmt.Sprintf("%x", sha256.Sum256(k[:])), err
		})
	})
	t.Run("processes", func(t *testing.T) {
		concurrently(t, filepath.Join(dir, "processes"), keys, func(path string) (string, error) {
			out, err := exec.Command(program(t), "-as", "share", path).CombinedOutput()
			return strings.TrimSpace(string(out)), err
		})
	})
}

// concurrently gets the key for all agents at the same time.
func concurrently(t *testing.T, dir string, keys []string, get func(path string) (string, error)) {
	var begin, all sync.WaitGroup
	begin.Add(1)
	for i := range keys {
		all.Go(func() {
			begin.Wait()
			var err error
			if keys[i], err = get(filepath.Join(dir, ".key")); err != nil {
				t.Errorf("%s: %v", keys[i], err)
			}
		})
	}
	begin.Done()
	all.Wait()
	for i, k := range keys {
		if k != keys[0] || len(k) != 2*sha256.Size {
			t.Errorf("agent %d has another key: %q, and agent 0 %q", i, k, keys[0])
		}
	}
	if got := names(t, dir); got != ".key" {
		t.Errorf("left: %s", got)
	}
}

// TestKilledBeforeLink checks that an agent killed before it publishes its key blocks no other, and that its draft is
// removed.
func TestKilledBeforeLink(t *testing.T) {
	path := filepath.Join(t.TempDir(), ".key")
	killed := exec.Command(program(t), "-as", "draft", path)
	out, err := killed.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := killed.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err := killed.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if killed.Wait(); line != "written\n" {
		t.Fatalf("%q, %v", line, err)
	}
	if got := names(t, filepath.Dir(path)); !strings.HasPrefix(got, ".key.tmp-") || strings.Contains(got, " ") {
		t.Fatalf("the killed agent has left %s", got)
	}
	first := share(t, path)
	if got := names(t, filepath.Dir(path)); got != ".key" {
		t.Errorf("left: %s", got)
	}
	// An agent killed after another has published also leaves a draft. The published key counts.
	root, err := files.OpenDir(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	if _, err := draft(root, ".key"); err != nil {
		t.Fatal(err)
	}
	if share(t, path) != first {
		t.Error("another key")
	}
	if got := names(t, filepath.Dir(path)); got != ".key" {
		t.Errorf("left: %s", got)
	}
}

// TestLostAnswers checks an agent whose link succeeded but was reported as failed: it uses its own key. An agent whose
// draft was removed uses the published key.
func TestLostAnswers(t *testing.T) {
	dir := t.TempDir()
	root, err := files.OpenDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	own, err := draft(root, ".key")
	if err != nil {
		t.Fatal(err)
	}
	late, err := draft(root, ".key")
	if err != nil {
		t.Fatal(err)
	}
	if err := root.Link(own, ".key"); err != nil { // the request with the lost answer
		t.Fatal(err)
	}
	want, err := os.ReadFile(filepath.Join(dir, own))
	if err != nil {
		t.Fatal(err)
	}
	if err := publish(root, own, ".key"); err != nil {
		t.Errorf("the same request again: %v", err)
	}
	share(t, filepath.Join(dir, ".key")) // removes late
	if err := publish(root, late, ".key"); err == nil {
		t.Error("a draft that is gone was published")
	}
	if got, err := os.ReadFile(filepath.Join(dir, ".key")); err != nil || !bytes.Equal(got, want) {
		t.Errorf("another key, %v", err)
	}
	if got := names(t, dir); got != ".key" {
		t.Errorf("left: %s", got)
	}
}

// TestDraftOfNoLink checks that a file system without hard links keeps no drafts.
func TestDraftOfNoLink(t *testing.T) {
	dir := t.TempDir()
	root, err := files.OpenDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	temp, err := draft(root, ".key")
	if err != nil {
		t.Fatal(err)
	}
	if err := publish(root, temp, "none/.key"); err == nil || strings.Contains(cause(err).Error(), temp) {
		t.Errorf("published in a directory that is not there: %v", err)
	}
	if got := names(t, dir); got != "" {
		t.Errorf("left: %s", got)
	}
}

// TestSharedRefuses checks that an invalid key file gives an error with the path, the cause and the fix, and is not
// changed.
func TestSharedRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		part string
		make func(path string) error
	}{
		"empty":        {"0 bytes", write("", 0o600)},
		"short":        {"64 bytes", write(secret, 0o600)}, // without the newline
		"garbage":      {"65 bytes", write(strings.Replace(secret, "0", "x", 1)+"\n", 0o600)},
		"long":         {"too long", write(secret+"\n\n", 0o600)},
		"zeros":        {"different bytes", write(strings.Repeat("0", 64)+"\n", 0o600)},
		"group reads":  {"mode is 0640", write(secret+"\n", 0o640)},
		"all read":     {"mode is 0644", write(secret+"\n", 0o644)},
		"another mode": {"mode is 0400", write(secret+"\n", 0o400)},
		"a directory":  {"not a regular file", func(path string) error { return os.Mkdir(path, 0o700) }},
		"a pipe":       {"not a regular file", func(path string) error { return syscall.Mkfifo(path, 0o600) }},
		"a link to a key": {"not a regular file", func(path string) error {
			return errors.Join(write(secret+"\n", 0o600)(path+"0"), os.Symlink(filepath.Base(path)+"0", path))
		}},
		"a link to nothing": {"not a regular file", func(path string) error { return os.Symlink("nothing", path) }},
		"a file above": {"not a directory", func(path string) error {
			return write("",
				0o600)(filepath.Dir(path))
		}},
	} {
		path := filepath.Join(t.TempDir(), "run", ".key")
		if name != "a file above" {
			if err := os.Mkdir(filepath.Dir(path), 0o700); err != nil {
				t.Fatal(err)
			}
		}
		if err := c.make(path); err != nil {
			t.Fatal(err)
		}
		mark := path + draftMark + "x" // the draft of a living agent
		if name != "a file above" {
			if err := write(secret, 0o600)(mark); err != nil {
				t.Fatal(err)
			}
		}
		before, draft := state(path), state(mark)
		_, err := Shared(t.Context(), path)
		if err == nil || !strings.Contains(err.Error(), c.part) || strings.Count(err.Error(), path) != 1 ||
			!strings.Contains(err.Error(), "CPRUN_KEY_FILE") {
			t.Errorf("%s: %v, want %q and the path once", name, err, c.part)
		}
		if state(mark) != draft {
			t.Errorf("%s: the draft of another agent is gone", name)
		}
		if after := state(path); after != before {
			t.Errorf("%s: it was %s, and is %s", name, before, after)
		}
	}
}

// state returns the state of a file, to detect changes.
func state(path string) string {
	st, err := os.Lstat(path)
	if err != nil || !st.Mode().IsRegular() {
		return fmt.Sprint(err)
	}
	text, err := os.ReadFile(path)
	return fmt.Sprint(st.Mode(), string(text), err)
}

// write returns a function that writes a file with that text and mode.
func write(text string, mode fs.FileMode) func(path string) error {
	return func(path string) error {
		return errors.Join(os.WriteFile(path, []byte(text), 0o600), os.Chmod(path, mode))
	}
}

// TestSharedOfAnotherUser checks that a file of another user is refused, whatever its mode.
func TestSharedOfAnotherUser(t *testing.T) {
	path, owner := "/etc/hosts", 0
	if os.Geteuid() == 0 {
		path, owner = filepath.Join(t.TempDir(), ".key"), 65534
		if err := errors.Join(write(secret+"\n", 0o600)(path), os.Chown(path, owner, owner)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Shared(t.Context(), path); err == nil ||
		!strings.Contains(err.Error(), fmt.Sprintf("belongs to user %d", owner)) {
		t.Errorf("%v, want that it belongs to user %d", err, owner)
	}
}
