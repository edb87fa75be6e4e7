package call

import (
	"context"
	"slices"
	"testing"

	"github.com/cprun/cprun/tensor"
)

// A laterStream makes its copies, in order, when the test calls run.
type laterStream struct {
	from []View
	done int
	got  [][]int32
}

func (s *laterStream) record() tensor.Event { return laterEvent{s, len(s.from)} }

// run makes the next n copies.
func (s *laterStream) run(n int) {
	for range n {
		s.got = append(s.got, slices.Clone(tensor.Data[int32](s.from[s.done])))
		s.done++
	}
}

type laterEvent struct {
	s  *laterStream
	at int
}

func (e laterEvent) Done() bool                   { return e.s.done >= e.at }
func (e laterEvent) Sync(_ context.Context) error { return nil }

// TestStagingKeepsWhatIsCopiedLater checks that lists are intact when the device copies them, at any delay, and that a
// device without delay needs no additional memory.
func TestStagingKeepsWhatIsCopiedLater(t *testing.T) {
	for _, behind := range []int{0, 3, 200} {
		var blocks int
		bytes := int64(0)
		s := NewStaging(func(n int64) (tensor.Memory, error) {
			blocks++
			bytes += n
			return tensor.NewHost(n), nil
		})
		d := &laterStream{}
		words := func(i int) []uint32 {
			list := make([]uint32, 8000+i%7)
			for j := range list {
				list[j] = uint32(i*len(list) + j)
			}
			return list
		}
		const calls = 1000
		for i := range calls {
			if err := s.Copy(words(i), func(from View) { d.from = append(d.from, from) }, d.record); err != nil {
				t.Fatal(err)
			}
			d.run(max(0, len(d.from)-d.done-behind))
		}
		d.run(len(d.from) - d.done)
		for i, got := range d.got {
			if want := words(i); !slices.EqualFunc(got, want, func(a int32, b uint32) bool { return uint32(a) == b }) {
				t.Fatalf("%d copies behind: list %d is another", behind, i)
			}
		}
		if limit := int64(behind+2)*4*8200 + 2*stagingBlock; len(d.got) != calls || bytes > limit {
			t.Errorf("%d copies behind: %d copies from %d bytes in %d blocks, want at most %d bytes", behind, len(d.got), bytes,
				blocks, limit)
		}
	}
}
