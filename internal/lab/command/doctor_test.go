package command

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/internal/model/machine"
)

func TestCardsThatAreAlike(t *testing.T) {
	var list []machine.GPU
	for i, name := range []string{"A", "A", "A", "B", "A", "A"} {
		list = append(list, machine.GPU{Ordinal: i, Name: name, Memory: 1 << 30})
	}
	var got []string
	for _, f := range cards(list) {
		got = append(got, f.what)
	}
	if want := []string{"GPUs 0 to 2", "GPU 3", "GPUs 4 to 5"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestSizeOfTheTokenCache(t *testing.T) {
	home := t.TempDir()
	t.Setenv("XDG_CACHE_HOME", home)
	dir := filepath.Join(home, "cprun", "tokens")
	if f := tokenCache(); f.value != "0 B in "+dir {
		t.Errorf("without entries: %s", f.value)
	}
	for _, entry := range []string{"a", "b"} {
		must.Do(t, os.MkdirAll(filepath.Join(dir, entry), 0o777))
		must.Do(t, os.WriteFile(filepath.Join(dir, entry, "tokens.bin"), make([]byte, 1024), 0o666))
	}
	if f := tokenCache(); f.value != fmt.Sprintf("2 KiB in %s; to free it between runs: rm -r %q", dir, dir) {
		t.Errorf("two entries: %s", f.value)
	}
}

// A GPU that no backend can use is a problem with its fix.
func TestAGPUWithoutABackend(t *testing.T) {
	for arch, fix := range map[int]string{75: "--device cpu", 90: ""} {
		f := attentionReport(io.Discard, machine.Machine{Arch: arch, GPUs: 1, CUDNN: 91900, Flash: 30000}, false)
		if f.what != "" != (fix != "") || !strings.Contains(f.fix, fix) {
			t.Errorf("sm%d: %+v, want the fix %q", arch, f, fix)
		}
	}
}
