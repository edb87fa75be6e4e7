package check

import (
	"strings"
	"testing"

	"github.com/cprun/cprun/tensor"
)

// A msg has the fields of comm.Message.
type msg struct {
	Peer int
	View tensor.View
}

func TestTold(t *testing.T) {
	f := func(n int) tensor.View { return tensor.New(tensor.F32, n) }
	got := Detail([]msg{{2, f(1)}, {0, f(2)}, {2, f(3)}}, []msg{{1, f(5)}})
	if want := "16 bytes to rank 2, 8 bytes to rank 0, 20 bytes from rank 1"; got != want {
		t.Errorf("told %q, want %q", got, want)
	}
	if got, want := Collective(f(3), 4), "12 bytes over 4 ranks"; got != want {
		t.Errorf("told %q, want %q", got, want)
	}
}

func TestExchange(t *testing.T) {
	r := Rules{Rank: 1, Size: 3, Memory: OnHost}
	f := func(n int) tensor.View { return tensor.New(tensor.F32, n) }
	strided := tensor.New(tensor.F32, 4, 4).Slice(tensor.Dim, 0, 2)
	for want, c := range map[string]struct{ send, recv []msg }{
		"":                                    {[]msg{{0, f(1)}, {1, f(2)}, {2, f(3)}, {1, f(0)}}, []msg{{1, f(2)}, {1, f(0)}, {2, f(9)}}},
		"send 1 names rank 3 of a group of 3": {[]msg{{0, f(1)}, {3, f(1)}}, nil},
		"receive 0 names rank -1 of a group of 3":                        {nil, []msg{{-1, f(1)}}},
		"the view of send 0 (rank 2) is an empty View without memory":    {[]msg{{2, tensor.View{}}}, nil},
		"the view of receive 0 (rank 0) is not dense":                    {nil, []msg{{0, strided}}},
		"1 messages to the own rank, 0 from it":                          {[]msg{{1, f(1)}}, []msg{{2, f(1)}}},
		"message 1 to the own rank has 12 bytes, it is received into 16": {[]msg{{1, f(1)}, {0, f(7)}, {1, f(3)}}, []msg{{1, f(1)}, {1, f(4)}}},
	} {
		err := Exchange(r, c.send, c.recv)
		if (err == nil) != (want == "") || err != nil && !strings.HasPrefix(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	if n := testing.AllocsPerRun(100, func() { _ = Exchange(r, []msg{{0, strided}}[:0], nil) }); n > 0 {
		t.Errorf("a check of nothing allocates %v times", n)
	}
}
