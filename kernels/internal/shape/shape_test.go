package shape

import (
	"testing"

	"github.com/cprun/cprun/tensor"
)

// Words must not cross gaps between rows, and must be aligned to their size.
func TestWide(t *testing.T) {
	heads := func(dtype tensor.DType, dim, lo, hi int) View {
		return tensor.New(dtype, 2, 5, 4, dim).Slice(tensor.Heads, lo, hi)
	}
	odd := tensor.NewView(tensor.NewHost(1<<10), tensor.BF16, 2, [4]int{1, 3, 2, 8}, [4]int64{0, 18, 8, 1})
	for name, c := range map[string]struct {
		want  int
		views []View
	}{
		"bfloat16, dim 128":          {4, []View{heads(tensor.BF16, 128, 1, 3), tensor.New(tensor.BF16, 2, 5, 2, 128)}},
		"float32":                    {2, []View{heads(tensor.F32, 8, 0, 2)}},
		"float64":                    {1, []View{heads(tensor.F64, 8, 0, 2)}},
		"bytes":                      {8, []View{heads(tensor.U8, 16, 0, 2)}},
		"dim 6":                      {2, []View{heads(tensor.BF16, 6, 1, 2)}},
		"dim 1, as LSE has":          {1, []View{heads(tensor.F32, 1, 1, 3)}},
		"one of two is odd":          {2, []View{odd, tensor.New(tensor.BF16, 1, 3, 2, 8)}},
		"an odd beginning of a head": {1, []View{heads(tensor.BF16, 5, 1, 2)}},
	} {
		if got := Wide(c.views...); got != c.want {
			t.Errorf("%s: %d elements a word, want %d", name, got, c.want)
		}
	}
}
