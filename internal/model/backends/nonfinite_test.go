package backends

import (
	"strings"
	"testing"
)

// A version of cuDNN that drops NaN gives a warning at every level of Explain, and is chosen as before.
func TestWarningOfDroppedNaN(t *testing.T) {
	const drops, unknown = Version(91999), Version(91998)
	dropped[drops] = []string{"k NaN: lse"}
	defer delete(dropped, drops)
	for _, x := range []struct {
		cudnn Version
		want  Backend
		warns bool
	}{{drops, Fused, true}, {drops, Flash, false}, {unknown, Fused, false}} {
		p := defaults()
		p.CUDNN, p.Want = x.cudnn, x.want
		c, err := Select(p)
		if err != nil {
			t.Fatal(err)
		}
		if c.Backend != x.want || len(c.Warnings()) > 0 != x.warns {
			t.Errorf("cuDNN %s: %s with warnings %v", x.cudnn, c.Backend, c.Warnings())
		}
		for level := range 3 {
			var b strings.Builder
			if c.Explain(&b, level); strings.Contains(b.String(), "fused-drops-nan") != x.warns {
				t.Errorf("cuDNN %s, %s, level %d:\n%s", x.cudnn, x.want, level, b.String())
			}
		}
	}
	if rows, measured := Dropped(drops); len(rows) != 1 || !measured {
		t.Errorf("the record is %q, %t", rows, measured)
	}
	if rows, measured := Dropped(unknown); rows != nil || measured {
		t.Errorf("the record of a version that was not measured is %q", rows)
	}
}
