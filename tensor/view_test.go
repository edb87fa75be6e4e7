package tensor

import "testing"

// grid returns a view [2, 3, 4, 5] of elements that equal their own index.
func grid() View {
	xs := make([]int32, 2*3*4*5)
	for i := range xs {
		xs[i] = int32(i)
	}
	return FromSlice(xs, 2, 3, 4, 5)
}

// element reads [b, s, h, d] the way Data documents it.
func element(v View, b, s, h, d int) int32 {
	i := int64(b)*v.Stride(Batch) + int64(s)*v.Stride(Seq) + int64(h)*v.Stride(Heads) + int64(d)*v.Stride(Dim)
	return Data[int32](v)[i]
}

func TestSliceAndCopyOfStridedViews(t *testing.T) {
	v := grid().Slice(Seq, 1, 3).Slice(Heads, 2, 4).Slice(Dim, 1, 3)
	if v.Shape() != [4]int{2, 2, 2, 2} || v.IsDense() {
		t.Fatalf("%v, dense: %t", v, v.IsDense())
	}
	dst := New(I32, 2, 2, 2, 2)
	Copy(dst, v)
	for b := range 2 {
		for s := range 2 {
			for h := range 2 {
				for d := range 2 {
					want := int32(((b*3+s+1)*4+h+2)*5 + d + 1)
					if got := element(dst, b, s, h, d); got != want || element(v, b, s, h, d) != want {
						t.Errorf("element %d %d %d %d is %d in the copy, %d in the view, want %d", b, s, h, d, got,
							element(v, b, s, h, d), want)
					}
				}
			}
		}
	}
}

func TestDenseness(t *testing.T) {
	for _, c := range []struct {
		what string
		view View
		want bool
	}{
		{"whole", grid(), true},
		{"one batch element", grid().Slice(Batch, 1, 2), true},
		{"rows of one batch element", grid().Slice(Batch, 0, 1).Slice(Seq, 1, 3), true},
		{"rows of two", grid().Slice(Seq, 1, 3), false},
		{"a column", grid().Slice(Dim, 0, 1), false},
		{"nothing", grid().Slice(Dim, 2, 2), true},
	} {
		if got := c.view.IsDense(); got != c.want {
			t.Errorf("%s: dense %t, want %t", c.what, got, c.want)
		}
	}
}

func TestBytesAreThoseOfTheWindow(t *testing.T) {
	v := FromSlice([]uint8{1, 2, 3, 4, 5}, 5).Slice(Dim, 1, 4)
	if b := Bytes(v); len(b) != 3 || cap(b) != 3 || b[0] != 2 || b[2] != 4 {
		t.Errorf("bytes %v of capacity %d", b, cap(b))
	}
	if b := Bytes(v.Slice(Dim, 1, 1)); len(b) != 0 {
		t.Errorf("bytes of nothing: %v", b)
	}
}

// What lies outside its memory, or has another type, is a fault of the program.
func TestFaultsPanic(t *testing.T) {
	for what, f := range map[string]func(){
		"slice beyond the end":   func() { grid().Slice(Seq, 2, 4) },
		"view beyond the memory": func() { NewView(NewHost(16), F32, 1, [4]int{1, 1, 1, 4}, [4]int64{4, 4, 4, 1}) },
		"view before the memory": func() { NewView(NewHost(16), F32, 0, [4]int{1, 1, 1, 2}, [4]int64{1, 1, 1, -1}) },
		"another type":           func() { Data[float64](grid()) },
		"reshape with gaps":      func() { grid().Slice(Dim, 0, 2).Reshape([4]int{1, 1, 1, 48}) },
		"another size":           func() { FromSlice([]float32{1, 2}, 3) },
		"copy between shapes":    func() { Copy(New(F32, 2), New(F32, 3)) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", what)
				}
			}()
			f()
		}()
	}
}

func TestGatherAndScatterOfStridedRows(t *testing.T) {
	v := grid().Slice(Heads, 1, 3)
	part := Gather(v, []int{2, 0})
	if part.Shape() != [4]int{2, 2, 2, 5} || !part.IsDense() {
		t.Fatalf("%v, dense: %t", part, part.IsDense())
	}
	back := New(I32, 2, 3, 4, 5).Slice(Heads, 1, 3)
	Scatter(back, part, []int{2, 0})
	for b := range 2 {
		for s := range 3 {
			for h := range 2 {
				for d := range 5 {
					want := element(v, b, s, h, d)
					if s == 1 { // neither taken nor put back
						want = 0
					}
					if got := element(back, b, s, h, d); got != want {
						t.Errorf("element %d %d %d %d is %d, want %d", b, s, h, d, got, want)
					}
				}
			}
		}
	}
}
