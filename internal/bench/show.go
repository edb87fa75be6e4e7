package bench

import (
	"fmt"
	"slices"
	"strings"
)

// Tables returns the report for a terminal.
func (r *Report) Tables() []Table {
	on := fmt.Sprintf("%d x %s", r.Ranks, r.Machine.Device)
	switch {
	case r.Attention != nil:
		return r.Attention.tables(on)
	case r.Train != nil:
		return []Table{r.Train.table(on)}
	case r.Comm != nil:
		return []Table{transferTable(on, r.Comm)}
	}
	return []Table{operationTable(r.Machine.Device, r.Ops)}
}

// Chart returns the report as a picture.
func (r *Report) Chart() Chart {
	on := fmt.Sprintf(", %d x %s", r.Ranks, r.Machine.Device)
	switch {
	case r.Attention != nil:
		return r.Attention.chart(on)
	case r.Train != nil:
		return r.Train.chart(on)
	case r.Comm != nil:
		return transferChart(on, r.Comm)
	}
	return operationChart(", "+r.Machine.Device, r.Ops)
}

// what names what was measured: "attention, causal, 32:8 heads of 128, bf16".
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

// flopUnit is a unit in which rates have digits to read, and how many of it a TFLOP/s has.
func flopUnit(tflops float64) (unit string, scale float64) {
	if tflops < 0.5 {
		return "GFLOP/s", 1e3
	}
	return "TFLOP/s", 1
}

// unit is that of the rows' rates.
func (a *Attention) unit() (unit string, scale float64) {
	most := 0.0
	for _, r := range a.Rows {
		most = max(most, r.Forward.TFLOPs, r.Both.TFLOPs)
	}
	return flopUnit(most)
}

// Line returns the row in one line, for whoever waits for the table.
func (r *AttentionRow) Line() string {
	unit, scale := flopUnit(max(r.Forward.TFLOPs, r.Both.TFLOPs))
	return fmt.Sprintf("S=%s %s: forward %s, forward and backward %s %s per device",
		sizeText(int64(r.Seq)), r.Algorithm, digits(scale*r.Forward.TFLOPs), digits(scale*r.Both.TFLOPs), unit)
}

func (a *Attention) tables(on string) []Table {
	if len(a.Packed) > 0 {
		return []Table{a.packTable(on)}
	}
	unit, scale := a.unit()
	t := Table{
		Title: fmt.Sprintf("%s, %s layout; %s; %s per device, the slowest rank", a.Spec.what(), strings.Join(a.Spec.Layouts, ", "), on, unit),
		Head:  []string{"S", "pattern", "backend", "forward ms", unit, "both ms", unit, "no transfers", "alone", "loss", "sent", "memory"},
		Notes: []string{
			"both: forward and backward, 3.5 times the FLOPs of forward. no transfers: the same kernel calls alone.",
			"alone: one rank on as many tokens as each has; loss: what both lacks of it. sent: by a rank, forward and backward.",
		},
	}
	for _, r := range a.Rows {
		local, alone, loss := "", "", ""
		if r.Local != nil && r.Alone != nil && r.Loss != nil {
			local, alone, loss = digits(scale*r.Local.TFLOPs), digits(scale*r.Alone.TFLOPs), percent(*r.Loss)
		}
		t.Add(sizeText(int64(r.Seq)), a.way(&r), r.Backend, milliseconds(r.Forward.Seconds), digits(scale*r.Forward.TFLOPs),
			milliseconds(r.Both.Seconds), digits(scale*r.Both.TFLOPs), local, alone, loss,
			bytesText(r.SentForward+r.SentBackward), bytesText(r.Memory))
	}
	out := []Table{t}
	for _, r := range a.Rows {
		if r.Ranks > 1 {
			out = append(out, r.hopTable())
		}
	}
	return out
}

// way names the layout of a row, where there are several, and its algorithm.
func (a *Attention) way(r *AttentionRow) string {
	if len(a.Spec.Layouts) > 1 {
		return r.Layout + ", " + pattern(r.Algorithm, r.Gather)
	}
	return pattern(r.Algorithm, r.Gather)
}

func (r *AttentionRow) hopTable() Table {
	t := Table{
		Title: fmt.Sprintf("hops at S=%s, %s, on the slowest rank, ms", sizeText(int64(r.Seq)), r.Algorithm),
		Head:  []string{"hop", "compute", "quiet", "transfer", "wait"},
		Notes: []string{"compute: of the kernels; quiet: of the same calls without transfers; transfer: without kernels beside it; wait: the compute stream stood still."},
	}
	for _, h := range r.Hops {
		t.Add(h.Pass+" "+h.Label, milliseconds(h.Compute), milliseconds(h.Quiet), milliseconds(h.Transfer), milliseconds(h.Wait))
	}
	return t
}

func (a *Attention) chart(on string) Chart {
	if len(a.Packed) > 0 {
		return a.packChart(on)
	}
	unit, scale := a.unit()
	c := Chart{
		Title: a.Spec.what() + on, X: "global tokens S", Y: unit + " per device", LogX: true,
		TickX: func(x float64) string { return sizeText(int64(x)) },
	}
	var names []string // of the lines, in the order of the rows
	for i := range a.Rows {
		if name := a.way(&a.Rows[i]); !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	for i, name := range names {
		forward, both, alone := Line{Name: name + ", forward"}, Line{Name: name + ", forward+backward"}, Line{Name: "alone, forward+backward", Dashed: true}
		for _, r := range a.Rows {
			if a.way(&r) != name {
				continue
			}
			x := float64(r.Seq)
			forward.Points = append(forward.Points, [2]float64{x, scale * r.Forward.TFLOPs})
			both.Points = append(both.Points, [2]float64{x, scale * r.Both.TFLOPs})
			if r.Alone != nil {
				alone.Points = append(alone.Points, [2]float64{x, scale * r.Alone.TFLOPs})
			}
		}
		c.Lines = append(c.Lines, forward, both)
		if len(alone.Points) > 0 && i == 0 {
			c.Lines = append(c.Lines, alone)
		}
	}
	return c
}

// transferTable puts the transports of one call and size beside each other.
func transferTable(on string, rows []Transfer) Table {
	var names []string
	for _, r := range rows {
		if !slices.Contains(names, r.Transport) {
			names = append(names, r.Transport)
		}
	}
	t := Table{
		Title: "transfers between neighbours; " + on + "; GB/s in each direction, the slowest rank",
		Head:  []string{"call", "bytes"},
		Notes: []string{
			"exchange: to the next rank and from the one before at once. Collectives: bytes of the whole buffer, bus bandwidth.",
			fmt.Sprintf("Time: of one call in %d that follow each other, each begun when the one before is complete on the rank; with its latency, which a ring hides behind its kernels.", burst),
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
		cells := []string{first.Call, bytesText(first.Bytes)}
		for _, n := range names {
			if i == len(rows) || rows[i].Transport != n || rows[i].Call != first.Call || rows[i].Bytes != first.Bytes {
				cells = append(cells, "", "")
				if rows[0].Share > 0 {
					cells = append(cells, "")
				}
				continue
			}
			cells = append(cells, digits(1e6*rows[i].Seconds), digits(rows[i].GBps))
			if rows[0].Share > 0 {
				cells = append(cells, percent(rows[i].Share))
			}
			i++
		}
		t.Add(cells...)
	}
	return t
}

func transferChart(on string, rows []Transfer) Chart {
	c := Chart{
		Title: "transfers" + on, X: "bytes", Y: "GB/s in each direction", LogX: true,
		TickX: func(x float64) string { return bytesText(int64(x)) },
	}
	index := make(map[string]int)
	for _, r := range rows {
		name := r.Transport + " " + r.Call
		i, ok := index[name]
		if !ok {
			i = len(c.Lines)
			index[name] = i
			c.Lines = append(c.Lines, Line{Name: name})
		}
		c.Lines[i].Points = append(c.Lines[i].Points, [2]float64{float64(r.Bytes), r.GBps})
	}
	return c
}

func (t *Training) table(on string) Table {
	unit, scale := flopUnit(t.TFLOPs)
	out := Table{
		Title: fmt.Sprintf("training steps of %s, S=%s, batch %d, %s tokens; %s; medians of %d steps after %d",
			t.Config, sizeText(int64(t.Seq)), t.Batch, t.Data, on, len(t.Steps)-t.Skipped, t.Skipped),
		Head: []string{"step s", "tokens/s/device", unit + "/device", "MFU", "waiting s", "first step s", "memory", "planned"},
	}
	mfu, wait := "", ""
	if t.MFU > 0 {
		mfu = percent(t.MFU)
	}
	if t.CommWait.Known() {
		wait = digits(float64(t.CommWait))
	}
	out.Add(digits(t.StepSeconds), fmt.Sprintf("%.0f", t.TokensPerSecond), digits(scale*t.TFLOPs), mfu, wait,
		digits(t.FirstStep), bytesText(t.Memory), bytesText(t.Planned))
	return out
}

func (t *Training) chart(on string) Chart {
	line := Line{Name: "step"}
	for i, s := range t.Steps {
		line.Points = append(line.Points, [2]float64{float64(i + 1), s})
	}
	median := Line{Name: "median", Dashed: true, Points: [][2]float64{{1, t.StepSeconds}, {float64(len(t.Steps)), t.StepSeconds}}}
	return Chart{Title: "training steps of " + t.Config + on, X: "step", Y: "seconds", Lines: []Line{line, median}, TickX: func(x float64) string { return fmt.Sprintf("%.0f", x) }}
}

func operationTable(on string, rows []Operation) Table {
	t := Table{Title: "operations; " + on, Head: []string{"operation", "shape", "µs", "rate", "", "of ceiling"}}
	for _, r := range rows {
		share := ""
		if r.Share > 0 {
			share = percent(r.Share)
		}
		rate, unit := r.Rate, r.Unit
		if u, scale := flopUnit(r.Rate); r.Unit == "TFLOP/s" {
			rate, unit = scale*r.Rate, u
		}
		t.Add(r.Name, r.Shape, digits(1e6*r.Seconds), digits(rate), unit, share)
	}
	return t
}

// operationChart is the share of the ceiling, operation by operation.
func operationChart(on string, rows []Operation) Chart {
	var names []string
	line := Line{Name: "share"}
	for _, r := range rows {
		names = append(names, r.Name)
		line.Points = append(line.Points, [2]float64{float64(len(names)), 100 * r.Share})
	}
	return Chart{
		Title: "operations" + on, X: "operation, in the order of the table", Y: "% of the measured ceiling", Lines: []Line{line},
		TickX: func(x float64) string { return fmt.Sprintf("%.0f", x) },
	}
}
