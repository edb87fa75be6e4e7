package bench

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/foresee/cost"
)

// Tables returns the report for a terminal.
func (r *Report) Tables() []readable.Table {
	on := fmt.Sprintf("%d x %s", r.Ranks, r.Machine.Device)
	switch {
	case r.Attention != nil:
		return r.Attention.tables(on)
	case r.Train != nil:
		return []readable.Table{r.Train.table(on)}
	case r.Comm != nil:
		return []readable.Table{transferTable(on, r.Comm)}
	}
	return []readable.Table{operationTable(r.Machine.Device, r.Ops)}
}

// what names the measurement: "attention, causal, 32:8 heads of 128, bf16".
func (s *AttentionSpec) what() string {
	parts := []string{"attention", map[bool]string{true: "causal", false: "full"}[s.Causal]}
	if s.Window >= 0 {
		parts = append(parts, fmt.Sprintf("window %d", s.Window))
	}
	parts = append(parts, fmt.Sprintf("%d:%d heads of %d", s.Heads, s.KVHeads, s.HeadDim), s.DType)
	if s.Deterministic {
		parts = append(parts, "deterministic")
	}
	return strings.Join(parts, ", ")
}

// flopUnit returns a readable unit for a rate, and its factor from TFLOP/s.
func flopUnit(tflops float64) (unit string, scale float64) {
	if tflops < 0.5 {
		return "GFLOP/s", 1e3
	}
	return "TFLOP/s", 1
}

// Line returns the row in one line, for progress.
func (r *AttentionRow) Line() string {
	unit, scale := flopUnit(max(r.Forward.TFLOPs, r.Both.TFLOPs))
	return fmt.Sprintf("S=%s %s: forward %s, forward and backward %s %s per device",
		readable.Size(int64(r.Seq)), r.Algorithm, readable.Number(scale*r.Forward.TFLOPs),
		readable.Number(scale*r.Both.TFLOPs), unit)
}

func (a *Attention) tables(on string) []readable.Table {
	if len(a.Packed) > 0 {
		return []readable.Table{a.packTable(on)}
	}
	most := 0.0
	for _, r := range a.Rows {
		most = max(most, r.Forward.TFLOPs, r.Both.TFLOPs)
	}
	unit, scale := flopUnit(most)
	t := readable.Table{
		Title: fmt.Sprintf("%s, %s layout; %s; %s per device, slowest rank", a.Spec.what(),
			strings.Join(a.Spec.Layouts, ", "), on, unit),
		Head: []string{"S", "pattern", "backend", "forward ms", unit, "both ms", unit, "no transfers", "alone", "loss",
			"sent", "memory"},
		Notes: []string{
			"both: forward and backward, 3.5 times the FLOPs of forward",
			"no transfers: the same kernel calls without transfers",
			"alone: one rank on its share of the tokens; loss: share of that rate lost in both",
			"sent: bytes of a rank, forward and backward",
		},
	}
	for _, r := range a.Rows {
		local, alone, loss := "", "", ""
		if r.Local != nil && r.Alone != nil && r.Loss != nil {
			local, alone, loss = readable.Number(scale*r.Local.TFLOPs), readable.Number(scale*r.Alone.TFLOPs),
				readable.Percent(*r.Loss)
		}
		t.Add(readable.Size(int64(r.Seq)), a.way(&r), r.Backend, readable.Number(1e3*r.Forward.Seconds),
			readable.Number(scale*r.Forward.TFLOPs),
			readable.Number(1e3*r.Both.Seconds), readable.Number(scale*r.Both.TFLOPs), local, alone, loss,
			readable.Bytes(r.SentForward+r.SentBackward), readable.Bytes(r.Memory))
	}
	out := []readable.Table{t}
	for _, r := range a.Rows {
		if r.Ranks > 1 && len(r.Hops) > 0 {
			out = append(out, r.hopTable())
		}
	}
	return out
}

func (a *Attention) way(r *AttentionRow) string {
	if len(a.Spec.Layouts) > 1 {
		return r.Layout + ", " + pattern(r.Algorithm, r.Gather)
	}
	return pattern(r.Algorithm, r.Gather)
}

func (r *AttentionRow) hopTable() readable.Table {
	t := readable.Table{
		Title: fmt.Sprintf("hops at S=%s, %s, on the slowest rank, ms", readable.Size(int64(r.Seq)), r.Algorithm),
		Head:  []string{"hop", "compute", "quiet", "transfer", "wait"},
		Notes: []string{"compute: kernels; quiet: the same kernels without transfers",
			"transfer: transfers without kernels; wait: idle compute stream"},
	}
	for _, h := range r.Hops {
		t.Add(h.Pass+" "+h.Label, readable.Number(1e3*h.Compute), readable.Number(1e3*h.Quiet),
			readable.Number(1e3*h.Transfer),
			readable.Number(1e3*h.Wait))
	}
	return t
}

func transferTable(on string, rows []Transfer) readable.Table {
	var names []string
	for _, r := range rows {
		if !slices.Contains(names, r.Transport) {
			names = append(names, r.Transport)
		}
	}
	t := readable.Table{
		Title: "transfers between neighbours; " + on + "; GB/s per direction, slowest rank",
		Head:  []string{"call", "bytes"},
		Notes: []string{
			"exchange: send to the next rank and receive from the previous one",
			"collectives: bytes of the whole buffer, and bus bandwidth",
			fmt.Sprintf("time: one call in a burst of %d, with its latency", burst),
		},
	}
	for _, n := range names {
		t.Head = append(t.Head, n+" µs", "GB/s")
		if rows[0].Share > 0 {
			t.Head = append(t.Head, "of link")
		}
	}
	for i := 0; i < len(rows); {
		first := rows[i]
		cells := []string{first.Call, readable.Bytes(first.Bytes)}
		for _, n := range names {
			if i == len(rows) || rows[i].Transport != n || rows[i].Call != first.Call || rows[i].Bytes != first.Bytes {
				cells = append(cells, "", "")
				if rows[0].Share > 0 {
					cells = append(cells, "")
				}
				continue
			}
			cells = append(cells, readable.Number(1e6*rows[i].Seconds), readable.Number(rows[i].GBps))
			if rows[0].Share > 0 {
				cells = append(cells, readable.Percent(rows[i].Share))
			}
			i++
		}
		t.Add(cells...)
	}
	return t
}

func (t *Training) table(on string) readable.Table {
	unit, scale := flopUnit(t.TFLOPs)
	out := readable.Table{
		Title: fmt.Sprintf("training steps of %s, S=%s, batch %d, %s tokens; %s; medians of %d steps after %d",
			t.Config, readable.Size(int64(t.Seq)), t.Batch, t.Data, on, len(t.Steps)-t.Skipped, t.Skipped),
		Head: []string{"step s", "tokens/s/device", unit + "/device", "MFU", "waiting s", "first step s", "memory",
			"planned"},
	}
	mfu, wait := "", ""
	if t.MFU > 0 {
		mfu = readable.Percent(t.MFU)
	}
	if t.CommWait.Known() {
		wait = readable.Number(float64(t.CommWait))
	}
	out.Add(readable.Number(t.StepSeconds), fmt.Sprintf("%.0f", t.TokensPerSecond), readable.Number(scale*t.TFLOPs),
		mfu, wait,
		readable.Number(t.FirstStep), readable.Bytes(t.Memory), readable.Bytes(t.Planned))
	return out
}

func operationTable(on string, rows []Operation) readable.Table {
	t := readable.Table{Title: "operations; " + on, Head: []string{"operation", "shape", "µs", "rate", "",
		"of ceiling"}}
	for _, r := range rows {
		share := ""
		if r.Share > 0 {
			share = readable.Percent(r.Share)
		}
		rate, unit := r.Rate, r.Unit
		if u, scale := flopUnit(r.Rate); r.Unit == "TFLOP/s" {
			rate, unit = scale*r.Rate, u
		}
		t.Add(r.Name, r.Shape, readable.Number(1e6*r.Seconds), readable.Number(rate), unit, share)
	}
	return t
}

// CostTables returns a cost table for a terminal, with the smallest and the largest measurement of each kind of work.
func CostTables(t *cost.Table) []readable.Table {
	var out []readable.Table
	for i := range t.Sets {
		s := &t.Sets[i]
		table := readable.Table{
			Title: fmt.Sprintf("cost table of %s, %d rank%s at once", t.Machine.Device, s.Ranks,
				map[bool]string{false: "s"}[s.Ranks == 1]),
			Head: []string{"work", "from", "µs", "rate", "to", "µs", "rate", "", "points"},
		}
		for _, l := range linesOf(s) {
			table.Add(l.name, l.low.size, readable.Number(1e6*l.low.seconds), readable.Number(l.low.rate), l.high.size,
				readable.Number(1e6*l.high.seconds), readable.Number(l.high.rate), l.unit, fmt.Sprint(l.points))
		}
		if s.CallSeconds > 0 {
			table.Notes = []string{fmt.Sprintf("the host needs %s µs to queue a call", readable.Number(1e6*s.CallSeconds))}
		}
		out = append(out, table)
	}
	return out
}

type point struct {
	size          string
	amount        float64
	seconds, rate float64
}

type line struct {
	name, unit string
	low, high  point
	points     int
}

type lines []line

// add adds a measurement of an amount of work, with a unit of 1e9 a second.
func (l *lines) add(name, unit, size string, amount, seconds float64) {
	p := point{size: size, amount: amount, seconds: seconds, rate: amount / seconds / 1e9}
	for i := range *l {
		if x := &(*l)[i]; x.name == name {
			x.points++
			if p.amount < x.low.amount {
				x.low = p
			}
			if p.amount > x.high.amount {
				x.high = p
			}
			return
		}
	}
	*l = append(*l, line{name: name, unit: unit, low: p, high: p, points: 1})
}

func linesOf(s *cost.Set) (l lines) {
	for _, a := range s.Attention {
		way := map[bool]string{true: "backward", false: "forward"}[a.Backward]
		l.add(fmt.Sprintf("%s %s, %s, %d, %s", a.Backend, a.DType, a.Mask, a.Dim, way), "GFLOP/s",
			dims(a.Queries, a.Keys),
			FLOPs(max(a.Tiles, 1)*cost.Tile(a.Mask, a.Queries, a.Keys).Pairs(), a.Heads, a.Dim, a.Dim), a.Seconds)
	}
	for _, p := range s.Products {
		l.add(p.Kind+" "+p.DType, "GFLOP/s", dims(p.Rows, p.In, p.Out),
			cost.Work{Rows: p.Rows, In: p.In, Out: p.Out}.FLOPs(), p.Seconds)
	}
	for _, p := range s.Passes {
		l.add(p.Op+" "+p.DType, "GB/s", readable.Bytes(p.Bytes), float64(p.Bytes), p.Seconds)
	}
	for _, k := range s.Links {
		l.add(fmt.Sprintf("%s, %s", k.Call, k.Transport), "GB/s", readable.Bytes(k.Bytes), float64(k.Bytes), k.Seconds)
	}
	return l
}
