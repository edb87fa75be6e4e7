package bench

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/model/checkpoint"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/tensor"
)

// hopRounds bounds the traced passes.
const hopRounds = 5

// hops returns the times of the hops of a forward and a backward pass on the slowest rank, as medians of several
// passes. It alternates passes with and without transfers, since clocks change as devices get warm. seconds is the time
// of a pass.
func (t *attentionRun) hops(ctx context.Context, p *pass, seconds float64) ([]HopTimes, error) {
	quiet := *p
	quiet.ring.Comm = silent{} // the buffers still hold the other ranks' keys
	var loud, bare [][]HopTimes
	for range min(hopRounds, max(1, int(budget/max(seconds, 1e-9)))) {
		with, err := t.traced(ctx, p)
		if err != nil {
			return nil, err
		}
		without, err := t.traced(ctx, &quiet)
		if err != nil {
			return nil, err
		}
		loud, bare = append(loud, with), append(bare, without)
	}
	moved, err := t.transfers(ctx, p)
	if err != nil {
		return nil, err
	}
	hops := loud[0]
	for i := range hops {
		hops[i].Compute, hops[i].Wait = middle(loud, i)
		hops[i].Quiet, _ = middle(bare, i)
		hops[i].Transfer = moved[i]
	}
	return t.longest(ctx, hops)
}

func middle(rounds [][]HopTimes, hop int) (compute, wait float64) {
	var computes, waits []float64
	for _, r := range rounds {
		computes, waits = append(computes, r[hop].Compute), append(waits, r[hop].Wait)
	}
	return Median(computes), Median(waits)
}

func (p *pass) order() ([]string, error) {
	forward, backward, err := p.recorded()
	var order []string
	for _, h := range forward.Hops {
		order = append(order, "forward/"+h.Label)
	}
	for _, h := range backward.Hops {
		order = append(order, "backward/"+h.Label)
	}
	return order, err
}

// traced returns the hops of one forward and one backward pass. It first runs an untraced pass to synchronise the
// ranks.
func (t *attentionRun) traced(ctx context.Context, p *pass) ([]HopTimes, error) {
	order, err := p.order()
	if err != nil {
		return nil, err
	}
	if err := t.Control.Barrier(ctx); err != nil {
		return nil, err
	}
	if err := p.both(); err != nil {
		return nil, err
	}
	var mu sync.Mutex
	var spans []tensor.Span                                           // guarded by mu
	lane := t.Device.Stream.(interface{ Trace(f func(tensor.Span)) }) // nil ends it
	lane.Trace(func(s tensor.Span) {
		mu.Lock()
		defer mu.Unlock()
		spans = append(spans, s)
	})
	defer lane.Trace(nil)
	if err = p.labelled(); err == nil {
		err = t.Device.Stream.Sync(ctx)
	}
	mu.Lock()
	defer mu.Unlock()
	return takeApart(order, spans), err
}

func (p *pass) labelled() error {
	p.ring.Label = "forward"
	err := p.forward()
	p.ring.Label = "backward"
	if err == nil {
		err = p.backward()
	}
	p.ring.Label = ""
	return err
}

// takeApart sums spans by hop. A hop lasts from its first kernel to the first kernel of the next one. Time without
// kernels is waiting.
func takeApart(order []string, spans []tensor.Span) []HopTimes {
	type extent struct{ first, last time.Time }
	hops, at := make([]HopTimes, len(order)), make([]extent, len(order))
	index := make(map[string]int, len(order))
	for i, label := range order {
		index[label] = i
		hops[i].Pass, hops[i].Label, _ = strings.Cut(label, "/")
	}
	for _, s := range spans {
		i, ok := index[s.Label]
		if !ok {
			continue
		}
		e := &at[i]
		if stop := s.Start.Add(s.Took); stop.After(e.last) {
			e.last = stop
		}
		if s.Name == "wait" { // a span of CPU streams
			continue
		}
		hops[i].Compute += s.Took.Seconds()
		if e.first.IsZero() || s.Start.Before(e.first) {
			e.first = s.Start
		}
	}
	for i := range hops {
		if at[i].first.IsZero() {
			continue
		}
		stop := at[i].last
		if i+1 < len(hops) && hops[i+1].Pass == hops[i].Pass && !at[i+1].first.IsZero() {
			stop = at[i+1].first
		}
		hops[i].Wait = max(0, stop.Sub(at[i].first).Seconds()-hops[i].Compute)
	}
	return hops
}

// A marker records the time at every label. The ring labels the beginning of each hop and of each exchange of heads,
// and their end.
type marker struct {
	tensor.Stream
	clock  device.Clock
	labels []string // of each point
}

func (m *marker) Label(name string) {
	m.clock.Mark(len(m.labels))
	m.labels = append(m.labels, name)
}

// transfers returns the seconds of each hop's transfers without kernels beside them.
func (t *attentionRun) transfers(ctx context.Context, p *pass) ([]float64, error) {
	if err := t.Control.Barrier(ctx); err != nil {
		return nil, err
	}
	const ends = 2 + 4 // the ends of both passes, and of the exchanges of heads before and after each
	order, err := p.order()
	if err != nil {
		return nil, err
	}
	clock, err := t.Device.NewClock(len(order) + ends)
	if err != nil {
		return nil, err
	}
	defer clock.Close()
	bare := *p
	marks := &marker{Stream: t.Device.Stream, clock: clock}
	bare.ring.Kernel, bare.ring.Stream = attention.Idle{}, marks
	if err := bare.labelled(); err != nil {
		return nil, err
	}
	if err := t.Device.Stream.Sync(ctx); err != nil {
		return nil, err
	}
	moved := make([]float64, len(order))
	for i, label := range order {
		if at := slices.Index(marks.labels, label); at >= 0 {
			if moved[i], err = clock.Between(at, at+1); err != nil {
				return nil, err
			}
		}
	}
	return moved, nil
}

// longest returns the hops of the rank with the longest pass, on every rank.
func (t *attentionRun) longest(ctx context.Context, hops []HopTimes) ([]HopTimes, error) {
	total := 0.0
	for _, h := range hops {
		total += h.Compute + h.Wait
	}
	most, err := t.slowest(ctx, total)
	if err != nil {
		return nil, err
	}
	mine := -1.0
	if total == most[0] {
		mine = float64(t.Control.Rank())
	}
	who, err := t.slowest(ctx, mine)
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(hops)
	if err == nil {
		text, err = checkpoint.Broadcast(ctx, t.Control, int(who[0]), text)
	}
	if err != nil {
		return nil, err
	}
	hops = nil
	return hops, json.Unmarshal(text, &hops)
}
