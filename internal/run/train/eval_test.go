package train_test

import (
	"fmt"
	"math"
	"path/filepath"
	"testing"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/run/train"
	"github.com/cprun/cprun/tensor"
)

// evaluate evaluates the checkpoint of a run on some ranks of this process.
func evaluate(t *testing.T, cfg *config.Config, ranks int, from string) train.Evaluation {
	t.Helper()
	room, results := train.MemoryOf(t, cfg, ranks).Room(), make([]train.Evaluation, ranks)
	err := train.Locally(ranks, "flash", tensor.F32, 0, func(r int, dev *device.Device, world *comm.Group) (err error) {
		results[r], err = train.Eval(t.Context(), cfg, *dev, world, train.Options{From: from, Room: room})
		if err != nil {
			return err
		}
		return world.Barrier(t.Context())
	})
	if err != nil {
		t.Fatal(err)
	}
	for r := range results {
		results[r].Seconds = 0
		if fmt.Sprint(results[r]) != fmt.Sprint(results[0]) {
			t.Errorf("rank %d has %+v, rank 0 %+v", r, results[r], results[0])
		}
	}
	return results[0]
}

// The loss of an evaluation equals that of a validation, on any ranks and in any layout, and so do its buckets.
func TestEvaluationIsValidation(t *testing.T) {
	t.Parallel()
	val := textFile(t)
	for _, packed := range []bool{false, true} {
		set := []string{fmt.Sprintf("data.validation={path: %s, every: 4}", val),
			fmt.Sprintf("data.pack_documents=%t", packed)}
		if packed {
			set = append(set, "data.eos_token_id=46") // sentences
		}
		run := mustRun(t, load(t, tiny, 2, set...), 2, train.Options{})
		want := float64(*run.steps[3].ValLoss)
		from := filepath.Join(run.dir, "checkpoints", "step-00000004")
		var first train.Evaluation
		for i, c := range []struct {
			ranks int
			set   []string
		}{{1, nil}, {3, []string{"parallel.layout=striped"}}, {4, []string{"parallel.layout=contiguous"}}, {2, nil},
			{4, []string{"parallel.data=2", "train.global_batch_size=2"}}} {
			e := evaluate(t, load(t, tiny, c.ranks, append(set, c.set...)...), c.ranks, from)
			if d := math.Abs(float64(e.Loss) - want); !(d <= 1e-5) || e.Samples != 7 {
				t.Errorf("packed %t, %d ranks %v: loss %v over %d samples, the validation's is %v", packed, c.ranks,
					c.set, e.Loss, e.Samples, want)
			}
			if i == 0 {
				first = e
			}
			for k, b := range e.Buckets {
				if w := first.Buckets[k]; b.From != w.From || b.To != w.To || b.Targets != w.Targets || b.Targets > 0 &&
					!(math.Abs(float64(b.Loss-w.Loss)) <= 1e-5) {
					t.Errorf("packed %t, %d ranks %v: %+v, on one rank %+v", packed, c.ranks, c.set, b, w)
				}
			}
		}
	}
}

// The loss of a causal model up to a position equals its loss on a sample that ends there.
func TestBucketsAreByPosition(t *testing.T) {
	set := []string{fmt.Sprintf("data.validation={path: %s, every: 4, samples: 1}", textFile(t))}
	run := mustRun(t, load(t, tiny, 1, set...), 1, train.Options{})
	from := filepath.Join(run.dir, "checkpoints", "step-00000004")
	whole := evaluate(t, load(t, tiny, 2, set...), 2, from)
	sum, n := 0.0, int64(0)
	for _, b := range whole.Buckets {
		sum, n = sum+float64(b.Loss)*float64(b.Targets), n+b.Targets
		short := evaluate(t, load(t, tiny, 1, append(set, fmt.Sprintf("data.seq_len=%d", b.To))...), 1, from)
		if short.Targets != n || n != int64(b.To) || !(math.Abs(float64(short.Loss)-sum/float64(n)) <= 1e-5) {
			t.Errorf("up to position %d: %v over %d targets; a sample of that length: %v over %d", b.To, sum/float64(n),
				n, short.Loss, short.Targets)
		}
	}
	if len(whole.Buckets) != 5 || whole.Targets != 37 {
		t.Errorf("%d buckets over %d targets, want 5 and 37", len(whole.Buckets), whole.Targets)
	}
}
