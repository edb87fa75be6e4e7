package waits

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"
)

const sec = time.Second

// hop returns a rank that waits for a message of 1 MiB in a hop.
func hop(rank, peer int, layer, hop int, stood time.Duration) WaitState {
	return WaitState{Rank: rank, Host: "node-a", PID: 4700 + rank, Step: 11, Phase: "step", PhaseTime: 40 * sec,
		Waits: []Wait{{
			Op: "exchange", Label: fmt.Sprintf("step 12/forward/layer %d/hop %d owner 0", layer, hop),
			Group: 3, Call: 9, Bytes: 1 << 20, Stalled: stood,
			Open: []Open{{Peer: peer, Bytes: 1 << 20}},
		}}}
}

func check(t *testing.T, all []WaitState, want string) {
	t.Helper()
	if got := Table(all); got != strings.TrimPrefix(want, "\n") {
		t.Errorf("got\n%s\nwant%s", got, want)
	}
}

// TestAChainEndsAtTheRankThatStands checks that the table follows a chain of waits to the rank that waits for none.
func TestAChainEndsAtTheRankThatStands(t *testing.T) {
	stopped := WaitState{Rank: 2, Host: "node-b", PID: 4702, State: "is stopped by a signal or a debugger"}
	check(t, []WaitState{hop(1, 2, 10, 1, 31200*time.Millisecond), stopped, hop(0, 1, 10, 2, 30*sec)}, `
  rank  host     pid  step  pass     layer  hop  operation                             waits for      bytes     s
     0  node-a  4700    12  forward     10    2  exchange                              1          1,048,576  30.0
     1  node-a  4701    12  forward     10    1  exchange                              2          1,048,576  31.2
     2  node-b  4702     -  -            -    -  is stopped by a signal or a debugger  -                  -     -
cprun: rank 2 holds up rank 1, and by that rank 0: it is stopped by a signal or a debugger
`)
}

func TestWhatARankIsAt(t *testing.T) {
	busy := WaitState{
		Rank:      0,
		Step:      11,
		Phase:     "step",
		PhaseTime: 9 * sec,
		Work:      &Work{Name: "attention forward", Label: "step 12/forward/layer 3/hop 0 owner 0", For: 8 * sec},
	}
	disk := WaitState{Rank: 3, Step: 12, Phase: "checkpoint", PhaseTime: 75 * sec}
	check(t, []WaitState{busy, hop(1, 0, 3, 1, sec), hop(2, 3, 3, 1, sec), disk}, `
  rank  host     pid  step  pass        layer  hop  operation          waits for      bytes     s
     0  -          -    12  forward         3    0  attention forward  -                  -   8.0
     1  node-a  4701    12  forward         3    1  exchange           0          1,048,576   1.0
     2  node-a  4702    12  forward         3    1  exchange           3          1,048,576   1.0
     3  -          -    12  checkpoint      -    -  checkpoint         -                  -  75.0
cprun: rank 0 holds up rank 1: it is at attention forward for 8.0 s (step 12, forward, layer 3, hop 0)
cprun: rank 3 holds up rank 2: it is at checkpoint for 75.0 s (step 12, checkpoint)
`)
	if got := Table([]WaitState{busy}); !strings.HasSuffix(got, "cprun: no rank waits for another\n") ||
		strings.Contains(got, "bytes") {
		t.Error(got)
	}
}

func TestACycleIsNamed(t *testing.T) {
	all := []WaitState{
		hop(0, 1, 3, 1, 31*sec),
		hop(1, 2, 3, 1, 30*sec),
		hop(2, 0, 3, 1, 32*sec),
		hop(3, 0, 3, 1, 33*sec),
	}
	want := "\ncprun: ranks 0 -> 1 -> 2 -> 0 wait for each other, for 30.0 s: "
	if got := Table(all); !strings.Contains(got, want) || strings.Count(got, "cprun:") != 1 {
		t.Error(got)
	}
	// A short wait is normal while data is in transit, and gets another text.
	_, long, _ := strings.Cut(Table(all), "30.0 s: ")
	all = []WaitState{hop(0, 1, 3, 1, sec), hop(1, 0, 3, 1, sec)}
	_, short, ok := strings.Cut(Table(all), "cprun: ranks 0 -> 1 -> 0 wait for each other, for 1.0 s: ")
	if !ok || short == long {
		t.Errorf("%q, %q", short, long)
	}
}

// reduce returns a rank in a collective with known participants only.
func reduce(rank, call int, ranks ...int) WaitState {
	w := Wait{
		Op:         "all-reduce",
		Label:      "step 4/backward/layer 1",
		Group:      2,
		Via:        "nccl",
		Call:       uint64(call),
		Unresolved: true,
		Bytes:      400,
		Stalled:    20 * sec,
	}
	for _, p := range ranks {
		if p != rank {
			w.Open = append(w.Open, Open{Peer: p})
		}
	}
	return WaitState{Rank: rank, Step: 3, Phase: "step", Waits: []Wait{w}}
}

// TestThoseWhoHaveComeAreNotBlamed checks that ranks that report to be in a call are not blamed for it.
func TestThoseWhoHaveComeAreNotBlamed(t *testing.T) {
	away := WaitState{Rank: 1, Step: 3, Phase: "step", PhaseTime: 21 * sec}
	all := []WaitState{reduce(0, 7, 0, 1, 2, 3), away, reduce(2, 7, 0, 1, 2, 3), reduce(3, 7, 0, 1, 2, 3)}
	if got := Table(all); !strings.Contains(
		got,
		"cprun: rank 1 holds up ranks 0, 2, 3: it is at its own work for 21.0 s (step 4)\n",
	) {
		t.Error(got)
	}
	// A rank in an earlier call has not reached this one either.
	all[3] = reduce(3, 6, 1, 3)
	check(t, all, `
  rank  step  pass      layer  operation     waits for  bytes     s
     0     4  backward      1  all-reduce    1, 3         400  20.0
     1     4  -             -  its own work  -              -  21.0
     2     4  backward      1  all-reduce    1, 3         400  20.0
     3     4  backward      1  all-reduce    1            400  20.0
cprun: rank 1 holds up ranks 0, 2, 3: it is at its own work for 21.0 s (step 4)
`)
	// Two ranks in the same exchange may have made different numbers of exchanges.
	a, b := reduce(0, 5, 0, 1), reduce(1, 6, 1, 0, 2)
	a.Waits[0].Op, b.Waits[0].Op = "exchange", "exchange"
	if got := Table([]WaitState{a, b}); !strings.Contains(
		got,
		"cprun: rank 2 holds up rank 1, and by that rank 0: ",
	) {
		t.Error(got)
	}
}

func TestALongTable(t *testing.T) {
	const n = 300
	var all []WaitState
	for r := range n {
		all = append(all, hop(r, (r+1)%n, 3, 1, 40*sec))
	}
	if got := Table(all); strings.Count(got, "\n") != n+2 ||
		!strings.Contains(got, "ranks 0 -> 1 -> 2 -> 3 -> 4 -> 5 -> 6 -> 7 -> (292 more) -> 0 wait") {
		t.Error(got[len(got)-300:])
	}
	all[n-1] = WaitState{Rank: n - 1, State: "does not answer"}
	if got := Table(all); !strings.HasSuffix(
		got,
		"cprun: rank 299 holds up rank 298, and by that ranks 0-297: it does not answer\n",
	) {
		t.Error(got[len(got)-300:])
	}
	// Long lists are shortened.
	var opens []Open
	for p := 1; p < n; p += 2 {
		opens = append(opens, Open{Peer: p})
	}
	all = []WaitState{{Waits: []Wait{{Op: "barrier", Open: opens, Stalled: sec}}}}
	got := Table(all)
	if !strings.Contains(got, "1, 3, 5, 7, 9, 11, 144 more") ||
		!strings.Contains(got, "cprun: 146 ") ||
		len(got) > 1000 {
		t.Error(got)
	}
}

func TestPlaces(t *testing.T) {
	for label, want := range map[string]Position{
		"step 7/forward/layer 3/hop 2 owner 1":    {"7", "forward", "3", "2"},
		"step 7/backward/layer 3/gradients home":  {"7", "backward", "3", "home"},
		"step 7/forward/layer 3/hop 1 all others": {"7", "forward", "3", "1"},
		"step 7/backward/head":                    {"7", "backward", "head", ""},
		"step 7/optimizer":                        {"7", "optimizer", "", ""},
		"validation after step 9/forward/layer 0": {"9", "validation", "0", ""},
		"":            {},
		"///":         {},
		"step /layer": {"", "layer", "", ""},
	} {
		if got := parsePosition(label); got != want {
			t.Errorf("%q: %+v, want %+v", label, got, want)
		}
	}
}

func TestOneLineForALog(t *testing.T) {
	s := hop(1, 2, 10, 1, 31*sec)
	want := "rank 1, step 12, forward, layer 10, hop 1: exchange, 31.0 s without progress; 1,048,576 bytes from " +
		"rank 2"
	if got := s.String(); got != want {
		t.Errorf("%q, want %q", got, want)
	}
	s.Waits[0].Open = append(s.Waits[0].Open, make([]Open, 20)...)
	if got := s.String(); !strings.HasSuffix(got, "; 13 more") || len(got) > 500 {
		t.Errorf("%q", got)
	}
	s = WaitState{Rank: 3, Phase: "setup"}
	if got := s.String(); got != "rank 3, setup: waits for no other rank" {
		t.Errorf("%q", got)
	}
}

// FuzzStanding checks that the table has one line for each rank, of bounded length and without control characters.
func FuzzStanding(f *testing.F) {
	for _, s := range []WaitState{hop(1, 2, 3, 1, sec), reduce(1, 2, 0, 1),
		{Rank: 1, Work: &Work{Name: "copy\x1b[31m\n"}}} {
		b, err := json.Marshal(s)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := Decode(data)
		if err != nil {
			return
		}
		text := Table([]WaitState{s, hop(2, s.Rank, 3, 1, sec)}) + s.String()
		if n := strings.Count(text, "\n"); n < 4 || n > 4+maxBlamed || len(text) > 16<<10 ||
			strings.ContainsAny(text, "\x1b\r\x07") {
			t.Errorf("%d lines, %d bytes: %q", n, len(text), text)
		}
	})
}
