package command

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/foresee/cost"
	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/progress"
	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/run/bench"
	"github.com/cprun/cprun/internal/run/job"
	"github.com/cprun/cprun/internal/text/data"
	"github.com/cprun/cprun/ring"
)

// BenchOptions are the flags that all benchmarks share.
type BenchOptions struct {
	Options
	JSON    string   // file for the report; "-": standard output, without the tables
	Command []string // the command line, for the report
}

// Bench measures attention, transfers or operations, and returns the exit status.
func Bench(ctx context.Context, task bench.Task, o BenchOptions) (int, error) {
	ranks, err := o.spawns()
	if err != nil {
		return 0, err
	}
	task.Machine = o.machine
	r := &bench.Report{Ranks: ranks, Machine: machineOf(o.machine)}
	switch {
	case task.Attention != nil:
		s := task.Attention
		if s.Documents != "" && s.Documents != bench.MagiName && len(s.Seq) > 0 {
			return 0, inputf("--seq has no effect with --documents %s, which has the lengths; drop it",
				terminal.Name(s.Documents))
		}
		s.Default(o.machine.Device(), ranks)
		if err = s.Load(); err == nil {
			err = o.chooseRows(&task, ranks)
		}
		r.Bench, r.Attention = "attention", &bench.Attention{Spec: *s}
	case task.Comm != nil:
		task.Comm.Default(o.machine.Device())
		r.Bench, err = "comm", task.Comm.Check(ranks)
	default:
		task.Ops = &bench.OpsSpec{}
		task.Ops.Default(o.machine.Device())
		r.Bench = "ops"
	}
	if err == nil {
		err = checkReport("--json", o.JSON)
	}
	if err != nil {
		return 0, &InputError{err}
	}
	res, err := o.collect(ctx, r, task)
	if err != nil {
		return 0, err
	}
	if res.ExitCode != launch.ExitDone && r.Rows() == 0 {
		return res.ExitCode, res.Err
	}
	bench.Compare(r.Ops)
	if err := o.present(r); err != nil { // after a failure, the rows before it
		return launch.ExitFailed, err
	}
	return res.ExitCode, res.Err
}

// collect runs the workers of a task and adds their rows to the report.
func (o *BenchOptions) collect(ctx context.Context, r *bench.Report, task bench.Task) (launch.Result, error) {
	return o.runWorkers(ctx, job.RoleBench, r.Ranks, nil, task, func(out *progress.Printer, e launch.Event) {
		var row bench.Row
		if e.Kind == job.EventBench && json.Unmarshal(e.Data, &row) == nil {
			out.Note(r.Add(row))
		}
	})
}

// machineOf returns the machine for a report.
func machineOf(m machine.Machine) cost.Machine {
	c := costMachine(m)
	if c.Count = 0; m.IsCPU() {
		c.Device = "cpu"
		return c
	}
	c.Versions = make(map[string]string)
	for _, l := range machine.Libraries() {
		c.Versions[l.Name] = l.Version
	}
	return c
}

// checkReport checks the directory of the file of a flag before the measurement.
func checkReport(flag, path string) error {
	dir := filepath.Dir(path) // "." for "" and "-"
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		return inputf("%s: %s is not a directory", flag, terminal.Name(dir))
	}
	return nil
}

// writeFile writes the file of a flag, if it is given.
func writeFile(flag, path string, write func(io.Writer) error) error {
	if path == "" {
		return nil
	}
	if err := files.WriteTo(path, write); err != nil {
		return fmt.Errorf("%s %s: %w", flag, terminal.Name(path), err)
	}
	return nil
}

func (o *BenchOptions) present(r *bench.Report) error {
	r.Command, r.Version, r.Date = o.Command, o.Version, time.Now().UTC().Truncate(time.Second)
	return o.output(func(w io.Writer) error { return files.WriteJSON(w, "  ", r) }, r.Tables())
}

// output prints the tables, and writes the JSON of --json to a file or in place of the tables.
func (o *BenchOptions) output(encode func(io.Writer) error, tables []readable.Table) error {
	if o.JSON == "-" {
		return encode(terminal.JSON(o.Stdout))
	}
	for i, t := range tables {
		if i > 0 {
			fmt.Fprintln(o.Stdout)
		}
		if _, err := t.WriteTo(o.Stdout); err != nil {
			return err
		}
	}
	return writeFile("--json", o.JSON, encode)
}

// chooseRows chooses the strategy of every row as for a training run of that length. All rows get the same backend: the
// choice of the longest row whose backend runs all rows.
func (o *BenchOptions) chooseRows(task *bench.Task, ranks int) error {
	s := task.Attention
	asked := s.Asked()
	s.Rows = slices.Clone(asked)
	room := float64(o.machine.Memory) * float64(max(o.machine.GPUs, 1))
	for i := range s.Rows {
		const gib = 1 << 30
		if need := s.Needs(asked[i].Seq); room > 0 && need > room {
			return fmt.Errorf("--seq %d --heads %d --kv-heads %d --head-dim %d: q, k, v, the output and their gradients take "+
				"%.3g GiB of %.3g", asked[i].Seq, s.Heads, s.KVHeads, s.HeadDim, need/gib, room/gib)
		}
		s.Rows[i].Strategy = config.DefaultStrategy(asked[i].Strategy, config.RunShape{
			Device: task.Machine.Device(), Documents: s.Documents != "", Ranks: ranks, PerHost: ranks,
			Heads: s.Heads, KVHeads: s.KVHeads,
		})
	}
	if err := s.Check(ranks); err != nil {
		return err
	}
	answers, err := o.answers(task, ranks, asked)
	if err != nil {
		return err
	}
	order := slices.Clone(answers) // the longest first
	slices.SortStableFunc(order, func(a, b plan.Answer) int { return cmp.Compare(b.Predicted(), a.Predicted()) })
	for _, first := range order {
		if !slices.ContainsFunc(answers, func(a plan.Answer) bool { return a.Backend != first.Backend }) {
			break
		}
		for i := range asked {
			asked[i].Backend, s.Rows[i].Backend = first.Backend, first.Backend
		}
		var again []plan.Answer
		if again, err = o.answers(task, ranks, asked); err == nil {
			answers = again
			break
		}
	}
	if err != nil {
		return err
	}
	s.Layouts, s.Algorithms = nil, nil
	for i, a := range answers {
		s.Rows[i].Strategy, s.Backend = a.Strategy, a.Backend
		if l := string(a.Layout); !slices.Contains(s.Layouts, l) {
			s.Layouts = append(s.Layouts, l)
		}
		if !slices.Contains(s.Algorithms, a.Algorithm) {
			s.Algorithms = append(s.Algorithms, a.Algorithm)
		}
		if a.Algorithm == "allgather" && len(a.Ranked) > 0 {
			s.Rows[i].Gather = a.When()
		}
	}
	if len(answers) == 1 {
		s.Predicted = answers[0].Ranked
	}
	return nil
}

func (o *BenchOptions) answers(task *bench.Task, ranks int, asked []bench.AttentionCase) ([]plan.Answer, error) {
	var list []plan.Answer
	s := task.Attention
	dtype, err := bench.DType(s.DType, task.Machine.IsCPU())
	if err != nil {
		return nil, err
	}
	docs := s.Longest()
	for i, w := range s.Rows {
		a, _, err := o.strategy(task.Machine, plan.Question{
			Attentions: []backend.Request{{
				Strategy: w.Strategy, Of: fmt.Sprintf("%d tokens, %s, %s", w.Seq, w.Layout, w.Algorithm),
				Params: backends.Params{
					DType: dtype, Batch: 1, SeqQ: w.Seq, SeqKV: w.Seq, Heads: s.Heads, KVHeads: s.KVHeads,
					HeadDim: s.HeadDim, HeadDimV: s.HeadDim, Causal: s.Causal, WindowLeft: s.Window, WindowRight: -1,
					Documents: docs != nil, Training: true, Deterministic: s.Deterministic, ContextSize: ranks,
				},
			}},
			Requested: asked[i].Strategy, Docs: docs, Ranks: ranks, PerHost: ranks,
		})
		if err != nil {
			return nil, err
		}
		list = append(list, a)
	}
	return list, nil
}

// BenchTrainOptions are the flags of `cprun bench train`.
type BenchTrainOptions struct {
	BenchOptions
	Steps, Warmup int
	Data          string // random, or config
	Set           []string
	Trace         string // file; "": no trace
}

// tracedSteps covers the first step, which warms up, and a few more.
const tracedSteps = 4

// BenchTrain measures the steps of a config: it trains in a temporary directory and reads the metrics and the plan.
func BenchTrain(ctx context.Context, path string, o BenchTrainOptions) (int, error) {
	if o.Steps < 1 || o.Warmup < 0 {
		return 0, inputf("--steps %d --warmup %d: want at least 1 and 0", o.Steps, o.Warmup)
	}
	if o.Data != "random" && o.Data != "config" {
		return 0, inputf("--data %q: want random or config", o.Data)
	}
	ranks, err := o.spawns()
	if err != nil {
		return 0, err
	}
	if err := cmp.Or(checkReport("--json", o.JSON), checkReport("--trace", o.Trace)); err != nil {
		return 0, err
	}
	work, err := newScratch("cprun-bench-")
	if err != nil {
		return 0, err
	}
	dir := work.path
	set := append(o.Set[:len(o.Set):len(o.Set)],
		fmt.Sprintf("train.steps=%d", o.Warmup+o.Steps), "train.epochs=null",
		"data.validation={path: null, every: 0, samples: 0}", "train.early_stop.patience=0", "checkpoint.best=false",
		"checkpoint.every=0", "log.every=auto", "log.samples.every=0", "lr_schedule.warmup_steps=0",
		"lr_schedule.warmup_ratio=null")
	if o.Trace != "" {
		set = append(set, fmt.Sprintf("log.trace_steps=%d", tracedSteps))
	}
	if o.Data == "random" {
		opts := config.Options{Set: set, Ranks: ranks, Device: o.machine.Device()}
		if set, err = randomTokens(path, dir, opts); err != nil {
			return 0, errors.Join(err, work.end(launch.ExitDone))
		}
	}
	start, first := time.Now(), time.Duration(0)
	run := filepath.Join(dir, "run")
	code, err := Train(ctx, path, TrainOptions{
		Options: o.Options, Set: set, RunDir: run, Resume: "never", NoSave: true, Scratch: true,
		advanced: func(step int64) {
			if step == 1 {
				first = time.Since(start)
			}
		},
	})
	if code == launch.ExitStopped || errors.As(err, new(*InputError)) {
		return code, errors.Join(err, work.end(launch.ExitDone))
	}
	if code != 0 || err != nil {
		return code, errors.Join(err, work.end(launch.ExitFailed))
	}
	t := &bench.Training{Config: filepath.Base(path), Data: o.Data, Skipped: o.Warmup, FirstStep: first.Seconds()}
	r := &bench.Report{Bench: "train", Ranks: ranks, Machine: machineOf(o.machine), Train: t}
	if err = measured(t, run); err == nil {
		err = o.present(r)
	}
	if err == nil && o.Trace != "" {
		err = move(filepath.Join(run, "trace.json"), o.Trace)
	}
	if err != nil {
		return launch.ExitFailed, err
	}
	return 0, work.end(launch.ExitDone)
}

const randomSamples = 16

func randomTokens(path, dir string, o config.Options) ([]string, error) {
	o.NoFiles = true
	cfg, err := config.Load(path, o)
	if err != nil {
		return nil, &InputError{err}
	}
	file := filepath.Join(dir, "random.bin")
	n := cfg.Data.SeqLen*min(cfg.Train.GlobalBatchSize*cfg.Train.Steps, randomSamples) + 1
	if err := writeTokens(file, n, cfg.Model.VocabSize, uint64(cfg.Data.Seed)); err != nil {
		return nil, fmt.Errorf("random tokens: %w", err)
	}
	return append(o.Set, "data.path="+file, "data.pack_documents=false"), nil
}

const tokensPerDocument = 1 << 20

func writeTokens(file string, n, vocab int, seed uint64) error {
	pair, err := data.NewPair(file, vocab)
	if err != nil {
		return err
	}
	defer pair.Remove()
	rng := rand.New(rand.NewPCG(seed, 0))
	for ; n > 0; n -= tokensPerDocument {
		ids := make([]int32, min(n, tokensPerDocument))
		for i := range ids {
			ids[i] = int32(rng.IntN(vocab))
		}
		if err := pair.Add(ids); err != nil {
			return err
		}
	}
	return pair.Close()
}

// maxPlan bounds a plan.json, in bytes; it suffices for any number of ranks.
const maxPlan = 256 << 20

func measured(t *bench.Training, run string) error {
	text, err := files.Read(filepath.Join(run, "plan.json"), maxPlan)
	if err != nil {
		return fmt.Errorf("plan of the run: %w", err)
	}
	var p plan.Plan
	if err := json.Unmarshal(text, &p); err != nil {
		return fmt.Errorf("plan of the run: %w", err)
	}
	t.Seq, t.Planned, t.Parameters = p.Partition.SeqLen, p.Memory.Total, p.Estimate.Parameters
	t.Predicted = p.Estimate.SecondsPerStep
	if of, ok := p.Config["train"].(map[string]any); ok {
		n, _ := of["global_batch_size"].(float64)
		t.Batch = int(n)
	}
	steps, err := bench.ReadMetrics(filepath.Join(run, "metrics.jsonl"))
	if err != nil {
		return err
	}
	return t.Summarise(steps)
}

// move copies a file, since a rename does not work between file systems.
func move(from, to string) error {
	src, err := files.Open(from)
	if err != nil {
		return fmt.Errorf("--trace: %w", err)
	}
	defer src.Close()
	return writeFile("--trace", to, func(w io.Writer) error {
		_, err := io.Copy(w, src)
		return err
	})
}

// Calibrate measures this machine's cost table, prints and stores it, and returns the exit status.
func Calibrate(ctx context.Context, o BenchOptions) (int, error) {
	most, err := o.spawns()
	if err != nil {
		return 0, err
	}
	if err := checkReport("--json", o.JSON); err != nil {
		return 0, err
	}
	numbers := []int{most}
	if o.machine.IsCPU() && o.NProc == "auto" {
		numbers = []int{1, runtime.NumCPU(), 2 * runtime.NumCPU()}
	}
	t := &cost.Table{
		Version: cost.Version, Machine: costMachine(o.machine), Program: o.Version,
		Date:    time.Now().UTC().Format(time.RFC3339),
		Command: "cprun " + strings.Join(o.Command, " "), Source: "measured",
	}
	t.Machine.Versions = machineOf(o.machine).Versions
	if t.Machine.Count = min(o.machine.GPUs, most); o.machine.IsCPU() {
		t.CoreGFLOPs = matmulRate()
	}
	began, turns := time.Now(), 1
	if o.machine.IsCPU() {
		turns = cpuTurns
	}
	for turn := range turns {
		for i, ranks := range numbers {
			r := &bench.Report{Ranks: ranks, Costs: cost.Set{Ranks: ranks}}
			share := ranks > runtime.NumCPU() && len(numbers) > 1
			for i, name := range costBackends(o.machine) {
				if code, err := o.calibrate(ctx, r, name, i == 0, share); code != 0 || err != nil {
					return code, err
				}
			}
			if turn == 0 {
				t.Sets = append(t.Sets, r.Costs)
			} else {
				t.Sets[i].KeepLess(&r.Costs)
			}
		}
	}
	return o.keep(t, time.Since(began))
}

// cpuTurns is the number of measurements of each figure on a CPU, where other processes disturb some.
const cpuTurns = 3

func costBackends(m machine.Machine) []string {
	if !m.IsCPU() && m.CUDNN != 0 {
		return []string{"fused", "flash"}
	}
	return []string{"flash"}
}

// calibrate measures the attention of a backend, and for the first one everything else. Ranks that share cores measure
// only transfers, since sharing slows compute in proportion.
func (o *BenchOptions) calibrate(ctx context.Context, r *bench.Report, name string, first, share bool) (int, error) {
	s := &bench.CalibrateSpec{}
	s.Default(o.machine.Device())
	s.Backend, s.Operations = name, first
	if o.machine.IsCPU() {
		s.Share(runtime.NumCPU() / r.Ranks)
		s.TransfersOnly = share
	}
	if err := supported(s, o.machine); err != nil {
		return 0, &InputError{err}
	}
	res, err := o.collect(ctx, r, bench.Task{Machine: o.machine, Calibrate: s})
	return res.ExitCode, errors.Join(err, res.Err)
}

// supported drops head dims that the backend of s refuses on a machine. It returns an error if none is left.
func supported(s *bench.CalibrateSpec, on machine.Machine) error {
	dtype, refused := bench.DType(s.DType, on.IsCPU())
	s.Dims = slices.DeleteFunc(s.Dims, func(dim int) bool {
		_, err := backend.Select(on, 0, backend.Request{
			Strategy: ring.Strategy{Layout: "zigzag", Algorithm: "ring", Backend: s.Backend},
			Of:       "calibration",
			Params: backends.Params{
				DType: dtype, Batch: 1, SeqQ: s.Sizes[0], SeqKV: s.Sizes[0], Heads: s.Heads, KVHeads: s.KVHeads,
				HeadDim: dim, HeadDimV: dim, Causal: true, WindowLeft: -1, Training: true,
			},
		})
		refused = cmp.Or(refused, err)
		return err != nil
	})
	if len(s.Dims) > 0 {
		return nil
	}
	return refused
}

func (o *BenchOptions) keep(t *cost.Table, took time.Duration) (int, error) {
	path, err := t.Keep()
	if err = errors.Join(err, o.output(t.Encode, bench.CostTables(t))); err != nil {
		return launch.ExitFailed, fmt.Errorf("cost table: %w", err)
	}
	if !o.Quiet {
		fmt.Fprintf(o.Stderr, "measured in %.0f s; cprun plan will use %s\n", took.Seconds(), terminal.Name(path))
	}
	return 0, nil
}

func costMachine(m machine.Machine) cost.Machine {
	c := cost.Machine{Device: m.Name, Arch: m.Arch, Cores: runtime.NumCPU(), Count: m.GPUs}
	if m.IsCPU() {
		c.Device = machine.CPUName()
	}
	return c
}
