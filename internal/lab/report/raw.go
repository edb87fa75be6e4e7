package report

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"html/template"
	"slices"
	"strings"

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
		kept := "all"
		if len(steps) < r.Lines {
			kept = readable.Count(int64(len(steps))) + " of"
		}
		all = append(all, download{Name: r.Name + ".csv.gz",
			Caption: fmt.Sprintf("%s: %s %s logged steps", r.Name, kept, readable.Count(int64(r.Lines))),
			Link:    template.URL("data:application/gzip;base64," + data)})
	}
	return all
}

var rawColumns = []string{"time", "step", "epoch", "tokens", "loss", "val_loss", "grad_norm", "lr", "step_seconds",
	"tokens_per_second", "tokens_per_second_per_device", "tflops_per_device", "mfu", "memory_bytes", "comm_wait_seconds",
	"attention_imbalance", "attention_bytes", "aux_loss", "expert_imbalance"}

// packed returns steps as CSV, compressed by gzip, in base64. Unknown fields are empty.
func packed(steps []metrics.Step) string {
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	w := csv.NewWriter(z)
	w.Write(rawColumns) // writers on a bytes.Buffer return no errors
	for _, s := range steps {
		line, _ := json.Marshal(s) // a line of metrics.jsonl
		var fields map[string]json.RawMessage
		json.Unmarshal(line, &fields)
		row := make([]string, len(rawColumns))
		for i, name := range rawColumns {
			if text := strings.Trim(string(fields[name]), `"`); text != "null" {
				row[i] = text
			}
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

// extremes keeps the steps with the lowest and the highest loss, and steps with a validation or samples.
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
		if i == lo || i == hi || s.ValLoss != nil || s.Samples != nil {
			kept = append(kept, s)
		}
	}
	return kept
}
