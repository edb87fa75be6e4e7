package scan_test

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring/scan"
)

const prime = 1009

// An affine map of integers modulo a prime, x to M x + r. A state is one without M.
type affine struct {
	m     [4]int
	r     [2]int
	state bool
	set   bool // false: unset, or in flight
}

// after returns the map of earlier, then later.
func (later affine) after(earlier affine) affine {
	a, b := later.m, earlier.m
	out := affine{state: earlier.state, set: later.set && earlier.set && !later.state}
	if !out.state {
		for i := range 4 {
			out.m[i] = (a[i/2*2]*b[i%2] + a[i/2*2+1]*b[2+i%2]) % prime
		}
	}
	for i := range 2 {
		out.r[i] = (a[2*i]*earlier.r[0] + a[2*i+1]*earlier.r[1] + later.r[i]) % prime
	}
	return out
}

func (x affine) result() affine { return affine{r: x.r, state: true, set: x.set} }

// scattered gives short pieces of the sequence to any ranks, each in any order.
type scattered struct{ spans [][]partition.Span }

func (scattered) Name() string { return "scattered" }

func (l scattered) Spans(_, _, rank int) []partition.Span { return l.spans[rank] }

func scatter(rng *rand.Rand, n, size int) scattered {
	l := scattered{make([][]partition.Span, size)}
	for at := 0; at < n; {
		s := partition.Span{Start: at, Len: min(n-at, 1+rng.IntN(6)), Stride: 1}
		at += s.Len
		to := &l.spans[rng.IntN(size)]
		*to = slices.Insert(*to, rng.IntN(len(*to)+1), s)
	}
	return l
}

// randomCase returns a sequence over size ranks.
func randomCase(rng *rand.Rand, size int) partition.Shape {
	s := partition.Shape{SeqQ: 1 + rng.IntN(120), Size: size}
	s.SeqKV = s.SeqQ
	docs := []int{s.SeqQ}
	if rng.IntN(3) > 0 {
		docs = nil
		for n := s.SeqQ; n > 0; n -= docs[len(docs)-1] {
			docs = append(docs, 1+rng.IntN(n))
		}
		s.Mask.Docs = docs
	}
	all := []partition.Layout{partition.Contiguous{}, partition.Zigzag{}, partition.Window{Rows: 5},
		partition.Document{Docs: docs}, partition.DocumentZigzag{Docs: docs}, scatter(rng, s.SeqQ, s.Size)}
	s.Layout = partition.Ready(all[rng.IntN(len(all))], s.SeqQ, s.Size)
	return s
}

func segmentsOf(t *testing.T, s partition.Shape) *partition.Segments {
	t.Helper()
	x, err := partition.NewSegments(s)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// schedules returns the schedule of each rank.
func schedules(x *partition.Segments) (all []*scan.States) {
	for rank := range x.Own {
		all = append(all, scan.NewStates(x, rank))
	}
	return all
}

// A message has the sender's value.
type message struct {
	from, to int
	affine
}

// simulate runs one pass of all ranks, round by round, on the maps of segments. It returns the states of each rank, or
// the first fault. It needs no kernel and no transport, so it tests the schedules alone.
func simulate(x *partition.Segments, maps []affine, passes []*scan.Pass) (states [][]affine, fault string) {
	slots := make([][]affine, len(passes))
	states = make([][]affine, len(passes))
	at := func(rank int, s scan.Slot) *affine {
		if s.State {
			return &states[rank][s.At]
		}
		return &slots[rank][s.At]
	}
	rounds := 0
	for rank, p := range passes {
		rounds = max(rounds, len(p.Rounds))
		slots[rank], states[rank] = make([]affine, p.MapSlots), make([]affine, p.StateSlots)
		for slot, place := range p.Maps {
			slots[rank][slot] = maps[x.Own[rank][place]]
		}
		for _, r := range p.Results {
			states[rank][r.State] = slots[rank][r.Map].result()
		}
	}
	for round := range rounds {
		var wires []message
		for rank, p := range passes {
			if round >= len(p.Rounds) {
				continue
			}
			for _, m := range p.Rounds[round].Recv { // unset from the begin of the round
				*at(rank, m.Slot) = affine{}
			}
			for _, m := range p.Rounds[round].Send {
				wires = append(wires, message{rank, m.Peer, *at(rank, m.Slot)})
			}
		}
		for rank, p := range passes {
			if round >= len(p.Rounds) {
				continue
			}
			for _, r := range p.Rounds[round].Recv {
				i := slices.IndexFunc(wires, func(m message) bool { return m.from == r.Peer && m.to == rank })
				if i < 0 {
					return nil, fmt.Sprintf("rank %d waits for ever in round %d", rank, round)
				}
				if came := wires[i].affine; !came.set || came.state != r.Slot.State {
					return nil, fmt.Sprintf("rank %d gets %+v in round %d", rank, came, round)
				}
				*at(rank, r.Slot) = wires[i].affine
				wires = slices.Delete(wires, i, i+1)
			}
			for _, c := range p.Rounds[round].Compose {
				out := at(rank, c.Later).after(*at(rank, c.Earlier))
				if !out.set || out.state != c.Dst.State {
					return nil, fmt.Sprintf("rank %d lacks a slot of %+v in round %d", rank, c, round)
				}
				*at(rank, c.Dst) = out
			}
		}
		if len(wires) > 0 {
			return nil, fmt.Sprintf("%d messages of round %d are not received", len(wires), round)
		}
	}
	return states, ""
}

// steps returns a random map of each position.
func steps(rng *rand.Rand, n int) []affine {
	all := make([]affine, n)
	for i := range all {
		x := &all[i]
		x.set = true
		for k := range x.m {
			x.m[k] = rng.IntN(prime)
		}
		x.r = [2]int{rng.IntN(prime), rng.IntN(prime)}
	}
	return all
}

// checkStates compares the states of a pass with the recurrence over the positions of each document, one by one.
func checkStates(x *partition.Segments, step []affine, backward bool, passes []*scan.Pass) (fault string) {
	maps, want := make([]affine, len(x.All)), make([]affine, len(x.All))
	for _, doc := range x.Docs {
		order := x.All[doc.Lo:doc.Hi]
		state := affine{state: true, set: true}
		for k := range order {
			i := doc.Lo + k
			if backward {
				i = doc.Hi - 1 - k
			}
			want[i] = state
			for n := range x.All[i].Rows.Len() {
				pos := x.All[i].Start + n
				if backward {
					pos = x.All[i].Start + x.All[i].Rows.Len() - 1 - n
				}
				if state = step[pos].after(state); n == 0 {
					maps[i] = step[pos]
				} else {
					maps[i] = step[pos].after(maps[i])
				}
			}
		}
	}
	states, fault := simulate(x, maps, passes)
	if fault != "" {
		return fault
	}
	for i, s := range x.All {
		got := affine{state: true, set: true}
		if slot, found := slices.BinarySearch(passes[s.Rank].States, s.Place); found {
			got = states[s.Rank][slot]
		}
		if got != want[i] {
			return fmt.Sprintf("segment %d, %+v, has state %+v, want %+v", i, s, got, want[i])
		}
	}
	return ""
}

func passesOf(all []*scan.States, backward bool) (passes []*scan.Pass) {
	for _, s := range all {
		if backward {
			passes = append(passes, &s.Backward)
		} else {
			passes = append(passes, &s.Forward)
		}
	}
	return passes
}

func TestStatesEqualTheRecurrence(t *testing.T) {
	rng := rand.New(rand.NewPCG(71, 72))
	local := 0 // segments whose predecessor is on the same rank
	for range 1000 {
		shape := randomCase(rng, 1+rng.IntN(33))
		x, step := segmentsOf(t, shape), steps(rng, shape.SeqQ)
		all := schedules(x)
		for _, backward := range []bool{false, true} {
			passes := passesOf(all, backward)
			if fault := checkStates(x, step, backward, passes); fault != "" {
				t.Fatalf("%+v, backward %t: %s", shape, backward, fault)
			}
			checkSize(t, x, backward, passes)
		}
		for i := range x.All[1:] {
			if a, b := x.All[i], x.All[i+1]; a.Doc == b.Doc && a.Rank == b.Rank {
				local++
			}
		}
	}
	if local == 0 {
		t.Error("no case has neighbours on one rank")
	}
}

// checkSize checks the number of rounds of each rank, the maps that it computes, the states that it sets, and its room.
func checkSize(t *testing.T, x *partition.Segments, backward bool, passes []*scan.Pass) {
	t.Helper()
	for rank, p := range passes {
		rounds, states, maps := 0, []int{}, []int{}
		for place, i := range x.Own[rank] {
			doc := x.Docs[x.All[i].Doc]
			if doc.Len() > 1 {
				rounds = max(rounds, 1+bits.Len(uint(doc.Len()-2)))
			}
			if !backward && i < doc.Hi-1 || backward && i > doc.Lo {
				maps = append(maps, place)
			}
			if !backward && i > doc.Lo || backward && i < doc.Hi-1 {
				states = append(states, place)
			}
		}
		if len(p.Rounds) != rounds || !slices.Equal(p.Maps, maps) || !slices.Equal(p.States, states) {
			t.Fatalf("rank %d of %+v has %d rounds, want %d; maps of %v, want %v; states of %v, want %v", rank, x,
				len(p.Rounds), rounds, p.Maps, maps, p.States, states)
		}
		if p.MapSlots > 2*len(x.Own[rank]) || p.StateSlots > len(x.Own[rank]) {
			t.Fatalf("rank %d has room for %d maps and %d states of %d segments", rank, p.MapSlots, p.StateSlots,
				len(x.Own[rank]))
		}
	}
}

// The simulation must detect faults of a schedule.
func TestSimulationSeesFaults(t *testing.T) {
	x := segmentsOf(t, partition.Shape{SeqQ: 80, SeqKV: 80, Size: 5, Layout: partition.Contiguous{}})
	step := steps(rand.New(rand.NewPCG(79, 80)), 80)
	first := func(p *scan.Pass) *scan.Compose { return &p.Rounds[1].Compose[0] }
	for what, change := range map[string]func(p []*scan.Pass){
		"no composition":           func(p []*scan.Pass) { p[3].Rounds[1].Compose = nil },
		"the wrong order":          func(p []*scan.Pass) { c := first(p[3]); c.Later, c.Earlier = c.Earlier, c.Later },
		"a message too few":        func(p []*scan.Pass) { p[2].Rounds[2].Send = nil },
		"a message too many":       func(p []*scan.Pass) { p[3].Rounds[2].Recv = nil },
		"another round":            func(p []*scan.Pass) { r := p[1].Rounds; r[1], r[2] = r[2], r[1] },
		"an arrival over a window": func(p []*scan.Pass) { p[4].Rounds[1].Recv[0].Slot = first(p[4]).Later },
		"no result":                func(p []*scan.Pass) { p[0].Results = nil },
		"a state too few":          func(p []*scan.Pass) { p[2].States = nil },
	} {
		passes := passesOf(schedules(x), false)
		if fault := checkStates(x, step, false, passes); fault != "" {
			t.Fatal(fault)
		}
		change(passes)
		if fault := checkStates(x, step, false, passes); fault == "" {
			t.Errorf("%s: the simulation finds nothing", what)
		}
	}
}
