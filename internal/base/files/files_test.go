package files

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/internal/base/must"
)

// irregular makes one name of each kind that is not a regular file, and returns the names.
func irregular(t *testing.T, dir string) []string {
	t.Helper()
	must.Do(t, unix.Mkfifo(filepath.Join(dir, "pipe"), 0o600))
	must.Do(t, os.Mkdir(filepath.Join(dir, "folder"), 0o700))
	l := must.Have(net.Listen("unix", filepath.Join(dir, "socket")))
	t.Cleanup(func() { l.Close() })
	return []string{"pipe", "folder", "socket"}
}

func root(t *testing.T, dir string) *os.Root {
	t.Helper()
	r := must.Have(Make(dir))
	t.Cleanup(func() { r.Close() })
	return r
}

// The pipe has no writer: without O_NONBLOCK the test would hang.
func TestOnlyRegularFilesAreOpened(t *testing.T) {
	dir := t.TempDir()
	r := root(t, dir)
	for _, name := range irregular(t, dir) {
		if f, err := Open(filepath.Join(dir, name)); !errors.Is(err, ErrIrregular) ||
			!strings.Contains(err.Error(), name) {
			t.Errorf("Open of a %s: %v, %v", name, f, err)
		}
		if f, err := OpenIn(r, name); !errors.Is(err, ErrIrregular) ||
			!strings.Contains(err.Error(), filepath.Join(dir, name)) {
			t.Errorf("OpenIn of a %s: %v, %v", name, f, err)
		}
		if f, err := Append(r, name); err == nil {
			t.Errorf("Append to a %s: %v", name, f)
		}
	}
	if _, err := Open("/dev/zero"); !errors.Is(err, ErrIrregular) {
		t.Errorf("Open of a device: %v", err)
	}
	if _, err := Open(filepath.Join(dir, "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Open of nothing: %v", err)
	}
	// Replacing a file between the check and the open is also detected.
	pipe := must.Have(os.OpenFile(filepath.Join(dir, "pipe"), readFlags, 0))
	if _, err := regular("pipe", pipe, nil); !errors.Is(err, ErrIrregular) {
		t.Errorf("a pipe that is open: %v", err)
	}
}

func TestReadHasABound(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	must.Do(t, os.WriteFile(path, make([]byte, 10), 0o600))
	if data, err := Read(path, 10); err != nil || len(data) != 10 {
		t.Errorf("10 bytes of 10: %d, %v", len(data), err)
	}
	if _, err := ReadIn(root(t, dir), "file", 9); !errors.Is(err, ErrTooLong) {
		t.Errorf("10 bytes of 9: %v", err)
	}
	if data, err := Read("/proc/self/status", 1<<20); err != nil || len(data) == 0 { // its size is 0
		t.Errorf("a file of /proc: %d bytes, %v", len(data), err)
	}
	if _, err := Read("/proc/self/status", 5); !errors.Is(err, ErrTooLong) {
		t.Errorf("a file of /proc beyond the bound: %v", err)
	}
}

// links makes a directory with links to files and directories outside of it.
func links(t *testing.T) (dir, outside string) {
	t.Helper()
	dir, outside = filepath.Join(t.TempDir(), "run"), t.TempDir()
	must.Do(t, os.Mkdir(dir, 0o755))
	must.Do(t, os.WriteFile(filepath.Join(outside, "file"), []byte("precious"), 0o600))
	for name, to := range map[string]string{"file": filepath.Join(outside, "file"), "new": filepath.Join(outside, "new"),
		"folder": outside} {
		must.Do(t, os.Symlink(to, filepath.Join(dir, name)))
	}
	must.Do(t, os.Link(filepath.Join(outside, "file"), filepath.Join(dir, "hard")))
	return dir, outside
}

func text(s string) func(io.Writer) error {
	return func(w io.Writer) error {
		_, err := io.WriteString(w, s)
		return err
	}
}

func TestNoLinkIsFollowedOutside(t *testing.T) {
	dir, outside := links(t)
	r := root(t, dir)
	for _, name := range []string{"file", "new", "hard", "folder/file"} {
		if f, err := Append(r, name); err == nil {
			t.Errorf("Append to %s: %s", name, f.Name())
		}
	}
	for _, name := range []string{"file", "folder/file"} {
		if _, err := ReadIn(r, name, 100); err == nil || !strings.Contains(err.Error(), "leads out of the directory") {
			t.Errorf("ReadIn of %s: %v", name, err)
		}
	}
	if _, err := Sub(r, "folder"); err == nil || !strings.Contains(err.Error(), "leads out of the directory") {
		t.Errorf("Sub of a link: %v", err)
	}
	if err := Write(r, "folder/file", text("x")); err == nil {
		t.Error("a file was written behind a link")
	}
	for _, name := range []string{"file", "new", "hard"} { // the link is replaced, not its target
		must.Do(t, Write(r, name, text("ours")))
		if data, err := ReadIn(r, name, 100); err != nil || string(data) != "ours" {
			t.Errorf("%s holds %q, %v", name, data, err)
		}
	}
	if data, err := os.ReadFile(filepath.Join(outside, "file")); err != nil || string(data) != "precious" {
		t.Errorf("the file outside holds %q, %v", data, err)
	}
	if left, err := os.ReadDir(outside); err != nil || len(left) != 1 {
		t.Errorf("outside there are %v, %v", left, err)
	}
}

// With umask 0, only the user may write. With umask 077, only the user may read.
func TestModes(t *testing.T) {
	for umask, want := range map[int][3]os.FileMode{0: {0o755, 0o644, 0o600}, 0o077: {0o700, 0o600, 0o600}} {
		t.Run(fmt.Sprintf("%03o", umask), func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "a", "run")
			defer syscall.Umask(syscall.Umask(umask))
			r := root(t, dir)
			inner := must.Have(Sub(r, "inner"))
			defer inner.Close()
			must.Do(t, Write(inner, "file", text("x")))
			log := must.Have(Append(inner, "log"))
			defer log.Close()
			for name, mode := range map[string]os.FileMode{"..": want[0], ".": want[0], "inner": want[0], "inner/file": want[1],
				"inner/log": want[2]} {
				if st, err := os.Stat(filepath.Join(dir, name)); err != nil || st.Mode().Perm() != mode {
					t.Errorf("%s has mode %v, want %v", name, st.Mode().Perm(), mode)
				}
			}
		})
	}
}

func TestDraftsLeaveNothing(t *testing.T) {
	dir := t.TempDir()
	r := root(t, dir)
	failed := errors.New("failed")
	if err := Write(r, "file", func(io.Writer) error { return failed }); err == nil {
		t.Error("a failed write is no error")
	}
	d := must.Have(Create(r, "file"))
	must.Do(t, d.Discard())
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("left are %v", left)
	}
}

func TestWriteToKeepsWhatIsNoFile(t *testing.T) {
	dir := t.TempDir()
	for _, name := range irregular(t, dir) {
		if err := WriteTo(filepath.Join(dir, name), text("x")); !errors.Is(err, ErrIrregular) {
			t.Errorf("written in place of a %s: %v", name, err)
		}
	}
	must.Do(t, WriteTo(filepath.Join(dir, "file"), text("x")))
}

func FuzzModest(f *testing.F) {
	f.Add([]byte(`{"a":[1,2,{"b":"x,y"}]}`))
	f.Add([]byte(`"\`))
	f.Fuzz(func(t *testing.T, json []byte) {
		commas := 0
		for _, c := range json {
			if c == ',' || c == ':' || c == '[' || c == '{' {
				commas++
			}
		}
		if err := Modest(json, commas+1); err != nil {
			t.Errorf("%q: %v", json, err)
		}
	})
}

func TestModest(t *testing.T) {
	for json, n := range map[string]int{`1`: 1, `[1,2,3]`: 4, `{"a":"x,\",y","b":[]}`: 6} {
		if Modest([]byte(json), n) != nil || Modest([]byte(json), n-1) == nil {
			t.Errorf("%s does not have %d values", json, n)
		}
	}
}
