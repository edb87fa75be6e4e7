package train_test

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/checkpoint"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/optim"
	"github.com/cprun/cprun/internal/run/train"
	"github.com/cprun/cprun/tensor"
)

// scaled makes a device scale its loss, although its gradients do not need it.
func scaled(d *device.Device) { d.ScaleLoss = true }

// A scale is a power of two and causes no rounding: the loss and the gradient norm have the same bits with and without
// it.
func TestScalingLeavesNoTrace(t *testing.T) {
	t.Parallel()
	for m, mode := range [][]string{
		{"optimizer.grad_clip=0"},
		{"optimizer.grad_clip=0.1", "memory.shard=gradients", "train.global_batch_size=4"},
		{"data.pack_documents=true", "memory.shard=optimizer", "model.architecture=qwen3"},
	} {
		for _, ranks := range []int{1, 3} {
			set := append(mode, "train.steps=8")
			cfg, want := load(t, tiny, ranks, set...), curve(t, tiny, ranks, set...)
			for ahead := range 2 {
				if testing.Short() && (m+ranks/2+ahead)%2 == 0 {
					continue // a host that runs ahead or not for each, in turn
				}
				out, err := runOn(t, cfg, ranks, train.Options{NoSave: true},
					func(d *device.Device) { scaled(d); d.RunAhead = ahead })
				if err != nil {
					t.Fatal(err)
				}
				if got := losses(out.steps); got != losses(want) {
					t.Errorf("%v, %d ranks, %d ahead: with a scale\n%s\nwithout\n%s", mode, ranks, ahead, got,
						losses(want))
				}
				if len(out.notices) > 0 {
					t.Errorf("%v: %q", mode, out.notices)
				}
			}
		}
	}
}

// A narrow imitates float16: the gradient of the loss overflows if its scale exceeds the limit of the step.
type narrow struct {
	model.Ops
	stream *tensor.HostStream
	tokens float64 // of a step, the divisor of the loss
	limit  func(step int) float64
	step   int // the present step, from 1
}

func (n *narrow) CrossEntropy(loss, logits, targets tensor.View, scale, softcap float64, grad bool) {
	n.Ops.CrossEntropy(loss, logits, targets, scale, softcap, grad)
	if !grad {
		return
	}
	if math.Round(scale*n.tokens) > n.limit(n.step) {
		n.stream.Do("overflow", func() error {
			tensor.Data[float32](logits)[0] = float32(math.Inf(1))
			return nil
		})
	}
	n.step++
}

// narrowRun trains on devices that scale the loss. One of them overflows in the steps after the first done ones.
func narrowRun(t *testing.T, cfg *config.Config, ranks, ahead, done int, limit func(step int) float64,
	o train.Options) (outcome, error) {
	t.Helper()
	var taken atomic.Bool
	return runOn(t, cfg, ranks, o, func(d *device.Device) {
		scaled(d)
		d.RunAhead = ahead
		if taken.CompareAndSwap(false, true) {
			d.Ops = &narrow{Ops: d.Ops, stream: d.Stream.(*tensor.HostStream), tokens: float64(cfg.Data.SeqLen),
				limit: limit, step: done + 1}
		}
	})
}

// falling returns a decreasing limit.
func falling(step int) float64 {
	switch {
	case step < 3:
		return math.Inf(1)
	case step < 7:
		return 1 << 14
	}
	return 1 << 13
}

// A step that overflows on any rank changes nothing on all ranks, and later steps use half the scale.
func TestOverflowIsSkipped(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		ahead   int
		skipped []int64
	}{
		{0, []int64{3, 4, 7}},
		{1, []int64{3, 4, 5, 6, 7, 8}}, // each with the step queued after it
	} {
		for _, ranks := range fewer(3, 1) {
			cfg := load(t, tiny, ranks, "train.steps=12", "checkpoint.every=1", "checkpoint.keep=0",
				"memory.shard=gradients", "memory.offload="+[]string{"off", "optimizer"}[c.ahead])
			out, err := narrowRun(t, cfg, ranks, c.ahead, 0, falling, train.Options{})
			if err != nil {
				t.Fatal(err)
			}
			var skipped []int64
			for _, s := range out.steps {
				if x := float64(s.GradNorm); x-x != 0 {
					skipped = append(skipped, s.Step)
				}
				if x := float64(s.Loss); x-x != 0 {
					t.Errorf("loss of step %d is %v", s.Step, x)
				}
			}
			what := fmt.Sprintf("%d ranks, %d ahead", ranks, c.ahead)
			if !slices.Equal(skipped, c.skipped) {
				t.Errorf("%s: skipped %v, want %v", what, skipped, c.skipped)
			}
			for step := int64(2); step <= 12; step++ {
				same := slices.Equal(state(t, out.dir, step), state(t, out.dir, step-1))
				if want := slices.Contains(c.skipped, step); same != want {
					t.Errorf("%s: step %d left weights and moments as they were: %t, want %t", what, step, same, want)
				}
			}
			notices(t, what, out.notices, 32768, 16384, 8192)
			text, err := os.ReadFile(filepath.Join(out.dir, "metrics.jsonl"))
			if n := strings.Count(string(text), `"grad_norm":null`); err != nil || n != len(c.skipped) ||
				strings.Count(string(text), "\n") != 12 {
				t.Errorf("%s: %d lines without a gradient norm, %v:\n%s", what, n, err, text)
			}
		}
	}
}

// A steps records the step numbers passed to the optimizer.
type steps struct {
	optim.Device
	told *[]int
}

func (s steps) AdamW(p, c, g, m, v, sum tensor.View, h optim.AdamStep) {
	if p.Offset() == 0 { // once per step
		*s.told = append(*s.told, h.Step)
	}
	s.Device.AdamW(p, c, g, m, v, sum, h)
}

// The bias correction of the moments does not count the skipped steps known when a step is queued.
func TestSkippedStepsDoNotCount(t *testing.T) {
	cfg := load(t, tiny, 1, "train.steps=12")
	for ahead, want := range [][]int{
		{0, 1, 2, 2, 2, 3, 4, 4, 5, 6, 7, 8},
		{0, 1, 2, 3, 3, 3, 3, 3, 3, 3, 4, 5},
	} {
		var told []int
		_, err := runOn(t, cfg, 1, train.Options{}, func(d *device.Device) {
			scaled(d)
			d.RunAhead = ahead
			d.Optim = steps{d.Optim, &told}
			d.Ops = &narrow{Ops: d.Ops, stream: d.Stream.(*tensor.HostStream), tokens: float64(cfg.Data.SeqLen),
				limit: falling, step: 1}
		})
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(told, want) {
			t.Errorf("%d ahead: steps %v, want %v", ahead, told, want)
		}
	}
}

// notices fails the test unless each scale was reported once.
func notices(t *testing.T, what string, got []string, scales ...int) {
	t.Helper()
	var want []string
	for _, s := range scales {
		want = append(want, fmt.Sprintf("loss scale now %d", s))
	}
	if !slices.EqualFunc(got, want, strings.HasSuffix) {
		t.Errorf("%s: notices %q, want those of %v", what, got, scales)
	}
}

// state returns the weights and moments of a checkpoint.
func state(t *testing.T, dir string, step int64) (all []float32) {
	t.Helper()
	c, err := checkpoint.Open(filepath.Join(dir, "checkpoints", fmt.Sprintf("step-%08d", step)))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, p := range c.Manifest.Params {
		n := int64(1)
		for _, d := range p.Shape {
			n *= int64(d)
		}
		for _, field := range c.Manifest.Fields {
			data := make([]float32, n)
			if err := c.Read(t.Context(), p.Name, field, 0, data); err != nil {
				t.Fatal(err)
			}
			all = append(all, data...)
		}
	}
	return all
}

// A run stopped and resumed at any point among overflows has the bits of an uninterrupted one, and so has a run with
// validations.
func TestStopAmongOverflows(t *testing.T) {
	t.Parallel()
	const ranks = 2
	set := []string{"train.steps=12", "memory.shard=optimizer"}
	cfg := load(t, tiny, ranks, set...)
	for ahead := range 2 {
		run := func(cfg *config.Config, done int, o train.Options) outcome {
			out, err := narrowRun(t, cfg, ranks, ahead, done, falling, o)
			if err != nil {
				t.Fatal(err)
			}
			return out
		}
		want := losses(run(cfg, 0, train.Options{NoSave: true}).steps)
		for stop := int64(1); stop < 9; stop++ {
			if testing.Short() && (stop+int64(ahead))%3 != 0 {
				continue
			}
			o := train.Options{RunDir: t.TempDir(), RunID: "a"}
			stopAfter(stop, &o)
			first := run(cfg, 0, o)
			second := run(cfg, len(first.steps), train.Options{RunDir: o.RunDir, RunID: "b", Resume: true, NoSave: true})
			if got := losses(append(first.steps, second.steps...)); !first.stopped || got != want {
				t.Errorf("%d ahead, stopped after step %d: %t\n%s\nwant\n%s", ahead, stop, first.stopped, got, want)
			}
		}
		drained := load(t, tiny, ranks, append(set,
			"data.validation={path: "+textFile(t)+", every: 1, samples: 1}")...)
		if got := losses(run(drained, 0, train.Options{NoSave: true}).steps); got != want {
			t.Errorf("%d ahead, with validations\n%s\nwant\n%s", ahead, got, want)
		}
	}
}

// A checkpoint of a run without a loss scale resumes with one, and the reverse.
func TestScalingBeginsAndEndsAtACheckpoint(t *testing.T) {
	want := losses(curve(t, tiny, 2, "train.steps=9"))
	dir := t.TempDir()
	part := func(steps int, change func(*device.Device)) outcome {
		cfg := load(t, tiny, 2, fmt.Sprintf("train.steps=%d", steps))
		out, err := runOn(t, cfg, 2, train.Options{RunDir: dir, RunID: fmt.Sprint(steps), Resume: true}, change)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	plain := func(*device.Device) {}
	all := slices.Concat(part(3, plain).steps, part(6, scaled).steps, part(9, plain).steps)
	if got := losses(all); got != want {
		t.Errorf("with a scale in the middle\n%s\nwant\n%s", got, want)
	}
}

// If gradients overflow with every scale, the run ends as diverged, with the weights from before.
func TestOverflowWithoutEndIsDivergence(t *testing.T) {
	t.Parallel()
	cfg := load(t, tiny, 2, "train.steps=60", "checkpoint.every=1")
	out, err := narrowRun(t, cfg, 2, 0, 0, func(step int) float64 {
		if step < 4 {
			return math.Inf(1)
		}
		return 0
	}, train.Options{})
	if err == nil || !strings.Contains(err.Error(), "step 20: training diverged") ||
		!strings.Contains(err.Error(), "scale of 1;") {
		t.Fatalf("a run that overflows from step 4 on ended with %v", err)
	}
	scales := make([]int, 16)
	for i := range scales {
		scales[i] = 1 << (15 - i)
	}
	notices(t, "overflows from step 4 on", out.notices, scales...)
	if !slices.Equal(state(t, out.dir, 19), state(t, out.dir, 17)) {
		t.Error("steps that overflowed changed the weights")
	}
}

// A loss that is not finite without an overflow also ends a run with a scale.
func TestLossThatIsNotFiniteIsDivergence(t *testing.T) {
	cfg := load(t, tiny, 1)
	_, err := runOn(t, cfg, 1, train.Options{}, func(d *device.Device) {
		scaled(d)
		d.Ops = &infinite{d.Ops, d.Stream.(*tensor.HostStream)}
	})
	if err == nil || !strings.Contains(err.Error(), "step 1: training diverged: loss +Inf") {
		t.Errorf("a run with an infinite loss ended with %v", err)
	}
}

// A gradient norm that is not finite ends a run at once, before the next loss shows it.
func TestGradientNormThatIsNotFiniteIsDivergence(t *testing.T) {
	_, err := runOn(t, load(t, tiny, 1), 1, train.Options{}, func(d *device.Device) {
		d.Ops = &steep{d.Ops, d.Stream.(*tensor.HostStream)}
	})
	if err == nil || !strings.Contains(err.Error(), "step 1: training diverged: loss 5.") {
		t.Errorf("a run with a gradient that is no number ended with %v", err)
	}
}

// A steep computes a finite loss with a gradient that is no number.
type steep struct {
	model.Ops
	stream *tensor.HostStream
}

func (n *steep) CrossEntropy(loss, logits, targets tensor.View, scale, softcap float64, grad bool) {
	n.Ops.CrossEntropy(loss, logits, targets, scale, softcap, grad)
	n.stream.Do("steep", func() error {
		tensor.Data[float32](logits)[0] = float32(math.NaN())
		return nil
	})
}

// An infinite computes an infinite loss with finite gradients.
type infinite struct {
	model.Ops
	stream *tensor.HostStream
}

func (n *infinite) CrossEntropy(loss, logits, targets tensor.View, scale, softcap float64, grad bool) {
	n.Ops.CrossEntropy(loss, logits, targets, scale, softcap, grad)
	n.stream.Do("infinite", func() error {
		tensor.Data[float64](loss)[0] = math.Inf(1)
		return nil
	})
}
