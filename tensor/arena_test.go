package tensor

import (
	"math/rand/v2"
	"testing"
)

// counted returns an arena over host memory, and the sizes of its allocations.
func counted(size int64) (*Arena, *[]int64) {
	var sizes []int64
	return NewArena(size, func(n int64) Memory {
		sizes = append(sizes, n)
		return NewHost(n)
	}), &sizes
}

// held returns the bytes of the device that an arena holds.
func held(a *Arena) int64 {
	n := int64(0)
	for _, b := range a.blocks {
		n += b.Bytes()
	}
	return n
}

func TestArenaRepeatsAStepInPlace(t *testing.T) {
	a, sizes := counted(0)
	step := func() (views []View) {
		defer a.Release(a.Mark())
		views = append(views, a.Alloc(F32, 100))
		inner := a.Mark()
		views = append(views, a.Alloc(F64, 3, 7), a.Alloc(U8, 1))
		a.Release(inner)
		return append(views, a.Alloc(F32, 50))
	}
	step() // finds out how much it is
	want := step()
	if want[1].Offset()*8 != want[3].Offset()*4 {
		t.Errorf("what was allocated after a release is at byte %d, want %d", want[3].Offset()*4, want[1].Offset()*8)
	}
	n := len(*sizes)
	for range 3 {
		for i, v := range step() {
			if v != want[i] {
				t.Errorf("view %d is %v at %d, in the step before %v at %d", i, v, v.Offset(), want[i],
					want[i].Offset())
			}
		}
	}
	if len(*sizes) != n {
		t.Errorf("repeated steps allocated %v", (*sizes)[n:])
	}
}

func TestArenaViewsDoNotOverlap(t *testing.T) {
	a, _ := counted(1000)
	var views []View
	for i := range 20 {
		v := a.Alloc(U8, 37*i)
		for k := range Data[uint8](v) {
			Data[uint8](v)[k] = uint8(i)
		}
		views = append(views, v)
	}
	for i, v := range views {
		for k, x := range Data[uint8](v) {
			if x != uint8(i) {
				t.Fatalf("element %d of view %d was overwritten by view %d", k, i, x)
			}
		}
	}
}

// Steps of changing sizes, as with packed documents, must not hold more and more memory.
func TestArenaHoldsNoMoreThanItsPeak(t *testing.T) {
	a, _ := counted(0)
	r := rand.New(rand.NewPCG(1, 2))
	for i := range 500 {
		mark := a.Mark()
		for range 12 {
			a.Alloc(U8, 9000+r.IntN(2000))
		}
		a.Release(mark)
		if held(a) > a.Peak()*5/4+8 { // host memory is in words
			t.Fatalf("after step %d the arena holds %d bytes, of which %d were ever used at once", i, held(a), a.Peak())
		}
	}
}

// Steps that grow a little each time must not leave a block behind each time.
func TestArenaGrowsSlowlyInFewBlocks(t *testing.T) {
	a, sizes := counted(1 << 12)
	for i := range 1000 {
		mark := a.Mark()
		a.Alloc(U8, 1<<12+256*i)
		a.Release(mark)
	}
	all := int64(0)
	for _, n := range *sizes {
		all += n
	}
	if len(*sizes) > 50 || all > 12*a.Peak() {
		t.Errorf("%d blocks of %d bytes together, of which %d were ever used at once", len(*sizes), all, a.Peak())
	}
}

func TestMeterCountsWhatAnArenaUses(t *testing.T) {
	a, _ := counted(0)
	m := NewMeter()
	for _, arena := range []*Arena{a, m} {
		arena.Alloc(F32, 1000)
		mark := arena.Mark()
		arena.Alloc(F64, 1000)
		arena.Release(mark)
		arena.Alloc(I32, 10)
	}
	if a.Peak() != m.Peak() || a.Peak() < 12000 {
		t.Errorf("peak of an arena %d, of a meter %d", a.Peak(), m.Peak())
	}
}
