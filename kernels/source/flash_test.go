package source

import "testing"

// The shared memory of a block, in bytes, on an A100, the least of those that are compiled for.
const sharedA100 = 163 << 10

func TestFlashShapes(t *testing.T) {
	for _, s := range FlashShapes {
		for name, n := range map[string]int{"forward": s.ForwardShared(), "backward": s.BackwardShared(), "dq": s.DQShared()} {
			if n > sharedA100 {
				t.Errorf("%d and %d, %s: %d bytes of shared memory; an A100 has %d", s.QK, s.V, name, n, sharedA100)
			}
		}
	}
	for qk := 1; qk <= 256; qk++ {
		for v := 1; v <= 256; v++ {
			s, ok := FlashShapeFor(qk, v)
			if !ok || s.QK < qk || s.V < v {
				t.Fatalf("head dims %d and %d get shape %+v", qk, v, s)
			}
		}
	}
	if s, ok := FlashShapeFor(192, 128); !ok || s.QK != 192 || s.V != 128 {
		t.Errorf("head dims 192 and 128 get shape %+v", s)
	}
	if _, ok := FlashShapeFor(257, 64); ok {
		t.Error("a head dim of 257 gets a shape")
	}
}
