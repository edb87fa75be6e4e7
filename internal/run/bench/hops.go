package bench

import (
	"context"
	"encoding/json"
	"slices"
	"sync"
	"time"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/model/checkpoint"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/tensor"
)

// HopTimes is one hop of a traced pass, in seconds.
type HopTimes struct {
	Pass     string  `json:"pass"` // forward, backward
	Label    string  `json:"label"`
	Compute  float64 `json:"compute_seconds"`  // kernels
	Quiet    float64 `json:"quiet_seconds"`    // the same kernels without transfers
	Transfer float64 `json:"transfer_seconds"` // the hop's transfers without kernels
	Wait     float64 `json:"wait_seconds"`     // idle time of the compute stream
}

// hopRounds bounds the traced passes.
const hopRounds = 5

// hops returns the times of the hops of a forward and a backward pass on the slowest rank, as medians of several
// passes. It alternates passes with and without transfers, since clocks change as devices get warm. seconds is the time
// of a pass.
func (t *attentionRun) hops(ctx context.Context, p *pass, seconds float64) ([]HopTimes, error) {
	hops, err := p.order()
	if err != nil {
		return nil, err
	}
	quiet := *p
	quiet.ring.Comm = silent{} // the buffers still hold the other ranks' keys
	var loud, bare [][]HopTimes
	for range min(hopRounds, max(1, int(budget/max(seconds, 1e-9)))) {
		with, err := t.traced(ctx, p, hops)
		if err != nil {
			return nil, err
		}
		without, err := t.traced(ctx, &quiet, hops)
		if err != nil {
			return nil, err
		}
		loud, bare = append(loud, with), append(bare, without)
	}
	if err := t.transfers(ctx, *p, hops); err != nil {
		return nil, err
	}
	for i := range hops {
		median := func(rounds [][]HopTimes, of func(h *HopTimes) float64) float64 {
			var all []float64
			for _, r := range rounds {
				all = append(all, of(&r[i]))
			}
			return Median(all)
		}
		compute := func(h *HopTimes) float64 { return h.Compute }
		hops[i].Compute, hops[i].Quiet = median(loud, compute), median(bare, compute)
		hops[i].Wait = median(loud, func(h *HopTimes) float64 { return h.Wait })
	}
	return t.longest(ctx, hops)
}

// order returns the hops of both passes, without times.
func (p *pass) order() (hops []HopTimes, err error) {
	forward, backward, err := p.recorded()
	for _, h := range forward.Hops {
		hops = append(hops, HopTimes{Pass: "forward", Label: h.Label})
	}
	for _, h := range backward.Hops {
		hops = append(hops, HopTimes{Pass: "backward", Label: h.Label})
	}
	return hops, err
}

// traced returns the hops of one forward and one backward pass. It first runs an untraced pass to synchronise the
// ranks.
func (t *attentionRun) traced(ctx context.Context, p *pass, order []HopTimes) ([]HopTimes, error) {
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
	err := p.labelled()
	if err == nil {
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
func takeApart(order []HopTimes, spans []tensor.Span) []HopTimes {
	hops, first, last := slices.Clone(order), make([]time.Time, len(order)), make([]time.Time, len(order))
	for _, s := range spans {
		i := slices.IndexFunc(hops, func(h HopTimes) bool { return h.Pass+"/"+h.Label == s.Label })
		if i < 0 {
			continue
		}
		if stop := s.Start.Add(s.Took); stop.After(last[i]) {
			last[i] = stop
		}
		if s.Name == "wait" { // a span of CPU streams
			continue
		}
		hops[i].Compute += s.Took.Seconds()
		if first[i].IsZero() || s.Start.Before(first[i]) {
			first[i] = s.Start
		}
	}
	for i := range hops {
		if first[i].IsZero() {
			continue
		}
		stop := last[i]
		if i+1 < len(hops) && hops[i+1].Pass == hops[i].Pass && !first[i+1].IsZero() {
			stop = first[i+1]
		}
		hops[i].Wait = max(0, stop.Sub(first[i]).Seconds()-hops[i].Compute)
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

// transfers sets the seconds of each hop's transfers without kernels beside them.
func (t *attentionRun) transfers(ctx context.Context, p pass, hops []HopTimes) error {
	if err := t.Control.Barrier(ctx); err != nil {
		return err
	}
	const ends = 2 + 4 // the ends of both passes, and of the exchanges of heads before and after each
	clock, err := t.Device.NewClock(len(hops) + ends)
	if err != nil {
		return err
	}
	defer clock.Close()
	marks := &marker{Stream: t.Device.Stream, clock: clock}
	p.ring.Kernel, p.ring.Stream = attention.Idle{}, marks
	if err = p.labelled(); err == nil {
		err = t.Device.Stream.Sync(ctx)
	}
	for i := range hops {
		if at := slices.Index(marks.labels, hops[i].Pass+"/"+hops[i].Label); at >= 0 && err == nil {
			hops[i].Transfer, err = clock.Between(at, at+1)
		}
	}
	return err
}

// longest returns the hops of the rank with the longest pass, on every rank.
func (t *attentionRun) longest(ctx context.Context, hops []HopTimes) ([]HopTimes, error) {
	totals := make([]float64, t.Control.Size())
	for _, h := range hops {
		totals[t.Control.Rank()] += h.Compute + h.Wait
	}
	totals, err := t.slowest(ctx, totals...)
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(hops)
	if err == nil {
		text, err = checkpoint.Broadcast(ctx, t.Control, slices.Index(totals, slices.Max(totals)), text)
	}
	if err != nil {
		return nil, err
	}
	hops = nil
	return hops, json.Unmarshal(text, &hops)
}
