package report

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/base64"
	"encoding/csv"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"html"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/internal/lab/experiment"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/metrics"
)

var update = flag.Bool("update", false, "rewrite the expected payloads")

// openInput returns the input of paths below testdata.
func openInput(t *testing.T, paths ...string) Input {
	t.Helper()
	in := Input{Title: strings.Join(paths, ", "), Commit: "test"}
	for _, p := range paths {
		must.Do(t, in.Open(filepath.Join("testdata", p)))
	}
	return in
}

func writePage(t *testing.T, in Input) string {
	t.Helper()
	var out bytes.Buffer
	must.Do(t, Write(&out, in))
	if out.Len() > MaxPage {
		t.Errorf("the page has %d bytes", out.Len())
	}
	return out.String()
}

var block = regexp.MustCompile(`(?s)<script type="application/json" id="data">(.*?)</script>`)

// payload returns the data in a page, with 0 for unknown numbers.
func payload(t *testing.T, text string) (p page) {
	t.Helper()
	m := block.FindAllStringSubmatch(text, -1)
	if len(m) != 1 {
		t.Fatalf("%d blocks of data", len(m))
	}
	must.Do(t, json.Unmarshal([]byte(m[0][1]), &p))
	return p
}

// TestPayloads compares pages with testdata: a line for the text, and one for each figure.
func TestPayloads(t *testing.T) {
	for name, in := range map[string]Input{
		"experiment": openInput(t, "experiment"), "runs": openInput(t, "runs/ring-packed", "runs/allgather"),
		"words": {Experiment: cells("attention.backend", "flash", "fused")},
	} {
		t.Run(name, func(t *testing.T) {
			p := build(in, 40)
			lines := []any{[]any{p.Headline, p.Facts, p.Summary, p.Configs, p.Notes}}
			for _, f := range p.Figures {
				lines = append(lines, []any{f, f.Section, f.Caption, f.Table, f.Errors})
			}
			var got bytes.Buffer
			for _, l := range lines {
				must.Do(t, json.NewEncoder(&got).Encode(l))
			}
			file := filepath.Join("testdata", name+".payload")
			if *update {
				must.Do(t, os.WriteFile(file, got.Bytes(), 0o644))
			}
			want := must.Have(os.ReadFile(file))
			a, b := strings.Split(got.String(), "\n"), strings.Split(string(want), "\n")
			for i := range max(len(a), len(b)) {
				if i >= len(a) || i >= len(b) || a[i] != b[i] {
					t.Fatalf("line %d differs from %s; look at the page, then run with -update", i+1, file)
				}
			}
		})
	}
}

// Names, errors and commands are untrusted. They reach the page neither as markup nor as script.
func TestUntrustedTextIsEscaped(t *testing.T) {
	t.Parallel()
	const evil = `</script><script>alert(1)</script><img src=x onerror=alert(2)>"'><!--`
	in := openInput(t, "experiment", "runs/ring-packed")
	e := *in.Experiment
	e.Name, e.Command, e.Machine, e.Base, e.Commit = evil, evil, evil, evil, evil
	e.Set = map[string]any{evil: evil}
	e.Grid = append(e.Grid, experiment.Axis{Key: evil, Values: []any{evil, "b"}})
	for i := range e.Cells {
		if e.Cells[i].Error != "" {
			e.Cells[i].Error = evil
		}
		e.Cells[i].Values[evil] = []any{evil, "b"}[i%2]
	}
	r := in.Runs[0]
	r.Steps[0].Samples = []metrics.Sample{{Prompt: evil, Text: evil + strings.Repeat("long", maxText)}}
	r.Name, r.Command, r.Commit, r.Machine, r.Missing = evil, evil, evil, evil, []string{evil}
	for i := range r.Slices {
		r.Slices[i].Detail += evil
	}
	r.Plan.Partition.Layout = evil
	in.Title, in.Experiment, in.Runs, in.Commit = evil, &e, []Run{r}, evil
	page := writePage(t, in)
	library := asset("echarts.min.js")
	for _, markup := range []string{"<script>alert", "<img src=x", "onerror=alert(2)>"} {
		if strings.Contains(strings.Replace(page, library, "", 1), markup) {
			t.Errorf("the page has %s", markup)
		}
	}
	if n := strings.Count(strings.ToLower(page), "<script"); n != len(scripts)+1 {
		t.Errorf("%d scripts, want %d and the data", n, len(scripts))
	}
	if n := strings.Count(page, "longlong"); !strings.Contains(page, "Answers to prompts") || n > maxText/8 {
		t.Errorf("the answers have %d long words", n)
	}
	p := payload(t, page)
	if p.Title != evil {
		t.Errorf("the title has become %q", p.Title)
	}
	if !strings.Contains(html.UnescapeString(page), evil) {
		t.Error("the page does not show the text")
	}
}

// A thinned run keeps the steps with answers, of which the page shows the last ones.
func TestAnswersStay(t *testing.T) {
	t.Parallel()
	var kept thinner
	kept.most = 10
	for n := range int64(500) {
		s := metrics.Step{Step: n + 1, Loss: 1}
		if n%5 == 0 {
			s.Samples = slices.Repeat([]metrics.Sample{{Prompt: "p", Text: "t"}}, config.MaxPrompts+1)
		}
		kept.add(s)
	}
	p := page{}
	p.samples(&Run{Steps: kept.steps()})
	rows := p.Figures[0].Table.Rows
	if n := len(rows); n != maxSampled*config.MaxPrompts || rows[n-1][0].Text != "496" || rows[n-1][2].Text != "t" {
		t.Errorf("%d rows, the last of step %s", n, rows[n-1][0].Text)
	}
}

// The content security policy allows only the scripts and the style of the page, by their hashes.
func TestPolicy(t *testing.T) {
	t.Parallel()
	page := writePage(t, openInput(t, "experiment"))
	meta := regexp.MustCompile(`Content-Security-Policy" content="([^"]*)"`)
	policy := html.UnescapeString(meta.FindStringSubmatch(page)[1])
	if !strings.HasPrefix(policy, "default-src 'none'; ") || strings.Contains(policy, "unsafe") ||
		strings.Contains(policy, "http") {
		t.Errorf("policy %s", policy)
	}
	inline := regexp.MustCompile(`(?s)<(script|style)>(.*?)</(?:script|style)>`).FindAllStringSubmatch(page, -1)
	if len(inline) != len(scripts)+1 {
		t.Errorf("%d scripts and styles", len(inline))
	}
	for _, m := range inline {
		sum := sha256.Sum256([]byte(m[2]))
		if want := "'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"; !strings.Contains(policy, want) {
			t.Errorf("the policy forbids a %s of the page: %.60s", m[1], m[2])
		}
	}
	if markup := page[:strings.Index(page, "<script>")]; strings.Contains(markup, " style=") ||
		regexp.MustCompile(`<[a-z]+[^>]* on[a-z]+=`).MatchString(markup) {
		t.Error("the page has a style or a handler in an attribute, which the policy forbids")
	}
	if m := regexp.MustCompile(`(?:src|href)="((?:https?:)?//[^"]*)"`).FindString(page); m != "" {
		t.Errorf("the page links to %s", m)
	}
}

func TestChecksumOfTheLibrary(t *testing.T) {
	t.Parallel()
	sum := sha256.Sum256([]byte(asset("echarts.min.js")))
	readme := must.Have(os.ReadFile("assets/README.md"))
	if !strings.Contains(string(readme), fmt.Sprintf("%x", sum)) {
		t.Errorf("echarts.min.js has the sum %x; assets/README.md has another", sum)
	}
	for _, name := range scripts {
		if strings.Contains(strings.ToLower(asset(name)), "</script") || strings.Contains(asset(name), "<!--") {
			t.Errorf("%s would end its script", name)
		}
	}
}

// many returns a run of n steps with one spike.
func many(n, spike int) Run {
	r := Run{Name: "long", Lines: n, Commit: "c", Machine: "m", Command: "cprun"}
	for i := range n {
		s := metrics.Untrained(time.Unix(int64(i), 0), 0, 1e9)
		s.ValLoss, s.Step, s.Tokens, s.StepSeconds, s.TokensPerSecond = nil, int64(i+1), int64(i+1)*4096, 1.5,
			4096.123456789
		s.Loss, s.GradNorm = metrics.Float(10/float64(i+1)), metrics.Float(1+1/float64(i+3))
		if i == spike {
			s.Loss = 99
		}
		r.Steps = append(r.Steps, s)
	}
	return r
}

// A page of long runs stays below MaxPage, keeps spikes, and notes the number of omitted steps.
func TestLongRunsAreThinned(t *testing.T) {
	t.Parallel()
	in := Input{Runs: []Run{many(5_000, 3_333), many(5_000, 3_333)}}
	page := writePage(t, in)
	if !strings.Contains(html.UnescapeString(page), "of the 5,000 logged steps") {
		t.Error("the page does not note the omitted steps")
	}
	spike, n := false, 0
	for _, s := range payload(t, page).Figures[0].Views[0].Panels[0].Series {
		n += len(s.Y)
		spike = spike || slices.Contains(s.Y, 99)
	}
	if !spike || n > 2*points {
		t.Errorf("spike kept: %v; %d points", spike, n)
	}
}

// A thinner keeps equal shares of the first and the second half of a run, spikes and validations.
func TestThinnerIsEven(t *testing.T) {
	t.Parallel()
	for _, n := range []int{10, 1000, 1001, 50_000} {
		k, loss := thinner{most: 1000}, metrics.Float(3)
		for i, s := range many(n, n/3).Steps {
			if i == n/2+1 {
				s.ValLoss = &loss
			}
			k.add(s)
		}
		kept := k.steps()
		first, spike, validated := 0, false, false
		for i, s := range kept {
			if i > 0 && s.Step <= kept[i-1].Step {
				t.Fatalf("%d steps: %d comes after %d", n, s.Step, kept[i-1].Step)
			}
			if s.Step <= int64(n/2) {
				first++
			}
			spike, validated = spike || s.Loss == 99, validated || s.ValLoss != nil
		}
		if n <= 1000 && len(kept) != n || len(kept) > 1001 || n > 1000 && len(kept) < 400 {
			t.Errorf("%d of %d steps are kept", len(kept), n)
		}
		if d := 2*first - len(kept); !spike || !validated || d > len(kept)/10+2 || -d > len(kept)/10+2 {
			t.Errorf("%d steps: %d kept, %d of them in the first half; spike kept: %v; validation: %v", n, len(kept),
				first, spike, validated)
		}
	}
}

// Pieces of a timeline do not overlap, cover the whole row, and are few enough.
func TestTimelineInPieces(t *testing.T) {
	t.Parallel()
	var row []span
	at := 0.0
	for i := range 1000 {
		took := float64(1 + i%7)
		piece := metrics.Slice{Name: "work", Start: at, Took: took}
		row = append(row, span{Slice: piece, kind: pieceKind(i % 3)})
		at += took
	}
	for _, least := range []float64{0, 3, 50, 1e6} {
		pieces := join(slices.Clone(row), least)
		for i := 1; i < len(pieces); i++ {
			if a := pieces[i-1]; a.Start+a.Took > pieces[i].Start+1e-9 {
				t.Fatalf("least %g: piece %d overlaps the next", least, i)
			}
		}
		last := pieces[len(pieces)-1]
		if pieces[0].Start != 0 || last.Start+last.Took != at {
			t.Errorf("least %g: from %g to %g, want 0 to %g", least, pieces[0].Start, last.Start+last.Took, at)
		}
		if most := 1 + at/max(1, least)*2; float64(len(pieces)) > most {
			t.Errorf("least %g: %d pieces", least, len(pieces))
		}
	}
}

// The download of a run has every step with all digits.
func TestRawNumbers(t *testing.T) {
	r := many(100, -1)
	files := rawFiles([]Run{r})
	_, text, _ := strings.Cut(string(files[0].Link), "data:application/gzip;base64,")
	data := must.Have(base64.StdEncoding.DecodeString(text))
	z := must.Have(gzip.NewReader(bytes.NewReader(data)))
	rows, err := csv.NewReader(z).ReadAll()
	if err != nil || len(rows) != 101 {
		t.Fatalf("%d rows, %v", len(rows), err)
	}
	if got := rows[1][9]; rows[0][9] != "tokens_per_second" || got != "4096.123456789" {
		t.Errorf("%s is %s", rows[0][9], got)
	}
}

// The page shows runs that go on, were killed, or have lost files, and names the missing files.
func TestIncompleteRuns(t *testing.T) {
	t.Parallel()
	line := `{"time":"2026-11-23T00:00:00Z","step":1,"epoch":0,"loss":3,"grad_norm":1,"lr":0.001,` +
		`"tokens":64,"step_seconds":1,"tokens_per_second":64,"memory_bytes":5}`
	for name, c := range map[string]struct {
		files map[string]string
		want  []string // in the page; "" alone: an error
	}{
		"torn": {map[string]string{"metrics.jsonl": line + "\n" + line[:40]},
			[]string{"metrics.jsonl: 1 ", "plan.json", "at step 1"}},
		"no metrics": {map[string]string{"plan.json": `{"partition":{"ranks":2}}`},
			[]string{"metrics.jsonl", "no step yet"}},
		"bad plan": {map[string]string{"metrics.jsonl": line + "\n", "plan.json": "{"},
			[]string{"plan.json cannot be read"}},
		"empty":      {map[string]string{"metrics.jsonl": ""}, []string{"no step yet"}},
		"nothing":    {map[string]string{"other": ""}, []string{""}},
		"no results": {map[string]string{"results.json": "{}"}, []string{""}},
		"null losses": {map[string]string{"metrics.jsonl": strings.Replace(line, `"loss":3`, `"loss":null`, 1) + "\n"},
			[]string{"at step 1"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for f, text := range c.files {
				must.Do(t, os.WriteFile(filepath.Join(dir, f), []byte(text), 0o600))
			}
			var in Input
			err := in.Open(dir)
			if c.want[0] == "" {
				if err == nil {
					t.Error("no error")
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			page := html.UnescapeString(writePage(t, in))
			for _, w := range c.want {
				if !strings.Contains(page, w) {
					t.Errorf("the page lacks %q", w)
				}
			}
		})
	}
	var in Input
	if err := in.Open(filepath.Join(t.TempDir(), "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a missing path: %v", err)
	}
}

// cells returns results of a grid with one axis.
func cells(key string, values ...any) *experiment.Results {
	e := &experiment.Results{Version: 1, Name: "grid", Grid: []experiment.Axis{{Key: key, Values: values}}}
	for i, v := range values {
		e.Cells = append(e.Cells, experiment.Cell{ID: fmt.Sprint(i), Values: map[string]any{key: v},
			Status: experiment.OK, Runs: 1,
			TokensPerSecond: 100, TokensPerSecondPerDevice: 50 + float64(i), StepSeconds: 1, StepSecondsMin: .9,
			StepSecondsMax: 1.1, TFLOPsPerDevice: 3})
	}
	return e
}

// A grid of any shape gives a page: one axis, only words, no cell that ran, no values.
func TestGridsOfAnyShape(t *testing.T) {
	t.Parallel()
	chosen := cells("data.seq_len", 1024, 2048)
	chosen.Cells[0].Choices = experiment.Choices{Backend: "flash", Layout: "zigzag", Recompute: "none"}
	chosen.Cells[1].Choices = experiment.Choices{Backend: "fused", Layout: "striped", Recompute: "full"}
	pending := cells("nproc", 1.0, 2.0)
	for i := range pending.Cells {
		pending.Cells[i] = experiment.Cell{Values: pending.Cells[i].Values, Status: experiment.Pending}
	}
	bare := cells("nproc", 1.0, 2.0)
	bare.Cells[0].Values, bare.Grid = nil, append(bare.Grid, chosen.Grid...)
	for name, e := range map[string]*experiment.Results{
		"chosen": chosen, "numbers": cells("train.micro_batch_size", 1.0, 2.0), "bare": bare, "pending": pending,
		"booleans": cells("train.deterministic", true, false), "ints": cells("data.seq_len", 1024, 2048),
		"one": cells("nproc", 1.0), "none": {Version: 1, Name: "none"},
		"lists": cells("optimizer.betas", []any{.9, .95}, []any{.9, .99}),
	} {
		t.Run(name, func(t *testing.T) {
			page := writePage(t, Input{Title: name, Experiment: e})
			payload(t, page)
			for _, ran := range []string{"flash, zigzag, none", "fused, striped, full"} {
				if strings.Contains(page, ran) != (name == "chosen") {
					t.Errorf("%q is on the page: %v", ran, name != "chosen")
				}
			}
		})
	}
}

// Speed-up is relative to the fastest cell with the fewest ranks. The ideal line begins there.
func TestStrongScaling(t *testing.T) {
	e := &experiment.Results{Version: 1, Grid: []experiment.Axis{{Key: "nproc", Values: []any{1.0, 2.0, 4.0}},
		{Key: "parallel.algorithm", Values: []any{"ring", "ulysses"}}}}
	for i, rate := range map[int]float64{1: 100, 2: 90, 4: 80} {
		for k, a := range []string{"ring", "ulysses"} {
			r := rate / float64(k+1)
			e.Cells = append(e.Cells, experiment.Cell{ID: fmt.Sprint(i, a), Values: map[string]any{"nproc": float64(i),
				"parallel.algorithm": a}, Status: experiment.OK, TokensPerSecondPerDevice: r,
				TokensPerSecond: r * float64(i), StepSeconds: 1 / r / float64(i)})
		}
	}
	for _, s := range newGrid(e).strong()[0].Panels[0].Series {
		want := map[string][]number{"ring": {1, 1.8, 3.2}, "ulysses": {.5, .9, 1.6}, "ideal": {1, 4}}[s.Name]
		if fmt.Sprint(s.Y) != fmt.Sprint(want) {
			t.Errorf("%s speeds up by %v, want %v", s.Name, s.Y, want)
		}
	}
}

// A wait counts for the rank that sends the awaited message.
func TestWhoWaitedForWhom(t *testing.T) {
	r := Run{Name: "r", Slices: []metrics.Slice{
		{Rank: 0, Lane: "compute", Name: "attention forward", Label: "step 4/forward/layer 0/hop 0 owner 0", Start: 1,
			Took: 1},
		{Rank: 0, Lane: "compute", Name: "wait", Label: "step 4/forward/layer 0/hop 0 owner 0",
			Detail: "exchange: 8 bytes to rank 1, 8 bytes from rank 1", Start: 2, Took: 3},
		{Rank: 1, Lane: "attention comm", Name: "exchange", Label: "step 4/forward/layer 0",
			Detail: "8 bytes to rank 0, 8 bytes from rank 0", Start: 1, Took: 4},
		{Rank: 1, Lane: "compute", Name: "linear", Label: "step 4/forward/layer 0", Start: 1, Took: 1},
		{Rank: 0, Lane: "compute", Name: "linear", Label: "step 5/forward/layer 0", Start: 9, Took: 1},
	}}
	spans, step, ranks := r.lastStep()
	if step != 4 || len(ranks) != 2 || len(spans) != 4 || spans[0].Start != 0 {
		t.Fatalf("step %d of ranks %v, %d spans; rank 1 has no step 5", step, ranks, len(spans))
	}
	s := waitsFor(spans, ranks).Panels[0].Series[0]
	if fmt.Sprint(s.Lo) != "[0 3 0 0]" {
		t.Errorf("waits %v, want rank 0 for rank 1, 3 s", s.Lo)
	}
}

// The time of a rule and the waits for its states are apart from those of attention.
func TestTimeOfARule(t *testing.T) {
	of := func(name, part string, took float64) metrics.Slice {
		return metrics.Slice{Lane: "compute", Name: name, Label: "step 1/forward/layer 0/" + part, Took: took}
	}
	r := Run{Slices: []metrics.Slice{of("delta summarize", "delta rule", 1), of("wait", "states round 0", 2),
		of("delta compose", "states round 1", 3), of("delta forward", "delta rule", 4), of("wait", "hop 1 owner 3", 5),
		of("attention forward", "hop 1 owner 3", 6), of("wait", "halo", 7), of("wait", "halo gradients", 8)}}
	spans, _, ranks := r.lastStep()
	for kind, want := range map[pieceKind]string{rule: "[delta rule states round 1] [5 3]", attention: "[hop 1] [6]",
		waiting: "[states round 0 hop 1 halo halo gradients] [2 5 7 8]"} {
		v := hopTimes(kind, spans, ranks)
		if got := fmt.Sprint(v.X.Text, v.Panels[0].Series[0].Lo); got != want {
			t.Errorf("%s takes %s, want %s", kindNames[kind], got, want)
		}
	}
}

func TestStateOfAnEarlyStop(t *testing.T) {
	r := &Run{Steps: []metrics.Step{{Step: 4}, {Step: 5, EarlyStop: true}}, Plan: &Plan{}}
	if got := r.state(); got != "done, ended early at step 5" {
		t.Errorf("the state is %q", got)
	}
}
