package worker

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/waits"
	"github.com/cprun/cprun/tensor"
)

// A groupOf is a group with the given calls.
type groupOf []comm.Wait

func (g groupOf) Waits() []comm.Wait { return g }

// A hung is a group whose driver does not return until it is closed.
type hung chan struct{}

func (h hung) Waits() []comm.Wait { <-h; return nil }

// call returns a call of a group, with an open message if it has begun.
func call(group uint64, n uint64, begun bool, waited time.Duration) comm.Wait {
	w := comm.Wait{Op: "exchange", Group: group, Call: n, Begun: begun}
	if begun {
		w.Since = time.Now().Add(-waited)
		w.Open = []comm.Open{{Peer: 1, Since: w.Since}}
	}
	return w
}

func needed(w comm.Wait) comm.Wait { w.Needed = true; return w }
func called(w comm.Wait) comm.Wait { w.Called = true; return w }

func TestWhatARankStandsFor(t *testing.T) {
	for name, c := range map[string]struct {
		all  []comm.Wait
		busy bool
		want []uint64 // expected groups
	}{
		"nothing": {},
		"what the stream stands for": {all: []comm.Wait{needed(call(1, 1, true, 0)), call(2, 1, true, 0)},
			want: []uint64{1}},
		"the call before it": {all: []comm.Wait{call(1, 1, true, 0), needed(call(1, 2, false, 0)),
			call(2, 1, true, 0)}, want: []uint64{1}},
		"not what goes on beside it": {all: []comm.Wait{needed(call(1, 1, true, 0)), called(call(2, 1, true, 0))},
			want: []uint64{1}},
		"a caller, where nothing is done": {all: []comm.Wait{called(call(2, 1, true, 0)), call(1, 1, true, 0)},
			want: []uint64{2}},
		"no caller, where something is": {all: []comm.Wait{called(call(2, 1, true, 0))}, busy: true},
		"the oldest first": {all: []comm.Wait{needed(call(1, 1, true, time.Second)),
			needed(call(2, 1, true, time.Minute))}, want: []uint64{2, 1}},
		"those that wait for others first": {all: []comm.Wait{needed(comm.Wait{Group: 1, Begun: true}),
			needed(call(2, 1, true, 0))}, want: []uint64{2, 1}},
	} {
		var got []uint64
		for _, w := range blocking(c.all, c.busy) {
			got = append(got, w.Group)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: groups %v, want %v", name, got, c.want)
		}
	}
}

// A rank reports its phase, work and calls, and does not wait for a hung driver.
func TestWaitState(t *testing.T) {
	p := &process{Worker: &launch.Worker{Process: launch.Process{Rank: 3}}, stream: tensor.NewHostStream("compute")}
	defer p.stream.Close()
	p.where.enter("step")
	p.where.reach(7)
	p.where.join(groupOf{needed(call(1, 4, true, time.Minute)), call(1, 5, false, 0)})
	s := p.waitState()
	if s.Rank != 3 || s.Step != 7 || s.Phase != "step" || s.Work != nil || len(s.Waits) != 1 ||
		s.Waits[0].Call != 4 || s.Waits[0].Stalled < time.Minute || s.Waits[0].Open[0].Peer != 1 {
		t.Errorf("%+v", s)
	}
	stuck := make(hung)
	defer close(stuck)
	p.where.join(stuck)
	if s := p.waitState(); s.Work == nil || !strings.Contains(s.Work.Name, "driver") || len(s.Waits) != 1 {
		t.Errorf("with a driver that hangs: %+v", s)
	}
}

// A failing rank logs waits of a second or more, but not shorter ones.
func TestStoodLong(t *testing.T) {
	for _, x := range []struct {
		waits []waits.Wait
		want  bool
	}{
		{nil, false}, {[]waits.Wait{{Op: "exchange", Stalled: long - time.Millisecond}}, false},
		{[]waits.Wait{{Op: "exchange", Stalled: long}}, true},
	} {
		if got := waitedLong(&waits.WaitState{Waits: x.waits}); got != x.want {
			t.Errorf("%+v: %v", x.waits, got)
		}
	}
}
