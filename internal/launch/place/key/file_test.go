package key

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

const secret = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

func TestFile(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string, mode fs.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	want, err := File(write("key", secret+"\n", 0o400), nil)
	if err != nil || want == (Key{}) {
		t.Fatal(err)
	}
	link := filepath.Join(dir, "link") // like a mounted secret of Kubernetes
	if err := os.Symlink("key", link); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{write("windows", secret+"\r\n", 0o600), write("bare", secret, 0o600), link} {
		if k, err := File(path, nil); err != nil || k != want {
			t.Errorf("%s: another key, %v", path, err)
		}
	}
	if k, err := File("-", strings.NewReader(secret+"\n")); err != nil || k != want {
		t.Errorf("stdin: another key, %v", err)
	}
	for _, text := range []string{secret[:minSecret], strings.Repeat("01234567", 4), strings.Repeat(secret, maxSecret/len(secret))} {
		if _, err := File("-", strings.NewReader(text)); err != nil {
			t.Errorf("a secret at a limit: %v", err)
		}
	}
	if k, err := File(write("other", secret+"0", 0o600), nil); err != nil || k == want {
		t.Errorf("another file is the same key, %v", err)
	}
	for part, path := range map[string]string{
		"mode is 0640":           write("group", secret, 0o640),
		"mode is 0604":           write("all", secret, 0o604),
		"has 31 bytes":           write("short", secret[:31]+"\n", 0o600),
		"different bytes":        write("zeros", strings.Repeat("01", 40), 0o600),
		"too long":               write("long", strings.Repeat(secret, 100), 0o600),
		"no such file":           filepath.Join(dir, "none"),
		"not a regular file":     dir,
		`CPRUN_KEY_FILE="\x1b[2`: "\x1b[2J",
	} {
		_, err := File(path, nil)
		if err == nil || !strings.Contains(err.Error(), part) || !strings.Contains(err.Error(), "openssl rand") ||
			strings.Contains(err.Error(), secret[:8]) {
			t.Errorf("%s: %v, want %q", path, err, part)
		}
	}
	for part, text := range map[string]string{"has 3 bytes": "key\n", "more than 4096": strings.Repeat(secret, 100)} {
		if _, err := File("-", strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("stdin: %v, want %q", err, part)
		}
	}
}

// An info is a file of some user.
type info struct {
	mode fs.FileMode
	uid  uint32
}

func (i info) Name() string       { return "key" }
func (i info) Size() int64        { return 64 }
func (i info) Mode() fs.FileMode  { return i.mode }
func (i info) ModTime() time.Time { return time.Time{} }
func (i info) IsDir() bool        { return false }
func (i info) Sys() any           { return &syscall.Stat_t{Uid: i.uid} }

func TestPrivate(t *testing.T) {
	for _, c := range []struct {
		info
		good bool
	}{
		{info{0o600, 1000}, true}, {info{0o400, 1000}, true}, {info{0o640, 1000}, false}, {info{0o604, 1000}, false},
		{info{0o400, 0}, true}, {info{0o440, 0}, true}, {info{0o460, 0}, false}, {info{0o444, 0}, false},
		{info{0o600, 1001}, false},
	} {
		if err := private(c.info, 1000); (err == nil) != c.good {
			t.Errorf("mode %#o of user %d for user 1000: %v", c.mode, c.uid, err)
		}
	}
	if err := private(info{0o440, 0}, 0); err == nil {
		t.Error("a file of root that its group reads is good for root")
	}
}

// TestKeyIsNotPrinted checks that no verb prints a key.
func TestKeyIsNotPrinted(t *testing.T) {
	k := Key{1, 2, 3, 4}
	for _, verb := range []string{"%v", "%+v", "%#v", "%x", "%X", "%s", "%q", "%d"} {
		if got := fmt.Sprintf(verb, k); got != "(a key)" {
			t.Errorf("%s: %s", verb, got)
		}
		if got := fmt.Sprintf(verb, struct{ K *Key }{&k}); strings.Contains(got, fmt.Sprintf("%x", k[:4])) {
			t.Errorf("%s: %s", verb, got)
		}
	}
}
