package source

import "testing"

// sharedA100 is the shared memory of a block, in bytes, on an A100. Other GPUs have SmallShared or at least as much.
const sharedA100 = 163 << 10

// passes holds the shared memory that each pass of a shape needs.
var passes = map[string]func(FlashShape) int{
	"forward": FlashShape.ForwardShared, "backward": FlashShape.BackwardShared, "dq": FlashShape.DQShared,
}

// TestFlashShapes checks that every pair of head dims has a shape for every pass on every GPU.
func TestFlashShapes(t *testing.T) {
	for name, needs := range passes {
		for _, shared := range []int{SmallShared, sharedA100} {
			for _, single := range []bool{false, true} {
				for qk := 1; qk <= FlashMaxDim; qk++ {
					for v := 1; v <= FlashMaxDim; v++ {
						s, ok := FlashShapeFor(single, qk, v, shared, needs)
						if !ok || s.Float32 != single || s.QK < qk || s.V < v || needs(s) > shared {
							t.Fatalf(
								"float32 %t, head dims %d and %d, %s, %d bytes: shape %+v",
								single,
								qk,
								v,
								name,
								shared,
								s,
							)
						}
					}
				}
				for _, dims := range [][2]int{{FlashMaxDim + 1, 64}, {64, FlashMaxDim + 1}} {
					if s, ok := FlashShapeFor(single, dims[0], dims[1], shared, needs); ok {
						t.Errorf("head dims %v get shape %+v", dims, s)
					}
				}
			}
		}
	}
	if s, ok := FlashShapeFor(false, 192, 128, SmallShared, FlashShape.BackwardShared); !ok || s.QK != 192 ||
		s.V != 128 {
		t.Errorf("head dims 192 and 128 get shape %+v", s)
	}
}

// TestFlashSmallShapes checks that only GPUs with little shared memory use the second shapes, and that each pass
// requires only its own shared memory.
func TestFlashSmallShapes(t *testing.T) {
	for i, s := range FlashShapes {
		before := FlashShapes[max(i-1, 0)]
		small := i > 0 && s.Float32 == before.Float32 && s.QK == before.QK && s.V == before.V
		for name, needs := range passes {
			if n := needs(s); n > sharedA100 || small && n > SmallShared {
				t.Errorf("%+v, %s: %d bytes of shared memory", s, name, n)
			}
			if got, _ := FlashShapeFor(s.Float32, s.QK, s.V, sharedA100, needs); (got != s) != small {
				t.Errorf("float32 %t, head dims %d and %d, %s: an A100 gets %+v", s.Float32, s.QK, s.V, name, got)
			}
		}
		if small && before.BackwardShared() <= SmallShared {
			t.Errorf("%+v is never chosen", s)
		}
	}
	const some = 66 << 10 // enough for the forward pass only
	if _, ok := FlashShapeFor(false, 128, 128, some, FlashShape.ForwardShared); !ok {
		t.Error("a forward pass is refused for what a backward pass needs")
	}
	if s, ok := FlashShapeFor(false, 128, 128, some, FlashShape.BackwardShared); ok {
		t.Errorf("a backward pass gets %+v, which takes %d bytes", s, s.BackwardShared())
	}
}
