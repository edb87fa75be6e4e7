package backends

import (
	"regexp"
	"testing"
)

var installs = regexp.MustCompile(`Install cuDNN (\d+\.\d+\.\d+) or newer`)

// TestFixesNameVersionsThatHelp checks that a fix names a version outside its rule's range, and that every rule with a
// last version names one.
func TestFixesNameVersionsThatHelp(t *testing.T) {
	for _, r := range Rules() {
		if r.Backend != Fused || r.Since == 0 && r.Until == 0 {
			continue
		}
		m := installs.FindStringSubmatch(r.Fix)
		if m == nil {
			if r.Until != 0 {
				t.Errorf("%s ends with cuDNN %s and its fix names no version: %s", r.ID, r.Until, r.Fix)
			}
			continue
		}
		v, err := ParseVersion(m[1])
		if err != nil {
			t.Fatal(err)
		}
		if r.Until == 0 || v < r.Until {
			t.Errorf("%s speaks in [%s, %s): its fix names %s", r.ID, r.Since, r.Until, v)
		}
		if v >= V(9, 10, 0) && v < V(9, 10, 2) {
			t.Errorf("%s: its fix names %s, which is banned", r.ID, v)
		}
	}
}
