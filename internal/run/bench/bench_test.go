package bench

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/foresee/cost"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/model/metrics"
	"github.com/cprun/cprun/tensor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestMedian(t *testing.T) {
	for _, c := range []struct {
		xs   []float64
		want float64
	}{{nil, 0}, {[]float64{3}, 3}, {[]float64{9, 1, 5}, 5}, {[]float64{4, 1, 2, 9}, 3}} {
		if got := Median(c.xs); got != c.want {
			t.Errorf("Median(%v) = %v, want %v", c.xs, got, c.want)
		}
	}
}

// The usual count is 4*S^2*H*D/2 for a causal forward pass, and 2.5 times that for the backward pass.
func TestFLOPsAreThoseOfTheField(t *testing.T) {
	const s, h, d = 128 << 10, 32, 128
	want := 4 * float64(s) * float64(s) * h * d / 2
	if got := FLOPs(s*(s+1)/2, h, d, d); math.Abs(got/want-1) > 1e-4 {
		t.Errorf("causal forward pass: %g FLOPs, want %g", got, want)
	}
	if got := FLOPs(s*s, h, d, d); got != 2*want {
		t.Errorf("full forward pass: %g FLOPs, want %g", got, 2*want)
	}
	if bothOfForward != 1+2.5 {
		t.Errorf("forward and backward take %v forward passes, want 3.5", bothOfForward)
	}
	if r := rate(8e12, 2, 4); r.TFLOPs != 1 {
		t.Errorf("8e12 FLOPs in 2 s on 4 devices are %v TFLOP/s each, want 1", r.TFLOPs)
	}
}

// ranks runs f on ranks in this process, each with its own compute stream.
func ranks(t *testing.T, n int, f func(r *Rank) error) {
	t.Helper()
	streams := make([]tensor.Stream, n)
	for i := range streams {
		streams[i] = tensor.NewHostStream("compute")
	}
	groups := comm.NewLocal(n, streams, comm.Options{})
	errs := make(chan error, n)
	for i, g := range groups {
		go func() {
			dev := device.CPU(streams[i].(*tensor.HostStream), "flash", tensor.F32)
			err := f(&Rank{Device: dev, World: g, Control: g, Transports: []Transport{{Name: "local", Comm: g}}})
			errs <- errors.Join(err, dev.Close())
		}()
	}
	for range n {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	for i, g := range groups {
		g.Close()
		streams[i].(*tensor.HostStream).Close()
	}
}

// measure returns the report of a task of ranks in this process.
func measure(t *testing.T, n int, task Task) *Report {
	t.Helper()
	report := &Report{Ranks: n, Machine: cost.Machine{Device: "cpu"}, Costs: cost.Set{Ranks: n}}
	if task.Attention != nil {
		report.Attention = &Attention{Spec: *task.Attention}
	}
	ranks(t, n, func(r *Rank) error {
		return r.Run(t.Context(), &task, func(row Row) error {
			if r.World.Rank() == 0 && report.Add(row) == "" {
				t.Errorf("no line for %+v", row)
			}
			return nil
		})
	})
	if Compare(report.Ops); task.Calibrate == nil {
		check(t, report)
	}
	return report
}

func TestAttentionOfOneAndTwoRanks(t *testing.T) {
	for i, dtype := range []string{"fp32", "fp32", "bf16"} {
		n := min(i+1, 2)
		spec := &AttentionSpec{Seq: []int{64, 96}, Algorithms: []string{"ring", "allgather"},
			Layouts: []string{"zigzag"}, Backend: "flash", DType: dtype,
			Heads: 4, KVHeads: 2, HeadDim: 16, Causal: true, Window: -1, Iters: 2}
		if err := spec.Check(n); err != nil {
			t.Fatal(err)
		}
		rows := measure(t, n, Task{Attention: spec}).Attention.Rows
		bytes, _, err := spec.Demand(n, 0, machine.Machine{})
		if len(rows) != 4 || err != nil || rows[0].Memory > bytes {
			t.Fatalf("%d ranks: %d rows, want 4, of at most %d bytes: %v", n, len(rows), bytes, err)
		}
		for _, r := range rows {
			if !(r.Forward.Seconds > 0) || !(r.Both.Seconds > 0) || !(r.Both.TFLOPs > 0) || r.Iters != 2 ||
				r.Tokens != r.Seq/n || r.Backend != "flash" {
				t.Errorf("%d ranks: row %+v", n, r)
			}
			if (n > 1) != (r.Local != nil && r.Alone != nil && r.Loss != nil && r.SentBackward > r.SentForward &&
				r.SentForward > 0 && moves(r.Hops, "forward") && moves(r.Hops, "backward")) {
				t.Errorf("%d ranks: baselines and bytes of %+v", n, r)
			}
			if r.FLOPs != FLOPs(r.Seq*(r.Seq+1)/2, 4, 16, 16) {
				t.Errorf("%d tokens: %g FLOPs", r.Seq, r.FLOPs)
			}
		}
	}
}

// With Quick, a row has its two passes and nothing else, and its table has no hops.
func TestQuickAttentionTimesThePassesOnly(t *testing.T) {
	report := measure(t, 2, Task{Attention: &AttentionSpec{Seq: []int{64}, Algorithms: []string{"ring"},
		Layouts: []string{"zigzag"}, Backend: "flash", DType: "fp32", Heads: 2, KVHeads: 2, HeadDim: 16, Causal: true,
		Window: -1, Iters: 1, Quick: true}})
	rows := report.Attention.Rows
	if len(rows) != 1 || !(rows[0].Forward.Seconds > 0) || !(rows[0].Both.Seconds > 0) || rows[0].Memory == 0 ||
		rows[0].Local != nil || rows[0].Alone != nil || rows[0].Hops != nil {
		t.Fatalf("rows %+v", rows)
	}
	if n := len(report.Tables()); n != 1 {
		t.Errorf("%d tables, want 1", n)
	}
}

// moves reports whether a hop of a pass has transfers.
func moves(hops []HopTimes, pass string) bool {
	return slices.ContainsFunc(hops, func(h HopTimes) bool { return h.Pass == pass && h.Transfer > 0 && h.Compute > 0 })
}

func TestTransfersCountWhatGoesOverALink(t *testing.T) {
	spec := CommSpec{Sizes: []int{4096}, Calls: Calls, Iters: 2, Warmup: 1}
	if err := spec.Check(2); err != nil {
		t.Fatal(err)
	}
	rows := measure(t, 2, Task{Comm: &spec}).Comm
	// With 4096 bytes and two ranks: all bytes for an exchange, half for a collective, twice that for all_reduce.
	want := map[string]float64{"exchange": 4096, "all_reduce": 4096, "reduce_scatter": 2048, "all_gather": 2048}
	if len(rows) != len(want) {
		t.Fatalf("%d rows, want %d", len(rows), len(want))
	}
	for _, r := range rows {
		if moved := r.GBps * 1e9 * r.Seconds; math.Abs(moved-want[r.Call]) > 1e-6*moved {
			t.Errorf("%s counts %.1f bytes, want %.1f", r.Call, moved, want[r.Call])
		}
	}
	spec.Calls, spec.Iters = Calls[:1], 0 // until it is accurate
	if rows := measure(t, 2, Task{Comm: &spec}).Comm; len(rows) != 1 || !(rows[0].Seconds > 0) {
		t.Errorf("without a number of iterations: %+v", rows)
	}
}

func TestEveryOperationIsMeasured(t *testing.T) {
	spec := OpsSpec{}
	spec.Default("cpu")
	spec.Tokens, spec.Vocab, spec.Chunk, spec.Params, spec.Ceiling = 32, 64, 16, 1<<12, 32
	names := make(map[string]bool)
	for _, r := range measure(t, 1, Task{Ops: &spec}).Ops {
		names[r.Name] = true
		if !(r.Rate > 0) || !(r.Share > 0) || r.Share > 1 {
			t.Errorf("%+v", r)
		}
	}
	for _, n := range []string{"copy", "matrix product", "rmsnorm", "rope", "swiglu", "embed backward", "cross entropy",
		"adamw"} {
		if !names[n] {
			t.Errorf("%s was not measured", n)
		}
	}
}

// check checks every report: it survives JSON and prints.
func check(t *testing.T, r *Report) {
	t.Helper()
	r.Date = time.Date(2026, 11, 21, 0, 0, 0, 0, time.UTC)
	var text, again, tables bytes.Buffer
	if err := files.WriteJSON(&text, "  ", r); err != nil {
		t.Fatal(err)
	}
	var back Report
	dec := json.NewDecoder(bytes.NewReader(text.Bytes()))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&back); err != nil {
		t.Fatal(err)
	}
	if err := files.WriteJSON(&again, "  ", &back); err != nil || again.String() != text.String() {
		t.Errorf("the report read back is another (%v):\n%s\n%s", err, text.String(), again.String())
	}
	for _, table := range r.Tables() {
		if _, err := table.WriteTo(&tables); err != nil || tables.Len() == 0 {
			t.Errorf("tables: %v, %q", err, tables.String())
		}
	}
	if r.Rows() == 0 {
		t.Error("no rows")
	}
}

func TestHopsAreTakenApart(t *testing.T) {
	at := func(ms int) time.Time { return time.Unix(0, int64(ms)*1e6) }
	span := func(lane, name, label string, from, to int) tensor.Span {
		return tensor.Span{Lane: lane, Name: name, Label: label, Start: at(from), Took: at(to).Sub(at(from))}
	}
	order := []HopTimes{{Pass: "forward", Label: "hop 0 owner 1"}, {Pass: "forward", Label: "hop 1 owner 0"}}
	got := takeApart(order, []tensor.Span{
		span("compute", "attention", "forward/hop 0 owner 1", 10, 14),
		span("compute", "wait", "forward/hop 0 owner 1", 14, 18),
		span("compute", "attention", "forward/hop 1 owner 0", 18, 21),
		span("compute", "add", "forward/hop 1 owner 0", 22, 23),
		span("compute", "other work", "layer 3", 30, 40),
	})
	want := []HopTimes{
		{Pass: "forward", Label: "hop 0 owner 1", Compute: 0.004, Wait: 0.004},
		{Pass: "forward", Label: "hop 1 owner 0", Compute: 0.004, Wait: 0.001},
	}
	for i := range want {
		g, w := got[i], want[i]
		if g.Pass != w.Pass || g.Label != w.Label || math.Abs(g.Compute-w.Compute) > 1e-9 ||
			math.Abs(g.Wait-w.Wait) > 1e-9 {
			t.Errorf("hop %d: %+v, want %+v", i, g, w)
		}
	}
}

func TestTrainingIsSummarised(t *testing.T) {
	path := filepath.Join(t.TempDir(), "metrics.jsonl")
	lines := ""
	for i, s := range []float64{9, 2, 4, 3} {
		text, err := json.Marshal(metrics.Step{Step: int64(i + 1), StepSeconds: metrics.Float(s),
			TokensPerSecondPerDevice: metrics.Float(8 / s),
			TFLOPsPerDevice:          metrics.Float(100 / s), MFU: metrics.Absent, CommWaitSeconds: metrics.Absent,
			MemoryBytes: int64(10 + i)})
		if err != nil {
			t.Fatal(err)
		}
		lines += string(text) + "\n"
	}
	if err := os.WriteFile(path, []byte(lines), 0o666); err != nil {
		t.Fatal(err)
	}
	steps, err := ReadMetrics(path)
	if err != nil {
		t.Fatal(err)
	}
	tr := &Training{Config: "x.yaml", Data: "random", Seq: 1024, Batch: 1, Skipped: 1}
	if err := tr.Summarise(steps); err != nil {
		t.Fatal(err)
	}
	if tr.StepSeconds != 3 || tr.Memory != 13 || tr.MFU != 0 || len(tr.Steps) != 4 {
		t.Errorf("%+v", tr)
	}
	if tr.CommWait.Known() {
		t.Errorf("waits of %v s, where none is known", tr.CommWait)
	}
	if text, err := json.Marshal(tr); err != nil || !strings.Contains(string(text), `"comm_wait_seconds":null`) {
		t.Errorf("as JSON: %s, %v", text, err)
	}
	check(t, &Report{Bench: "train", Ranks: 2, Machine: cost.Machine{Device: "cpu"}, Train: tr})
	if err := (&Training{Skipped: 4}).Summarise(steps); err == nil {
		t.Error("four steps, all of them skipped, were summarised")
	}
}

func TestSpecsAreChecked(t *testing.T) {
	good := AttentionSpec{Seq: []int{64}, Algorithms: []string{"ring"}, Layouts: []string{"zigzag"}, Heads: 4,
		KVHeads: 2, HeadDim: 16, Causal: true, Window: -1}
	for want, spoil := range map[string]func(*AttentionSpec){
		"--heads":     func(s *AttentionSpec) { s.KVHeads = 3 },
		"--seq":       func(s *AttentionSpec) { s.Seq = []int{3} },
		"--window":    func(s *AttentionSpec) { s.Window, s.Causal = 5, false },
		"--algorithm": func(s *AttentionSpec) { s.Algorithms = []string{"star"} },
		"--layout":    func(s *AttentionSpec) { s.Layouts = []string{"spiral"} },
		"--iters":     func(s *AttentionSpec) { s.Iters = -1 },
		"--seconds":   func(s *AttentionSpec) { s.Seconds, s.Iters = 1, 3 },
		"--head-dim":  func(s *AttentionSpec) { s.HeadDim = 0 },
		"--seq 0":     func(s *AttentionSpec) { s.Seq = []int{64, 0} },

		"--algorithm: want":              func(s *AttentionSpec) { s.Algorithms = []string{"ring", ""} },
		"--algorithm: want NAME":         func(s *AttentionSpec) { s.Algorithms = nil },
		"--ulysses-degree has no effect": func(s *AttentionSpec) { s.Inner = 2 },
		"--gather-heads has no effect":   func(s *AttentionSpec) { s.GatherHeads = 1 },
		"--gather has no effect":         func(s *AttentionSpec) { s.Gathers = []string{"before"} },
	} {
		s := good
		spoil(&s)
		if err := s.Check(2); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("spoilt %s: %v", want, err)
		}
	}
	for _, c := range []struct {
		name    string
		cpu, ok bool
	}{{"fp32", true, true}, {"fp64", true, true}, {"bf16", true, true}, {"fp16", true, true}, {"bf16", false, true},
		{"fp16", false, true}, {"fp32", false, true}, {"fp64", false, false}, {"int8", false, false}} {
		if _, err := DType(c.name, c.cpu); (err == nil) != c.ok {
			t.Errorf("--dtype %s, on a CPU %t: %v", c.name, c.cpu, err)
		}
	}
	if err := (&CommSpec{Sizes: []int{4}, Calls: Calls}).Check(2); err == nil {
		t.Error("4 bytes over 2 ranks were accepted")
	}
	if err := (&CommSpec{}).Check(1); err == nil {
		t.Error("transfers of one rank were accepted")
	}
}

// TestProgressLines checks the numbers in the lines of progress.
func TestProgressLines(t *testing.T) {
	for want, row := range map[string]Row{
		"dX: 1,090 TFLOP/s":                     {Ops: &Operation{Name: "dX", Rate: 1090, Unit: "TFLOP/s"}},
		"sum of 8 bytes over nccl: 0.0123 GB/s": {Comm: &Transfer{Call: "sum", Bytes: 8, Transport: "nccl", GBps: 0.0123}},
	} {
		if got := new(Report).Add(row); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
