package backends

import (
	"strings"
	"testing"
)

// A version of cuDNN that drops NaN gives a warning at every level of Explain, and is chosen as before.
func TestWarningOfDroppedNaN(t *testing.T) {
	const drops, unknown = Version(91999), Version(91998)
	Dropped[drops] = []string{"k NaN: lse"}
	defer delete(Dropped, drops)
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
}
