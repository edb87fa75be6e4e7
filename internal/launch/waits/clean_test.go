package waits

import (
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestClean checks that a state from another process is bounded in each part, and that a valid one stays as it is.
func TestClean(t *testing.T) {
	name, long := "all-\x1b[2Jre\nduce\t", strings.Repeat("x", 2*maxText)
	bad := WaitState{
		Rank: -1, PID: -1, Step: -1, Host: name, State: name, Phase: name, PhaseTime: -1,
		Work: &Work{Name: name, Label: name, For: -1},
		Waits: slices.Repeat([]Wait{{Op: name, Label: name, Via: long, Stalled: -1, More: -1, Bytes: -1,
			Open: slices.Repeat([]Open{{Peer: -1, Bytes: -1}}, MaxOpen+1)}}, MaxWaits+1),
	}
	data, err := json.Marshal(bad)
	if err != nil {
		t.Fatal(err)
	}
	got, err := Decode(data)
	clean := "all-reduce"
	want := WaitState{
		Host: clean, State: clean, Phase: clean, Work: &Work{Name: clean, Label: clean},
		Waits: slices.Repeat([]Wait{{Op: clean, Label: clean, Via: strings.Repeat("x", maxText-3) + "...",
			Open: make([]Open, MaxOpen)}}, MaxWaits),
	}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v; want %+v", got, err, want)
	}
	valid := hop(1, 2, 3, 1, sec)
	if data, err = json.Marshal(valid); err != nil {
		t.Fatal(err)
	}
	if got, err := Decode(data); err != nil || !reflect.DeepEqual(got, valid) {
		t.Errorf("%+v, %v; want %+v", got, err, valid)
	}
	if got, err := Decode([]byte(`{"rank":1`)); err == nil || !reflect.DeepEqual(got, WaitState{}) {
		t.Errorf("%+v, %v", got, err)
	}
}

// TestLinesOfALog checks the line for each kind of wait and state.
func TestLinesOfALog(t *testing.T) {
	sending, unknown := hop(1, 2, 10, 1, sec), reduce(0, 7, 0, 1)
	sending.Waits[0].Open[0].Send = true
	some := hop(1, 2, 10, 1, sec)
	some.Waits[0].Open = slices.Repeat(some.Waits[0].Open, maxListed)
	more := hop(1, 2, 10, 1, sec)
	more.Waits[0].More = 3
	for _, c := range []struct {
		s    WaitState
		want string
	}{
		{WaitState{Rank: 1, Phase: "setup", State: "has ended"}, "rank 1, setup: has ended"},
		{WaitState{}, "rank 0: waits for no other rank"},
		{sending, "1.0 s without progress; 1,048,576 bytes to rank 2"},
		{unknown, "all-reduce, 20.0 s without progress; with rank 1"},
		{some, strings.Repeat("; 1,048,576 bytes from rank 2", maxListed)},
		{more, "1,048,576 bytes from rank 2"},
		{WaitState{Step: 7, Phase: phaseStep}, "rank 0, step 8: waits"},
		{WaitState{Phase: phaseStep}, "rank 0, step 1: waits"},
		{WaitState{Step: 7, Phase: "checkpoint"}, "rank 0, step 7, checkpoint: waits"},
		{WaitState{Phase: "setup", Work: &Work{Label: "step 3/forward/head"}}, "rank 0, step 3, forward, head: waits"},
		{WaitState{Step: 5, Phase: phaseStep, Work: &Work{Label: "step 7/backward/layer 3/gradients home"}},
			"rank 0, step 7, backward, layer 3, gradients home: waits"},
		{WaitState{Work: &Work{Label: "step 7/forward/embedding"}}, "rank 0, step 7, forward, embedding: waits"},
	} {
		if got := c.s.String(); !strings.Contains(got, c.want) || strings.HasSuffix(got, " more") {
			t.Errorf("%+v: %q, want %q", c.s, got, c.want)
		}
	}
	for label, want := range map[string]Position{
		"step 7/step 8":                     {"7", "step 8", "", ""},
		"step 7/validation after step 8":    {"7", "validation after step 8", "", ""},
		"validation after step 9/layer 1/x": {"9", "validation", "1", ""},
	} {
		if got := parsePosition(label); got != want {
			t.Errorf("%q: %+v, want %+v", label, got, want)
		}
	}
}

// TestBlame checks the least time of a wait, and that rows keep their order.
func TestBlame(t *testing.T) {
	all := []WaitState{hop(1, 0, 3, 1, 2*sec), {Rank: 0, Phase: "data"}}
	for least, lines := range map[time.Duration]int{sec: 1, 2 * sec: 1, 3 * sec: 0} {
		if got := Blame(all, least); len(got) != lines {
			t.Errorf("after %v: %q", least, got)
		}
	}
	if rows := Rows(all); len(rows) != 2 || rows[0].WaitsFor != "0" || rows[1].Operation != "data" {
		t.Errorf("%+v", rows)
	}
	if text := Table(all); all[0].Rank != 1 || !strings.Contains(text, "holds up rank 1") {
		t.Errorf("the rows are sorted in place: %s", text)
	}
	waiting := []WaitState{hop(0, 1, 3, 1, sec), {Rank: 1, Waits: []Wait{{Op: "barrier"}}}}
	want := "rank 1 holds up rank 0: it is in barrier, and waits for no rank there"
	if text := Table(waiting); !strings.Contains(text, want) {
		t.Error(text)
	}
	// The rank that holds up most comes first.
	all = []WaitState{hop(2, 0, 3, 1, sec), {Rank: 0}, {Rank: 1}, hop(3, 1, 3, 1, sec), hop(4, 3, 3, 1, sec)}
	if got := Blame(all, sec); len(got) != 2 || !strings.HasPrefix(got[0], "rank 1 ") {
		t.Errorf("%q", got)
	}
}

// TestReachedCalls checks which ranks count as arrived: those in the same call of the same group with the rank.
func TestReachedCalls(t *testing.T) {
	for name, change := range map[string]func(w *Wait){
		"the same call":     func(w *Wait) {},
		"more than it says": func(w *Wait) { w.Open, w.More = nil, 1 },
		"another group":     func(w *Wait) { w.Group++ },
		"another transport": func(w *Wait) { w.Via = "tcp" },
		"another kind":      func(w *Wait) { w.Op = "barrier" },
		"another call":      func(w *Wait) { w.Call++ },
		"other ranks":       func(w *Wait) { w.Open = []Open{{Peer: 2}} },
	} {
		a, b := reduce(0, 7, 0, 1, 2), reduce(1, 7, 0, 1, 2)
		change(&b.Waits[0])
		want := "1, 2"
		if name == "the same call" || name == "more than it says" {
			want = "2"
		}
		if got := Rows([]WaitState{a, b})[0].WaitsFor; got != want {
			t.Errorf("%s: waits for %q, want %q", name, got, want)
		}
	}
}
