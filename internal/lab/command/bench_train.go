package command

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"path/filepath"
	"time"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/data"
	"github.com/cprun/cprun/internal/run/bench"
)

// BenchTrainOptions are the flags of `cprun bench train`.
type BenchTrainOptions struct {
	BenchOptions
	Steps, Warmup int
	Data          string // random, or config
	Set           []string
	Trace         string // file; "": no trace
}

// tracedSteps are enough for the first, which warms up, and some that do not.
const tracedSteps = 4

// BenchTrain measures the steps of a config. It is a training run in a directory of its own,
// whose metrics and plan it reads.
func BenchTrain(ctx context.Context, path string, o BenchTrainOptions) (int, error) {
	if o.Steps < 1 || o.Warmup < 0 {
		return 0, inputf("--steps %d --warmup %d: want 1 or more, and 0 or more", o.Steps, o.Warmup)
	}
	if o.Data != "random" && o.Data != "config" {
		return 0, inputf("--data %q: want random or config", o.Data)
	}
	ranks, device, err := o.spawns()
	if err != nil {
		return 0, err
	}
	if err := o.checkOutputs(); err != nil {
		return 0, &InputError{err}
	}
	work, err := newScratch("cprun-bench-")
	if err != nil {
		return 0, err
	}
	dir := work.path
	set := append(o.Set[:len(o.Set):len(o.Set)],
		fmt.Sprintf("train.steps=%d", o.Warmup+o.Steps), "data.validation={path: null, every: 0, samples: 0}",
		"checkpoint.every=0", "log.every=1", "lr_schedule.warmup_steps=0")
	if o.Trace != "" {
		set = append(set, fmt.Sprintf("log.trace_steps=%d", tracedSteps))
	}
	if o.Data == "random" {
		if set, err = randomTokens(path, dir, config.Options{Set: set, Ranks: ranks, Device: device}); err != nil {
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

// randomSamples bounds the file of random tokens; longer runs read it again.
const randomSamples = 16

// randomTokens makes a file of tokens for a config, and adds it to the settings.
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

// tokensPerDocument bounds the random tokens in memory.
const tokensPerDocument = 1 << 20

// writeTokens writes n random tokens, a pair of Megatron's.
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

// maxPlan is more than a plan.json of any number of ranks has, in bytes.
const maxPlan = 256 << 20

// measured reads what a run has left.
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
	t.Batch = p.Estimate.TokensPerStep / max(t.Seq, 1)
	steps, err := bench.ReadMetrics(filepath.Join(run, "metrics.jsonl"))
	if err != nil {
		return err
	}
	return t.Summarise(steps)
}

// move is a rename that works between file systems.
func move(from, to string) error {
	src, err := files.Open(from)
	if err != nil {
		return fmt.Errorf("--trace: %w", err)
	}
	defer src.Close()
	err = files.WriteTo(to, func(f *files.Draft) error {
		_, err := io.Copy(f, src)
		return err
	})
	if err != nil {
		return fmt.Errorf("--trace: %w", err)
	}
	return nil
}
