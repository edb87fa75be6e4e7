package report

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/lab/experiment"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/model/metrics"
	"github.com/cprun/cprun/internal/run/bench"
)

// A curve describes a figure of values by step.
type curve struct {
	section, title, caption string
	smooth                  bool
	views                   []measure
}

type measure struct {
	name   string
	y      axis
	value  func(metrics.Step) metrics.Float
	marked func(metrics.Step) metrics.Float // a second line with symbols; nil: none
}

const (
	learning = "Training"
	speed    = "Speed and memory"
	layouts  = "Layout and work"
	timeline = "One step"
)

var curves = []curve{
	{learning, "Loss", "Mean loss of the target tokens of a step, before its update. Lines with symbols show the " +
		"validation loss.", true, []measure{
		{"loss", axis{Name: "loss, nats a token"}, lossOf, validation},
		{"loss, log", axis{Name: "loss, nats a token", Log: true}, lossOf, validation},
		{"validation only", axis{Name: "validation loss, nats a token"},
			func(metrics.Step) metrics.Float { return metrics.Absent }, validation},
	}},
	{learning, "Gradient norm", "Global norm of the gradients before clipping. After a bad step both it and the loss " +
		"jump.", true, []measure{
		{"norm", axis{Name: "gradient norm", Log: true}, func(s metrics.Step) metrics.Float { return s.GradNorm }, nil},
	}},
	{learning, "Learning rate", "The learning rate that the optimizer used.", false, []measure{
		{"rate", axis{Name: "learning rate", Zero: true}, func(s metrics.Step) metrics.Float { return s.LR }, nil},
	}},
	{learning, "Balance of experts", "Tokens of the expert with most over the mean of its layer, in the layer where " +
		"that is largest, or the loss of balance without its coefficient: 1 is even for the first, k choices for the second.",
		true, []measure{
			{"largest over mean", axis{Name: "largest load over mean"},
				func(s metrics.Step) metrics.Float { return orAbsent(s.ExpertImbalance) }, nil},
			{"loss of balance", axis{Name: "loss of balance"},
				func(s metrics.Step) metrics.Float { return orAbsent(s.AuxLoss) }, nil},
		}},
	{speed, "Throughput", "Speed of the logged steps. FLOPs are model FLOPs: causal attention counts half, and " +
		"recomputation does not count.", true, []measure{
		{"tokens/s", axis{Name: "tokens/s", Zero: true}, tokensPerSecond, nil},
		{"tokens/s a device", axis{Name: "tokens/s a device", Zero: true},
			func(s metrics.Step) metrics.Float { return s.TokensPerSecondPerDevice }, nil},
		{"TFLOP/s a device", axis{Name: "TFLOP/s a device", Zero: true}, tflops, nil},
		{"MFU", axis{Name: "share of the device's peak", Kind: "share", Zero: true}, mfu, nil},
	}},
	{speed, "Waiting for transfers", "Time in which compute waited for a transfer, on the rank that waited longest: " +
		"a share of the time since the logged step before, or seconds of a step.", true, []measure{
		{"share of the time", axis{Name: "share of the time", Kind: "share", Zero: true}, waitShare, nil},
		{"seconds", axis{Name: "seconds a step", Kind: "seconds", Zero: true},
			func(s metrics.Step) metrics.Float { return s.CommWaitSeconds }, nil},
	}},
	{speed, "Memory", "Peak so far, on the device that uses most.", false, []measure{
		{"peak", axis{Name: "bytes", Kind: "bytes", Zero: true},
			func(s metrics.Step) metrics.Float { return metrics.Float(s.MemoryBytes) }, nil},
	}},
	{layouts, "Balance of attention by step", "Visible (query, key) pairs of the busiest rank over the mean of " +
		"all ranks; 1 is even. With packed documents it differs from batch to batch.", false, []measure{
		{"slowest over mean", axis{Name: "slowest rank over mean"},
			func(s metrics.Step) metrics.Float { return s.AttentionImbalance }, nil},
		{"bytes sent", axis{Name: "bytes sent by the rank that sends most", Kind: "bytes", Zero: true},
			func(s metrics.Step) metrics.Float { return s.AttentionBytes }, nil},
	}},
}

func lossOf(s metrics.Step) metrics.Float { return s.Loss }

func tokensPerSecond(s metrics.Step) metrics.Float { return s.TokensPerSecond }

func tflops(s metrics.Step) metrics.Float { return s.TFLOPsPerDevice }

func mfu(s metrics.Step) metrics.Float { return s.MFU }

func waitShare(s metrics.Step) metrics.Float { return s.CommWaitSeconds / s.StepSeconds }

func validation(s metrics.Step) metrics.Float { return orAbsent(s.ValLoss) }

func orAbsent(v *metrics.Float) metrics.Float {
	if v == nil {
		return metrics.Absent
	}
	return *v
}

// averaged returns line i with the mean time of the steps since the line before. CommWaitSeconds is a mean over the
// same steps, while StepSeconds in the file is the time of the last of them.
func averaged(steps []metrics.Step, i int) metrics.Step {
	s := steps[i]
	if i > 0 && steps[i-1].Step > 0 && s.Step-steps[i-1].Step > 1 {
		s.StepSeconds = metrics.Float(since(s, steps[i-1]).Seconds() / float64(s.Step-steps[i-1].Step))
	}
	return s
}

func (p *page) runs(runs []Run, n int) {
	n = max(10, min(n, 8*points/len(runs)))
	runs = slices.Clone(runs)
	distinct(runs)
	thinned := make([][]metrics.Step, len(runs))
	for i, r := range runs {
		p.Headline = append(p.Headline, r.headline())
		thinned[i] = thin(r.Steps, n)
		p.Steps = append(p.Steps, abscissae(thinned[i]))
		if len(thinned[i]) < r.Lines {
			p.Notes = append(p.Notes,
				fmt.Sprintf("%s: figures show %s of the %s logged steps: the lowest and the highest loss of each "+
					"stretch, and every validation.",
					r.Name, readable.Number(float64(len(thinned[i]))), readable.Number(float64(r.Lines))))
		}
		for _, m := range r.Missing {
			p.Notes = append(p.Notes, r.Name+": "+m+".")
		}
	}
	p.Summary = append(p.Summary, summary(runs))
	p.configs(runs)
	p.Facts = append(p.Facts, facts(runs)...)
	for _, c := range curves {
		if c.section == layouts && !uneven(runs) {
			continue
		}
		f := &figure{Title: c.title, Kind: "lines", BySteps: true, Smooth: c.smooth, Section: c.section,
			Caption: c.caption}
		for _, m := range c.views {
			f.Views = append(f.Views, m.view(runs, thinned))
		}
		p.figure(f)
	}
	for i := range runs {
		p.samples(&runs[i])
	}
	p.layouts(runs)
	for i := range runs {
		p.timeline(&runs[i])
	}
	p.Files = append(p.Files, rawFiles(runs)...)
}

// Bounds of the table of samples: steps, and bytes of a prompt or an answer.
const maxSampled, maxText = 40, 1000

// samples adds a table of the answers to log.samples.
func (p *page) samples(r *Run) {
	t := &table{Caption: "Answers by step", Columns: []string{"step", "prompt", "answer"}}
	steps := slices.DeleteFunc(slices.Clone(r.Steps), func(s metrics.Step) bool { return len(s.Samples) == 0 })
	for _, s := range steps[max(0, len(steps)-maxSampled):] {
		for _, a := range s.Samples[:min(len(s.Samples), config.MaxPrompts)] {
			t.Rows = append(t.Rows, []cell{{Text: readable.Count(s.Step), Head: true}, text(terminal.Clip(a.Prompt, maxText)),
				text(terminal.Clip(a.Text, maxText))})
		}
	}
	if len(t.Rows) > 0 {
		p.figure(&figure{Title: "Answers to prompts" + r.suffix, Kind: "table", Section: learning, Table: t,
			Caption: fmt.Sprintf("The likeliest tokens after each prompt of log.samples, in the last %d rounds.",
				min(len(steps), maxSampled))})
	}
}

// distinct makes the names of runs unique, and adds them to the titles of figures if there are several.
func distinct(runs []Run) {
	seen := map[string]int{}
	for i := range runs {
		name := runs[i].Name
		if seen[name]++; seen[name] > 1 {
			runs[i].Name = fmt.Sprintf("%s (%d)", name, seen[name])
		}
		if len(runs) > 1 {
			runs[i].suffix = ", " + runs[i].Name
		}
	}
}

// uneven reports whether ranks have different work in any step of any run.
func uneven(runs []Run) bool {
	return slices.ContainsFunc(runs, func(r Run) bool {
		return slices.ContainsFunc(r.Steps, func(s metrics.Step) bool { return s.AttentionImbalance > 1.001 })
	})
}

func (m measure) view(runs []Run, steps [][]metrics.Step) view {
	v := view{Name: m.name, Y: m.y, Panels: []panel{{}}}
	for i := range runs {
		line := series{Name: runs[i].Name, Run: i + 1, Color: i, Dash: i, Symbol: -1}
		checks := series{Name: runs[i].Name + ", validation", Run: i + 1, Color: i, Dash: i + 1, Symbol: i}
		for k, s := range steps[i] {
			y := m.value(averaged(steps[i], k))
			if s.Step == 0 {
				y = metrics.Absent // the line before the first step has only a validation loss
			}
			line.Y = append(line.Y, number(y))
			if m.marked != nil {
				checks.Y = append(checks.Y, number(m.marked(s)))
			}
		}
		for _, s := range []series{line, checks} {
			if slices.ContainsFunc(s.Y, func(y number) bool { return finite(float64(y)) }) {
				v.Panels[0].Series = append(v.Panels[0].Series, s)
			}
		}
	}
	return v
}

// abscissae returns the x values of a run: tokens, steps and hours.
func abscissae(steps []metrics.Step) [3][]number {
	var x [3][]number
	for _, s := range steps {
		x[0] = append(x[0], number(s.Tokens))
		x[1] = append(x[1], number(s.Step))
		x[2] = append(x[2], number(since(s, steps[0]).Hours()))
	}
	return x
}

// machineText returns "CPU, 23.5 GiB" for a machine in the form of --assume. It returns other text unchanged.
func machineText(assumed string) string {
	m, err := machine.Assume([]string{assumed})
	if err != nil || assumed == "" {
		return assumed
	}
	text := strings.TrimPrefix(m.String(), "a ")
	if m.Memory > 0 {
		text += ", " + readable.Bytes(m.Memory)
	}
	return text
}

// facts returns the command, commit, machine, data and FP8 of the runs, once if all have the same.
func facts(runs []Run) (all [][2]string) {
	for i, name := range []string{"Command", "Commit", "Machine", "Data", "Linears"} {
		var values []string
		for _, r := range runs {
			linears := strings.TrimPrefix(r.Plan.option("precision.linears"), "bf16") // of the type of compute
			values = append(values, []string{r.Command, r.Commit, machineText(r.Machine), r.data(), linears}[i])
		}
		if len(slices.Compact(slices.Clone(values))) == 1 {
			all = append(all, [2]string{name, values[0]})
			continue
		}
		for k, v := range values {
			all = append(all, [2]string{name + runs[k].suffix, v})
		}
	}
	return all
}

// data returns the amount of training data; "" if the plan has no counts.
func (r Run) data() string {
	if r.Plan == nil || r.Plan.Data == nil {
		return ""
	}
	d, documents := r.Plan.Data, ""
	if d.Documents != nil {
		documents = "documents " + readable.Count(*d.Documents) + ", "
	}
	if d.DroppedDocuments > 0 {
		documents += "dropped documents " + readable.Count(d.DroppedDocuments) + ", "
	}
	return fmt.Sprintf("files %s, %stokens %s, targets %s; samples %s, steps of an epoch %s",
		readable.Count(d.Files), documents, readable.Count(d.Tokens), readable.Count(d.Targets),
		readable.Count(d.Samples), readable.Count(d.StepsPerEpoch))
}

// headline returns the result of a run in one sentence: "Validation loss 5.60 → 1.98 in 89 s on 4 ranks, 7,800
// tokens/s."
func (r *Run) headline() string {
	text, name, losses := r.state(), "validation loss", r.values(validation)
	if len(losses) == 0 {
		name, losses = "loss", r.values(lossOf)
	}
	if n := len(losses); n > 0 {
		change := fmt.Sprintf("%s %.2f → %.2f", name, losses[0], losses[n-1])
		if strings.HasPrefix(text, "done") {
			text = change
		} else {
			text += ": " + change
		}
	}
	if len(r.Steps) > 1 {
		text += " in " + readable.Seconds(r.took())
	}
	if r.Plan != nil && r.Plan.Partition.Ranks > 0 {
		text += " on " + label(keyRanks, float64(r.Plan.Partition.Ranks))
	}
	if speed := bench.Median(r.values(tokensPerSecond)); speed > 0 {
		text += ", " + readable.Number(speed) + " tokens/s"
	}
	if r.suffix != "" {
		return r.Name + ": " + text + "."
	}
	return strings.ToUpper(text[:1]) + text[1:] + "."
}

// values returns the known values of a measure in the logged steps.
func (r *Run) values(value func(metrics.Step) metrics.Float) (all []float64) {
	for i := range r.Steps {
		if v := value(averaged(r.Steps, i)); v.Known() {
			all = append(all, float64(v))
		}
	}
	return all
}

// took returns the seconds between the first and the last logged step; 0 without steps.
func (r *Run) took() float64 {
	if len(r.Steps) == 0 {
		return 0
	}
	return since(r.Steps[len(r.Steps)-1], r.Steps[0]).Seconds()
}

func summary(runs []Run) *table {
	t := &table{Caption: "Runs", Columns: []string{"run", "state", "parameters", "sample, tokens", "ranks", "attention",
		"tokens", "loss", "validation, best", "tokens/s", "TFLOP/s a device", "MFU", "memory", "waiting", "logged for"}}
	for _, r := range runs {
		var params, ranks, seq, best float64
		if p := r.Plan; p != nil {
			params, ranks = float64(p.Estimate.Parameters), float64(p.Partition.Ranks)
			seq = float64(p.Partition.SeqLen)
		}
		last := metrics.Untrained(time.Time{}, 0, 0)
		if n := len(r.Steps); n > 0 {
			last = r.Steps[n-1]
		}
		if losses := r.values(validation); len(losses) > 0 {
			best = slices.Min(losses)
		}
		median := func(value func(metrics.Step) metrics.Float) float64 { return bench.Median(r.values(value)) }
		t.Rows = append(t.Rows, []cell{{Text: r.Name, Head: true}, text(r.state()), known(params, readable.Short),
			known(seq, readable.Size[float64]), known(ranks, readable.Number), text(r.Plan.attention()),
			known(float64(last.Tokens), readable.Number), known(float64(last.Loss), loss), known(best, loss),
			known(median(tokensPerSecond), readable.Number), known(median(tflops), readable.Number),
			known(median(mfu), readable.Percent), known(float64(last.MemoryBytes), readable.Bytes[float64]),
			known(median(waitShare), readable.Percent), known(r.took(), readable.Seconds)})
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
	case r.Steps[len(r.Steps)-1].EarlyStop:
		return "done, ended early at step " + last
	case r.Ended != "" || last == all:
		return "done, step " + last
	case all == "":
		return "at step " + last
	}
	return fmt.Sprintf("at step %s of %s", last, all)
}

func loss(x float64) string { return fmt.Sprintf("%.4f", x) }

func since(b, a metrics.Step) time.Duration { return time.Time(b.Time).Sub(time.Time(a.Time)) }

const (
	maxKeys    = 300 // of a config; cprun writes about 100
	maxSetting = 200 // bytes of a key or a value
)

// settings returns a config by key, such as "optimizer.lr".
func (p *Plan) settings() map[string]string {
	all := map[string]string{}
	var add func(path string, section map[string]any)
	add = func(path string, section map[string]any) {
		for _, name := range slices.Sorted(maps.Keys(section)) {
			key := strings.TrimPrefix(path+"."+name, ".")
			if inner, ok := section[name].(map[string]any); ok {
				add(key, inner)
			} else if len(all) < maxKeys && len(key) <= maxSetting {
				all[key] = setting(section[name])
			}
		}
	}
	add("", p.Config)
	return all
}

// setting returns a value as a config has it, cut at maxSetting.
func setting(v any) string {
	text := experiment.Text(v)
	switch {
	case v == nil:
		return "null"
	case text == "":
		return `""`
	case len(text) > maxSetting:
		return strings.ToValidUTF8(text[:maxSetting], "") + "…"
	}
	return text
}

// defaults returns the defaults of the keys of a config.
func defaults(of map[string]string) map[string]string {
	all := map[string]string{}
	for key := range of {
		if v, ok := config.Default(key); ok || config.IsSection(key) {
			all[key] = setting(v)
		} else if config.UnknownKey(key) != "" {
			all[key] = of[key] // a key of an older version
		}
	}
	return all
}

type namedConfig struct{ Name, Text string }

// configs adds the config of each run, and a table of the keys that differ between them, or from their defaults.
func (p *page) configs(runs []Run) {
	t := &table{Caption: "Config keys that differ between the runs", Columns: []string{"key"}}
	var all []map[string]string
	union := map[string]string{}
	for _, r := range runs {
		if r.Plan == nil { // a note says that it is missing
			continue
		}
		s, lines := r.Plan.settings(), ""
		for _, key := range slices.Sorted(maps.Keys(s)) {
			lines += key + ": " + s[key] + "\n"
		}
		p.Configs = append(p.Configs, namedConfig{r.Name, lines})
		t.Columns, all = append(t.Columns, r.Name), append(all, s)
		maps.Copy(union, s)
	}
	switch {
	case len(runs) == 1 && len(all) == 1:
		t.Caption, t.Columns = "Config keys that differ from their defaults", []string{"key", "value", "default"}
		all = append(all, defaults(all[0]))
	case len(all) < 2:
		return
	}
	for _, key := range slices.Sorted(maps.Keys(union)) {
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
