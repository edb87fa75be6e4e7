package report

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/csv"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/model/metrics"
)

// maxRaw bounds the metrics of all runs in the page, in bytes.
const maxRaw = 2_000_000

// rawFiles returns the metrics of each run as CSV with all digits. It thins runs that exceed their share of maxRaw.
func rawFiles(runs []Run) []download {
	var all []download
	for _, r := range runs {
		if len(r.Steps) == 0 {
			continue
		}
		steps := r.Steps
		data := packed(steps)
		for most := maxRaw / len(runs); len(data) > most && len(steps) > 2; data = packed(steps) {
			steps = thin(steps, len(steps)*most/len(data)*9/10)
		}
		caption := fmt.Sprintf("all %s logged steps", readable.Number(float64(r.Lines)))
		if len(steps) < r.Lines {
			caption = fmt.Sprintf("%s of %s logged steps", readable.Number(float64(len(steps))),
				readable.Number(float64(r.Lines)))
		}
		all = append(all, download{Name: r.Name + ".csv.gz", Caption: r.Name + ": " + caption,
			Data: "data:application/gzip;base64," + data})
	}
	return all
}

var rawColumns = []struct {
	name string
	of   func(metrics.Step) metrics.Float
}{
	{"step", func(s metrics.Step) metrics.Float { return metrics.Float(s.Step) }},
	{"epoch", func(s metrics.Step) metrics.Float { return s.Epoch }},
	{"tokens", func(s metrics.Step) metrics.Float { return metrics.Float(s.Tokens) }},
	{"loss", func(s metrics.Step) metrics.Float { return s.Loss }},
	{"val_loss", validation},
	{"grad_norm", func(s metrics.Step) metrics.Float { return s.GradNorm }},
	{"lr", func(s metrics.Step) metrics.Float { return s.LR }},
	{"step_seconds", func(s metrics.Step) metrics.Float { return s.StepSeconds }},
	{"tokens_per_second", func(s metrics.Step) metrics.Float { return s.TokensPerSecond }},
	{"tokens_per_second_per_device", func(s metrics.Step) metrics.Float { return s.TokensPerSecondPerDevice }},
	{"tflops_per_device", func(s metrics.Step) metrics.Float { return s.TFLOPsPerDevice }},
	{"mfu", func(s metrics.Step) metrics.Float { return s.MFU }},
	{"memory_bytes", func(s metrics.Step) metrics.Float { return metrics.Float(s.MemoryBytes) }},
	{"comm_wait_seconds", func(s metrics.Step) metrics.Float { return s.CommWaitSeconds }},
	{"attention_imbalance", func(s metrics.Step) metrics.Float { return s.AttentionImbalance }},
	{"attention_bytes", func(s metrics.Step) metrics.Float { return s.AttentionBytes }},
}

// packed returns steps as CSV, compressed by gzip, in base64. Unknown fields are empty.
func packed(steps []metrics.Step) string {
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	w := csv.NewWriter(z)
	row := []string{"time"}
	for _, c := range rawColumns {
		row = append(row, c.name)
	}
	w.Write(row) // writers on a bytes.Buffer return no errors
	for _, s := range steps {
		row = append(row[:0], time.Time(s.Time).UTC().Format(time.RFC3339Nano))
		for _, c := range rawColumns {
			field := ""
			if x := float64(c.of(s)); !math.IsNaN(x) {
				field = strconv.FormatFloat(x, 'g', -1, 64)
				if x == math.Trunc(x) && math.Abs(x) < 1<<53 {
					field = strconv.FormatFloat(x, 'f', 0, 64)
				}
			}
			row = append(row, field)
		}
		w.Write(row)
	}
	w.Flush()
	z.Close()
	return base64.StdEncoding.EncodeToString(out.Bytes())
}

// thin returns at most about n of the steps, with the extremes of the loss.
func thin(steps []metrics.Step, n int) []metrics.Step {
	if len(steps) <= n {
		return steps
	}
	t := thinner{most: n}
	for _, s := range steps {
		t.add(s)
	}
	return t.steps()
}

// A thinner keeps all steps up to most. Beyond, it keeps the extremes of most/4 to most/2 stretches of equal length.
type thinner struct {
	most      int
	seen      int              // steps
	long      int              // steps of a stretch
	stretches [][]metrics.Step // the kept steps of each
}

func (t *thinner) add(s metrics.Step) {
	if t.long == 0 {
		t.long = 2 // both steps are extremes
	}
	if t.seen/t.long >= max(1, t.most/2) {
		var joined [][]metrics.Step
		for pair := range slices.Chunk(t.stretches, 2) {
			joined = append(joined, extremes(slices.Concat(pair...)))
		}
		t.stretches, t.long = joined, 2*t.long
	}
	i := t.seen / t.long
	if i == len(t.stretches) {
		t.stretches = append(t.stretches, nil)
	}
	t.stretches[i] = extremes(append(t.stretches[i], s))
	t.seen++
}

func (t *thinner) steps() []metrics.Step { return slices.Concat(t.stretches...) }

// extremes keeps the steps with the lowest and the highest loss, and steps with a validation.
func extremes(steps []metrics.Step) []metrics.Step {
	lo, hi := 0, len(steps)-1
	for i, s := range steps {
		if s.Loss < steps[lo].Loss {
			lo = i
		}
		if s.Loss > steps[hi].Loss {
			hi = i
		}
	}
	kept := steps[:0]
	for i, s := range steps {
		if i == lo || i == hi || s.ValLoss != nil {
			kept = append(kept, s)
		}
	}
	return kept
}
