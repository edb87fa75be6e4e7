package state

import "testing"

func TestGarbage(t *testing.T) {
	for _, c := range []struct {
		live    int64
		percent int
		bytes   int64
	}{
		{0, 100, 1},
		{1 << 20, 100, 1 << 20},
		{4 << 20, 100, 4 << 20},
		{40 << 20, 10, 4 << 20},
		{400 << 20, 1, 4 << 20},
		{40 << 30, 1, 40 << 30 / 100},
	} {
		if percent, bytes := Garbage(c.live, 0); percent != c.percent || bytes != c.bytes {
			t.Errorf("beside %d bytes: %d %%, %d bytes; want %d, %d", c.live, percent, bytes, c.percent, c.bytes)
		}
	}
}
