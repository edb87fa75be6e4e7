package backends_test

import (
	"testing"

	"github.com/cprun/cprun/attention/backends"
	"github.com/cprun/cprun/attention/qkv"
)

func TestParamsWithLayout(t *testing.T) {
	for _, c := range []struct {
		name       string
		fit        qkv.Fit
		contiguous bool
		mixed      bool
	}{
		{"sb(h+2h_g)d", qkv.Exact, true, false}, {"sb(h+2h_g)d", qkv.Inside, false, false},
		{"thd_t2hd", qkv.Exact, true, false}, {"sbhd_bshd_bshd", qkv.Exact, true, true},
		{"sbhd_bshd_bshd", qkv.Inside, false, true}, {"bshd_bshd_bshd", qkv.Strided, false, false},
	} {
		l := parsed(t, c.name)
		p := backends.Params{Heads: 3}.WithLayout(l, c.fit)
		if want := (backends.Params{Heads: 3, Format: l.Q, Packing: l.Packing, Contiguous: c.contiguous, MixedFormats: c.mixed}); p != want {
			t.Errorf("%v, %v: %+v", l, c.fit, p)
		}
	}
}

func parsed(t *testing.T, name string) qkv.Layout {
	t.Helper()
	l, err := qkv.Parse(name)
	if err != nil {
		t.Fatal(err)
	}
	return l
}
