package launch

import (
	"os"
	"strconv"
	"strings"
	"testing"
)

// FuzzEnvironment checks that the error names each variable with an invalid value, on its own line, and no other.
func FuzzEnvironment(f *testing.F) {
	f.Add("0", "yes", "1", "2")
	f.Add("", "0x1", "\x1b[31m\n", "-9223372036854775808")
	f.Fuzz(func(t *testing.T, flash, fused, debug, level string) {
		values := map[string]string{envFlashAttn: flash, envFusedAttn: fused, envDebug: debug, envDebugLevel: level}
		e, err := attentionEnv(func(name string) (string, bool) { v, ok := values[name]; return v, ok })
		bad := 0
		for name, v := range values {
			_, fault := strconv.ParseInt(v, 10, 32)
			if fault != nil {
				bad++
			}
			if told := err != nil && strings.Contains(err.Error(), name+"="); told != (fault != nil) {
				t.Errorf("%s=%q: told %v, %v", name, v, told, err)
			}
		}
		if err != nil && strings.Count(err.Error(), "\n") != bad-1 || e.Debug < 0 && bad == 0 ||
			e.Debug > 2 && bad == 0 {
			t.Errorf("%q: %+v, %v", values, e, err)
		}
		for _, v := range values {
			if strings.ContainsAny(quoteUnusual(v), "\n\x1b") {
				t.Errorf("%q is shown as %s", v, quoteUnusual(v))
			}
		}
	})
}

// FuzzControlGroups reads arbitrary control group files, as a container may have.
func FuzzControlGroups(f *testing.F) {
	f.Add("0::/job/a\n", "oom_kill 2\n", "max\n")
	f.Add("4:memory:/slurm\n0::/../x\n:::\n", "oom_kill -\n\xff", "-1")
	root, self := f.TempDir(), ""
	f.Fuzz(func(t *testing.T, groups, events, most string) {
		dir, write := root, func(name, text string) string {
			path := root + "/" + name
			writeFile(t, path, text)
			return path
		}
		self = write("self", groups)
		write("memory.events", events)
		write("memory.max", most)
		oomKills(self, dir)
		if n := memoryLimit(self, dir); n < 0 {
			t.Errorf("%q: a limit of %d", most, n)
		}
	})
}

func writeFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
