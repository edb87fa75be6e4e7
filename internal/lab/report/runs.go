package report

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/lab/experiment"
	"github.com/cprun/cprun/internal/model/metrics"
)

// A curve is one figure of a value by step.
type curve struct {
	section, title, says string
	smooth               bool
	views                []measure
}

type measure struct {
	name string
	y    axis
	of   func(metrics.Step) metrics.Float
	val  func(metrics.Step) metrics.Float // a second line with symbols; nil: none
}

const (
	learning = "Training"
	speed    = "Speed and memory"
	layouts  = "Layout and work"
	timeline = "One step"
)

var curves = []curve{
	{learning, "Loss", "Mean loss of the target tokens of a step, before its update. Points with symbols are of the " +
		"validation data.", true, []measure{
		{"loss", axis{Name: "loss, nats a token"}, func(s metrics.Step) metrics.Float { return s.Loss },
			validation},
		{"loss, log", axis{Name: "loss, nats a token", Log: true}, func(s metrics.Step) metrics.Float { return s.Loss },
			validation},
		{"validation only", axis{Name: "validation loss, nats a token"},
			func(metrics.Step) metrics.Float { return metrics.Absent }, validation},
	}},
	{learning, "Gradient norm", "Global norm of the gradients, before clipping. A spike that the loss follows is a " +
		"step that went wrong.", true, []measure{
		{"norm", axis{Name: "gradient norm", Log: true}, func(s metrics.Step) metrics.Float { return s.GradNorm }, nil},
	}},
	{learning, "Learning rate", "Of the schedule, as the optimizer used it.", false, []measure{
		{"rate", axis{Name: "learning rate", Zero: true}, func(s metrics.Step) metrics.Float { return s.LR }, nil},
	}},
	{speed, "Throughput", "Of each step that was logged. FLOPs are the model's: causal attention halved, " +
		"recomputation not counted.", true, []measure{
		{"tokens/s", axis{Name: "tokens/s", Zero: true},
			func(s metrics.Step) metrics.Float { return s.TokensPerSecond }, nil},
		{"tokens/s a device", axis{Name: "tokens/s a device", Zero: true},
			func(s metrics.Step) metrics.Float { return s.TokensPerSecondPerDevice }, nil},
		{"TFLOP/s a device", axis{Name: "TFLOP/s a device", Zero: true},
			func(s metrics.Step) metrics.Float { return s.TFLOPsPerDevice }, nil},
		{"MFU", axis{Name: "share of the device's peak", Kind: "share", Zero: true},
			func(s metrics.Step) metrics.Float { return s.MFU }, nil},
	}},
	{speed, "Waiting for transfers", "What compute stood still for transfers that nothing hid, on the rank that " +
		"waited longest; as a share of the step, or in seconds.", true, []measure{
		{"share of the step", axis{Name: "share of the step", Kind: "share", Zero: true},
			func(s metrics.Step) metrics.Float { return s.CommWaitSeconds / s.StepSeconds }, nil},
		{"seconds", axis{Name: "seconds a step", Kind: "seconds", Zero: true},
			func(s metrics.Step) metrics.Float { return s.CommWaitSeconds }, nil},
	}},
	{speed, "Memory", "Peak so far, of the device that uses most.", false, []measure{
		{"peak", axis{Name: "bytes", Kind: "bytes", Zero: true},
			func(s metrics.Step) metrics.Float { return metrics.Float(s.MemoryBytes) }, nil},
	}},
	{layouts, "Balance of attention by step", "Visible (query, key) pairs of the rank with most work over those of " +
		"the mean one; 1 is even work. Packed documents differ from batch to batch.", false, []measure{
		{"slowest over mean", axis{Name: "slowest rank over mean"},
			func(s metrics.Step) metrics.Float { return s.AttentionImbalance }, nil},
		{"bytes sent", axis{Name: "bytes sent, most of a rank", Kind: "bytes", Zero: true},
			func(s metrics.Step) metrics.Float { return s.AttentionBytes }, nil},
	}},
}

func validation(s metrics.Step) metrics.Float {
	if s.ValLoss == nil {
		return metrics.Absent
	}
	return *s.ValLoss
}

func (p *page) runs(runs []Run, n int) {
	n = max(10, min(n, 8*points/len(runs)))
	runs = slices.Clone(runs)
	distinct(runs)
	thinned := make([][]metrics.Step, len(runs))
	for i, r := range runs {
		thinned[i] = thin(r.Steps, n)
		p.Steps = append(p.Steps, abscissae(thinned[i]))
		if len(thinned[i]) < r.Lines {
			p.Notes = append(p.Notes,
				fmt.Sprintf("%s: figures show %s of the %s logged steps: of each stretch the lowest and the highest "+
					"loss, and every validation.",
					r.Name, readable.Number(float64(len(thinned[i]))), readable.Number(float64(r.Lines))))
		}
		for _, m := range r.Missing {
			p.Notes = append(p.Notes, r.Name+": "+m+".")
		}
	}
	p.Summary = append(p.Summary, summary(runs))
	p.configs(runs)
	p.Facts = append(p.Facts, facts(runs)...)
	sources := sourcesOf(runs)
	for _, c := range curves {
		if c.section == layouts && !uneven(runs) {
			continue
		}
		f := &figure{Title: c.title, Kind: "lines", BySteps: true, Smooth: c.smooth, Section: c.section, Says: c.says,
			Source: sources}
		for _, m := range c.views {
			f.Views = append(f.Views, m.view(runs, thinned))
		}
		p.figure(f)
	}
	p.layouts(runs)
	for i := range runs {
		p.timeline(&runs[i])
	}
	p.Files = append(p.Files, rawFiles(runs)...)
}

func distinct(runs []Run) {
	seen := map[string]int{}
	for i := range runs {
		name := runs[i].Name
		if seen[name]++; seen[name] > 1 {
			runs[i].Name = fmt.Sprintf("%s (%d)", name, seen[name])
		}
	}
}

// uneven reports whether work differs between the ranks of any run from step to step.
func uneven(runs []Run) bool {
	return slices.ContainsFunc(runs, func(r Run) bool {
		return slices.ContainsFunc(r.Steps, func(s metrics.Step) bool { return s.AttentionImbalance > 1.001 })
	})
}

func (m measure) view(runs []Run, steps [][]metrics.Step) view {
	v := view{Name: m.name, Y: m.y, Panels: []panel{{}}}
	for i := range runs {
		line := series{Name: runs[i].Name, Of: i + 1, Color: i, Dash: i, Symbol: -1}
		checks := series{Name: runs[i].Name + ", validation", Of: i + 1, Color: i, Dash: i + 1, Symbol: i}
		for _, s := range steps[i] {
			y := m.of(s)
			if s.Step == 0 {
				y = metrics.Absent // the line of a validation before the first step has nothing else
			}
			line.Y = append(line.Y, number(y))
			if m.val != nil {
				checks.Y = append(checks.Y, number(m.val(s)))
			}
		}
		for _, s := range []series{line, checks} {
			if s.points() > 0 {
				v.Panels[0].Series = append(v.Panels[0].Series, s)
			}
		}
	}
	return v
}

// abscissae returns the choices for the x axis of a run's figures.
func abscissae(steps []metrics.Step) [3][]number {
	var x [3][]number
	for _, s := range steps {
		x[0] = append(x[0], number(s.Tokens))
		x[1] = append(x[1], number(s.Step))
		x[2] = append(x[2], number(since(s, steps[0]).Hours()))
	}
	return x
}

func sourcesOf(runs []Run) []string {
	var all []string
	for _, r := range runs {
		line := r.Command
		if line == "" {
			line = "command not known"
		}
		if len(runs) > 1 {
			line = r.Name + ": " + line
		}
		all = append(all, line+" · "+orUnknown(r.Commit, "commit")+" · "+orUnknown(machineText(r.Machine), "machine"))
	}
	const most = 4
	if len(all) > most {
		all = append(all[:most], fmt.Sprintf("and %d more runs, whose commands are at the top", len(all)-most))
	}
	return all
}

var machineParts = regexp.MustCompile(`^arch=\w+(,\w+=[^,]*)*$`)

// machineText writes a machine as --assume has it for a reader: "CPU, 23.5 GiB". Other text stays as it is.
func machineText(assumed string) string {
	if !machineParts.MatchString(assumed) {
		return assumed
	}
	var out []string
	for part := range strings.SplitSeq(assumed, ",") {
		key, value, _ := strings.Cut(part, "=")
		n, err := strconv.ParseFloat(value, 64)
		switch {
		case key == "arch" && value == "cpu":
			out = append(out, "CPU")
		case key == "arch":
			out = append(out, "GPU of "+value)
		case key == "memory" && err == nil:
			out = append(out, readable.Bytes(n))
		case key == "link" && err == nil:
			out = append(out, "link "+readable.Number(n/1e9)+" GB/s")
		case key == "cudnn" && value != "none":
			out = append(out, "cuDNN "+value)
		case key == "gpus":
			out = append(out, value+" on a host")
		}
	}
	return strings.Join(out, ", ")
}

func orUnknown(s, what string) string {
	if s == "" {
		return what + " not known"
	}
	return s
}

func facts(runs []Run) [][2]string {
	if len(runs) == 1 {
		r := runs[0]
		return [][2]string{
			{"Command", r.Command}, {"Commit", r.Commit}, {"Machine", machineText(r.Machine)}, {"Data", r.data()},
		}
	}
	var all [][2]string
	for _, r := range runs {
		all = append(all, [2]string{r.Name, r.Command})
	}
	for _, what := range []struct {
		name string
		of   func(Run) string
	}{
		{"Commit", func(r Run) string { return r.Commit }},
		{"Machine", func(r Run) string { return machineText(r.Machine) }},
		{"Data", Run.data},
	} {
		var values []string
		for _, r := range runs {
			if v := what.of(r); v != "" && !slices.Contains(values, v) {
				values = append(values, v)
			}
		}
		all = append(all, [2]string{what.name, strings.Join(values, "; ")})
	}
	return all
}

// data reports how much training data the run has; "" if its plan has no counts.
func (r Run) data() string {
	if r.Plan == nil || r.Plan.Data == nil {
		return ""
	}
	d, documents := r.Plan.Data, ""
	if d.Documents != nil {
		documents = "documents " + readable.Number(*d.Documents) + ", "
	}
	if d.Dropped > 0 {
		documents += "dropped documents " + readable.Number(d.Dropped) + ", "
	}
	return fmt.Sprintf("files %s, %stokens %s, targets %s; samples %s, steps of an epoch %s",
		readable.Number(d.Files), documents, readable.Number(d.Tokens), readable.Number(d.Targets),
		readable.Number(d.Samples),
		readable.Number(d.Steps))
}

func summary(runs []Run) *table {
	t := &table{Caption: "Runs", Columns: []string{"run", "state", "parameters", "sample, tokens", "ranks", "attention",
		"tokens", "loss", "validation, best", "tokens/s", "TFLOP/s a device", "MFU", "memory", "waiting", "logged for"}}
	for _, r := range runs {
		row := []cell{{Text: r.Name, Head: true}, text(r.state())}
		var params, ranks, seq float64
		if p := r.Plan; p != nil {
			params, ranks, seq = p.Estimate.Parameters, float64(p.Partition.Ranks), float64(p.Partition.SeqLen)
		}
		row = append(row, known(params, readable.Short), known(seq, readable.Size[float64]),
			known(ranks, readable.Number), text(r.Plan.attention()))
		last, took := metrics.Untrained(time.Time{}, 0, 0), math.NaN()
		if n := len(r.Steps); n > 0 {
			last, took = r.Steps[n-1], since(r.Steps[n-1], r.Steps[0]).Seconds()
		}
		mid := func(of func(metrics.Step) metrics.Float) float64 {
			var all []float64
			for _, s := range r.Steps {
				if s.Step > 0 {
					all = append(all, float64(of(s)))
				}
			}
			return median(all)
		}
		row = append(row, known(float64(last.Tokens), readable.Number), known(float64(last.Loss), loss),
			known(r.best(), loss),
			known(mid(func(s metrics.Step) metrics.Float { return s.TokensPerSecond }), readable.Number),
			known(mid(func(s metrics.Step) metrics.Float { return s.TFLOPsPerDevice }), readable.Number),
			known(mid(func(s metrics.Step) metrics.Float { return s.MFU }), readable.Percent),
			known(float64(last.MemoryBytes), readable.Bytes[float64]),
			known(mid(func(s metrics.Step) metrics.Float { return s.CommWaitSeconds / s.StepSeconds }),
				readable.Percent),
			known(took, readable.Seconds))
		t.Rows = append(t.Rows, row)
	}
	t.drop()
	return t
}

func (p *Plan) attention() string {
	var parts []string
	for _, key := range []string{"parallel.algorithm", "parallel.layout", "attention.backend"} {
		if v := p.option(key); v != "" {
			parts = append(parts, v)
		}
	}
	return strings.Join(parts, ", ")
}

func (r *Run) state() string {
	if len(r.Steps) == 0 {
		return "no step yet"
	}
	last, all := fmt.Sprint(r.Steps[len(r.Steps)-1].Step), r.Plan.option("train.steps")
	switch {
	case r.Ended != "" || last == all:
		return "done, step " + last
	case all == "":
		return "at step " + last
	}
	return fmt.Sprintf("at step %s of %s", last, all)
}

func (r *Run) best() float64 {
	best := math.NaN()
	for _, s := range r.Steps {
		if v := float64(validation(s)); !math.IsNaN(v) && !(v >= best) {
			best = v
		}
	}
	return best
}

func loss(x float64) string { return fmt.Sprintf("%.4f", x) }

func since(b, a metrics.Step) time.Duration { return time.Time(b.Time).Sub(time.Time(a.Time)) }

const (
	maxKeys    = 300 // of a config; cprun writes about 100
	maxSetting = 200 // bytes of a key or a value
)

// A settings is a config, one value for each key such as "optimizer.lr".
type settings map[string]string

func (p *Plan) settings() settings {
	if p == nil {
		return nil
	}
	s := settings{}
	for _, section := range slices.Sorted(maps.Keys(p.Config)) {
		s.add(section, p.Config[section])
	}
	return s
}

func (s settings) add(path string, section map[string]any) {
	for _, name := range slices.Sorted(maps.Keys(section)) {
		key, v := path+"."+name, section[name]
		if inner, ok := v.(map[string]any); ok {
			s.add(key, inner)
			continue
		}
		if len(s) == maxKeys || len(key) > maxSetting {
			continue
		}
		text := experiment.Text(v)
		switch {
		case v == nil:
			text = "null"
		case text == "":
			text = `""`
		case len(text) > maxSetting:
			text = strings.ToValidUTF8(text[:maxSetting], "") + "…"
		}
		s[key] = text
	}
}

// String returns a line for each key, in order.
func (s settings) String() string {
	var b strings.Builder
	for _, key := range slices.Sorted(maps.Keys(s)) {
		b.WriteString(key + ": " + s[key] + "\n")
	}
	return b.String()
}

type config struct{ Name, Text string }

func (p *page) configs(runs []Run) {
	t := &table{Caption: "Config keys that differ", Columns: []string{"key"}}
	var all []settings
	keys := map[string]bool{}
	for _, r := range runs {
		s := r.Plan.settings()
		if s == nil { // a note says that its plan is missing
			continue
		}
		p.Configs = append(p.Configs, config{r.Name, s.String()})
		t.Columns, all = append(t.Columns, r.Name), append(all, s)
		for key := range s {
			keys[key] = true
		}
	}
	if len(all) < 2 {
		return
	}
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		row := []cell{{Text: key, Head: true}}
		for _, s := range all {
			row = append(row, text(cmp.Or(s[key], "–")))
		}
		if slices.ContainsFunc(row[2:], func(c cell) bool { return c.Text != row[1].Text }) {
			t.Rows = append(t.Rows, row)
		}
	}
	if len(t.Rows) == 0 {
		p.Facts = append(p.Facts, [2]string{"Config", "the same in all runs"})
		return
	}
	p.Summary = append(p.Summary, t)
}
