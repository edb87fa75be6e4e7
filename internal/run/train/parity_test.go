package train_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/metrics"
	"github.com/cprun/cprun/internal/run/train"
	"github.com/cprun/cprun/ring"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	parityDir = "../../model/testdata/parity"
	// shortSteps suffices to reuse every buffer, and to cover the optimizer's moments.
	shortSteps = 3
)

// An expect is a loss curve of plain PyTorch training in float32.
type expect struct {
	Seq         int       `json:"seq"`
	Steps       int       `json:"steps"`
	LR          float64   `json:"lr"`
	Betas       []float64 `json:"betas"`
	Eps         float64   `json:"eps"`
	WeightDecay float64   `json:"weight_decay"`
	GradClip    float64   `json:"grad_clip"`
	Loss        []float64 `json:"loss"`
	GradNorm    []float64 `json:"grad_norm"`
	Trained     int64     `json:"trained"` // parameters; 0: unknown
}

func readExpect(t *testing.T, name string) expect {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(parityDir, name, "expect.json"))
	if err != nil {
		t.Fatal(err)
	}
	var e expect
	if err := json.Unmarshal(text, &e); err != nil {
		t.Fatal(err)
	}
	if testing.Short() { // later steps cover no other code
		e = e.begin(shortSteps)
	}
	return e
}

// fewer returns the first half of the numbers of ranks under -short.
func fewer(ranks ...int) []int {
	if testing.Short() {
		return ranks[:(len(ranks)+1)/2]
	}
	return ranks
}

// begin returns the first n steps of a curve.
func (e expect) begin(n int) expect {
	e.Steps = min(e.Steps, n)
	e.Loss, e.GradNorm = e.Loss[:e.Steps], e.GradNorm[:e.Steps]
	return e
}

// parityYAML returns the config of a fixture.
func parityYAML(name string, e expect) string {
	return fmt.Sprintf(`
model: {from: %[1]s}
data: {path: %[1]s/tokens.bin, seq_len: %[2]d, shuffle: false}
train: {steps: %[3]d}
optimizer: {lr: %[4]g, betas: [%[5]g, %[6]g], eps: %[7]g, weight_decay: %[8]g, grad_clip: %[9]g}
lr_schedule: {name: constant}
log: {tensorboard: false}
`, absolute(filepath.Join(parityDir, name)), e.Seq, e.Steps, e.LR, e.Betas[0], e.Betas[1], e.Eps, e.WeightDecay, e.GradClip)
}

func absolute(path string) string {
	abs, err := filepath.Abs(path)
	if err != nil {
		panic(err)
	}
	return abs
}

func load(t *testing.T, yaml string, ranks int, set ...string) *config.Config {
	t.Helper()
	cfg, err := config.Load(writeFile(t, "train.yaml", yaml), config.Options{Set: set, Ranks: ranks, Device: "cpu"})
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

// writeFile writes a file into a directory of its own, and returns its path.
func writeFile(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o666); err != nil {
		t.Fatal(err)
	}
	return path
}

// An outcome is the result of a run in this process.
type outcome struct {
	steps   []metrics.Step
	stopped bool
	dir     string
	notices []string
}

// runLocal trains with all ranks in this process.
func runLocal(t *testing.T, cfg *config.Config, ranks int, o train.Options) (outcome, error) {
	t.Helper()
	return runOn(t, cfg, ranks, o, func(*device.Device) {})
}

// runOn works like runLocal, on changed devices.
func runOn(t *testing.T, cfg *config.Config, ranks int, o train.Options, change func(*device.Device)) (outcome, error) {
	t.Helper()
	return runJoined(t, cfg, ranks, o, change, func(host *comm.Group, _ *device.Device) (comm.Communicator,
		error) {
		return host, nil
	})
}

// runJoined works like runOn, with another way to connect the devices.
func runJoined(t *testing.T, cfg *config.Config, ranks int, o train.Options, change func(*device.Device),
	join func(*comm.Group, *device.Device) (comm.Communicator, error)) (outcome, error) {
	t.Helper()
	if o.RunDir == "" {
		o.RunDir = t.TempDir()
	}
	if o.RunID == "" {
		o.RunID = "test"
	}
	if err := os.MkdirAll(filepath.Join(o.RunDir, "logs"), 0o777); err != nil {
		t.Fatal(err)
	}
	o.ConfigYAML = string(cfg.YAML())
	o.Room = train.MemoryOf(t, cfg, ranks).Room()
	out := outcome{dir: o.RunDir}
	var mu sync.Mutex
	err := train.Locally(ranks, cfg.Parallel.Backend, backend.DType(cfg), 0, func(r int, dev *device.Device,
		world *comm.Group) error {
		o := o
		inner := o.Report
		o.Report = func(rep train.Report) {
			mu.Lock()
			defer mu.Unlock()
			if rep.Kind == train.Progressed {
				out.steps = append(out.steps, rep.Metrics)
			}
			if rep.Kind == train.Notice && r == 0 {
				out.notices = append(out.notices, rep.Text)
			}
			if inner != nil && r == 0 {
				inner(rep)
			}
		}
		change(dev)
		group, err := join(world, dev)
		if err != nil {
			return err
		}
		defer group.Close()
		stopped, err := train.Run(context.Background(), cfg, *dev, group, o)
		if r == 0 {
			out.stopped = stopped
		}
		if err != nil {
			world.Abort(err) // before Close, by which a rank leaves in good order
			return err
		}
		return world.Barrier(context.Background()) // a rank that leaves would end transfers of the others
	})
	return out, err
}

func mustRun(t *testing.T, cfg *config.Config, ranks int, o train.Options) outcome {
	t.Helper()
	return mustRunAhead(t, cfg, ranks, o, 0)
}

// mustRunAhead trains on devices whose host runs some steps ahead.
func mustRunAhead(t *testing.T, cfg *config.Config, ranks int, o train.Options, ahead int) outcome {
	t.Helper()
	out, err := runOn(t, cfg, ranks, o, func(d *device.Device) { d.RunAhead = ahead })
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// curves holds the results of curve: functions that train at their first call.
var curves sync.Map

// curve trains without checkpoints, and returns the steps. Runs repeat bit for bit, so each config trains once.
func curve(t *testing.T, yaml string, ranks int, set ...string) []metrics.Step {
	t.Helper()
	cfg := load(t, yaml, ranks, set...)
	once, _ := curves.LoadOrStore(fmt.Sprint(ranks, string(cfg.YAML())), sync.OnceValues(func() ([]metrics.Step, error) {
		out, err := runLocal(t, cfg, ranks, train.Options{NoSave: true})
		return out.steps, err
	}))
	steps, err := once.(func() ([]metrics.Step, error))()
	if err != nil {
		t.Fatal(err)
	}
	return steps
}

// again trains as curve does, although an equal run may be known.
func again(t *testing.T, yaml string, ranks int, set ...string) []metrics.Step {
	t.Helper()
	return mustRun(t, load(t, yaml, ranks, set...), ranks, train.Options{NoSave: true}).steps
}

// A curveError holds the largest difference of losses and the largest relative difference of gradient norms.
type curveError struct{ loss, norm float64 }

// within bounds the errors of curves against PyTorch's in float32 on any device, by the element type of the run. Each
// bound is two to three times the largest measured error; of the small models of families in fp32, ten times.
var within = map[string]curveError{"fp32": {6e-5, 4e-5}, "bf16": {1.3e-2, 5e-2}, "fp16": {2e-3, 5e-3},
	"families": {1e-5, 1e-5},
	// Of two forms of the rule in transformers, the norms differ by 4e-5.
	"linear": {1e-5, 1e-4},
	// Of these models, weights in bfloat16 under float32 masters change losses in transformers by up to 0.019. Norms
	// follow a few heads with nearly no length, so they are not compared.
	"linear bf16": {3e-2, math.Inf(1)}}

// worse returns the larger errors of two curves.
func (c curveError) worse(d curveError) curveError {
	return curveError{max(c.loss, d.loss), max(c.norm, d.norm)}
}

func (c curveError) String() string {
	return fmt.Sprintf("worst loss off by %.2g, worst gradient norm by %.2g relative", c.loss, c.norm)
}

// follows compares a curve with PyTorch's, and logs and returns the errors.
func follows(t *testing.T, what string, got []metrics.Step, e expect, compute string) (off curveError) {
	t.Helper()
	if len(got) != len(e.Loss) {
		t.Fatalf("%s: %d steps, want %d", what, len(got), len(e.Loss))
	}
	for i, s := range got {
		loss := math.Abs(float64(s.Loss) - e.Loss[i])
		norm := math.Abs(float64(s.GradNorm)-e.GradNorm[i]) / e.GradNorm[i]
		if !(loss <= within[compute].loss) || !(norm <= within[compute].norm) {
			t.Errorf("%s: step %d has loss %.7f, want %.7f (off by %.2g); gradient norm %.7f, want %.7f (off by %.2g)",
				what, i+1, float64(s.Loss), e.Loss[i], loss, float64(s.GradNorm), e.GradNorm[i], norm)
		}
		off = off.worse(curveError{loss, norm})
	}
	t.Logf("%s: %v", what, off)
	return off
}

// expectOf returns a curve to follow.
func expectOf(steps []metrics.Step) (e expect) {
	for _, s := range steps {
		e.Loss, e.GradNorm = append(e.Loss, float64(s.Loss)), append(e.GradNorm, float64(s.GradNorm))
	}
	return e
}

// allWays lists the fixtures that run with every layout and algorithm.
var allWays = map[string]bool{"tiny-llama": true, "tiny-llama-tied-clip": true}

// Every fixture must follow the curve of one PyTorch process on 1 to 4 ranks: a zigzag ring to the end, every other
// layout and algorithm for the first steps. The heads do not divide by 3 ranks, and the key heads not by 4.
func TestParity(t *testing.T) {
	t.Parallel()
	entries, err := os.ReadDir(parityDir)
	if err != nil || len(entries) < 4 {
		t.Fatalf("%d fixtures, %v", len(entries), err)
	}
	var worst curveError
	for _, entry := range entries {
		whole := readExpect(t, entry.Name())
		for _, ranks := range fewer(4, 3, 2, 1) {
			for _, layout := range []string{"zigzag", "striped", "contiguous"} {
				for i, algorithm := range ring.Algorithms {
					if ranks == 1 && (layout != "zigzag" || algorithm != "ring") {
						continue
					}
					// The fixtures of RoPE scaling and Qwen3 differ only in the model.
					if !allWays[entry.Name()] && (layout != "zigzag" || algorithm != "ring") {
						continue
					}
					// Package ring tests the gathered rows.
					if trades := algorithm == "ulysses" || algorithm == "hierarchical"; trades && layout != "zigzag" {
						continue
					}
					e := whole
					if layout != "zigzag" || algorithm != "ring" {
						if testing.Short() && (i+ranks)%2 == 0 {
							continue // 4 ranks or 3 for each, in turn
						}
						e = whole.begin(shortSteps)
					}
					what := fmt.Sprintf("%s, %d ranks, %s, %s", entry.Name(), ranks, layout, algorithm)
					got := curve(t, parityYAML(entry.Name(), e), ranks, "parallel.layout="+layout,
						"parallel.algorithm="+algorithm)
					worst = worst.worse(follows(t, what, got, e, "fp32"))
				}
			}
		}
	}
	t.Logf("fp32: %v", worst)
}

// Memory options, sharding, data-parallel groups and accumulation only change the order of sums.
func TestVariantsFollowTheSameCurve(t *testing.T) {
	t.Parallel()
	name := "tiny-llama-tied-clip"
	e := readExpect(t, name).begin(shortSteps)
	for _, v := range []struct {
		ranks int
		set   string
	}{
		{2, "memory.recompute=selective"}, {2, "memory.recompute=full"}, {3, "memory.loss_chunk=17"},
		{4, "parallel={algorithm: allgather, gather_heads: 1}"}, {4, "memory.shard=optimizer"},
		{3, "memory.shard=optimizer"}, {2, "attention.backend=reference"},
	} {
		e := e
		if testing.Short() && v.set == "attention.backend=reference" {
			e = e.begin(1) // it is slow
		}
		follows(t, v.set, curve(t, parityYAML(name, e), v.ranks, v.set), e, "fp32")
	}
}

// Two samples per step give the same curve as a micro batch, accumulated, or over data-parallel groups.
func TestBatchesAreSpreadWithoutATrace(t *testing.T) {
	t.Parallel()
	name := "tiny-llama"
	e := readExpect(t, name)
	e.Steps = min(e.Steps, 4)
	var want []metrics.Step
	for _, v := range []struct {
		ranks int
		set   string
	}{
		{1, "train.micro_batch_size=2"}, {2, "train.micro_batch_size=2"}, {2, "train.micro_batch_size=1"},
		{2, "parallel.data=2"}, {4, "parallel.data=2"}, {4, "parallel.context=2"},
	} {
		got := curve(t, parityYAML(name, e), v.ranks, "train.global_batch_size=2", v.set)
		if want == nil {
			want = got
			continue
		}
		for i := range want {
			if d := math.Abs(float64(got[i].Loss - want[i].Loss)); !(d <= 1e-5) {
				t.Errorf("%d ranks, %s: loss of step %d = %v, want %v", v.ranks, v.set, i+1, got[i].Loss, want[i].Loss)
			}
		}
	}
}

func losses(steps []metrics.Step) string {
	var b strings.Builder
	for _, s := range steps {
		fmt.Fprintf(&b, "%d:%x/%x ", s.Step, math.Float64bits(float64(s.Loss)), math.Float64bits(float64(s.GradNorm)))
	}
	return b.String()
}
