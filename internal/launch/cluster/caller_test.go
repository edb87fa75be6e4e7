package cluster

import (
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/cluster/wire"
	"github.com/cprun/cprun/internal/launch/waits"
)

// TestTrim checks that an ending is cut to the size of a message: the likely causes keep their last lines and waits.
func TestTrim(t *testing.T) {
	long := strings.Repeat("x", maxText)
	state := &waits.WaitState{Waits: []waits.Wait{{Op: "a", More: 1, Open: make([]waits.Open, 20)}, {Op: "b"}}}
	one := launch.Failure{Cause: long, Hint: long, Tail: []string{"last", "lines"}, WaitState: state}
	fs := slices.Repeat([]launch.Failure{one}, 300)
	fs[1].Tail = slices.Repeat([]string{long}, 5)
	fs[17].WaitState = nil
	fs[18].WaitState = &waits.WaitState{State: "ended"}
	e := launch.Ending{Failures: fs, Step: 7}
	got := trim(e)
	if len(got.Failures) != 256 || got.Step != 7 || e.Failures[0].Cause != long || len(state.Waits) != 2 {
		t.Fatalf("%d failures; the caller's own has %d waits", len(got.Failures), len(state.Waits))
	}
	for i, f := range got.Failures {
		short := strings.Repeat("x", maxText/2)
		if f.Cause != short || f.Hint != short || (f.Tail != nil) != (i < 16 && i != 1) {
			t.Errorf("failure %d: %d bytes, tail %q", i, len(f.Cause), f.Tail)
		}
		switch {
		case i < 16 && f.WaitState != state, i == 17 && f.WaitState != nil, i == 18 && f.WaitState != fs[18].WaitState:
			t.Errorf("failure %d has another state: %+v", i, f.WaitState)
		case i == 16, i == 20:
			want := []waits.Wait{{Op: "a", More: 13, Open: make([]waits.Open, 8)}}
			if !reflect.DeepEqual(f.WaitState.Waits, want) {
				t.Errorf("waits %+v", f.WaitState.Waits)
			}
		}
	}
	// The longest wait states of many ranks fit a message.
	w := waits.Wait{Op: "exchange", Label: strings.Repeat("l", 96), Open: make([]waits.Open, waits.MaxOpen)}
	full := &waits.WaitState{Host: strings.Repeat("h", 96), Waits: slices.Repeat([]waits.Wait{w}, waits.MaxWaits)}
	e.Failures = slices.Repeat([]launch.Failure{{Cause: "no progress", WaitState: full}}, 1000)
	raw, err := json.Marshal(&message{Ended: &ended{Ending: trim(e)}})
	if err != nil || len(raw) > wire.MaxFrame/2 {
		t.Errorf("%d bytes, %v", len(raw), err)
	}
}
