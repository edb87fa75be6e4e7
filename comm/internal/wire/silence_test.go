package wire

import (
	"testing"
	"time"
)

// TestHearing counts silence from when the count last changed, over its wrap too, and from the first look.
func TestHearing(t *testing.T) {
	start := time.Date(2026, 11, 22, 14, 3, 0, 0, time.UTC)
	var h hearing
	for i, x := range []struct {
		count       uint32
		after, want time.Duration // in seconds
	}{{5, 0, 0}, {5, 3, 3}, {6, 4, 0}, {6, 9, 5}, {^uint32(0), 10, 0}, {0, 11, 0}, {0, 21, 10}} {
		if got := h.heard(x.count, start.Add(x.after*time.Second)); got != x.want*time.Second {
			t.Errorf("look %d: silent for %v, want %vs", i, got, int(x.want))
		}
	}
}
