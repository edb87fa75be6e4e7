package agent

import (
	"encoding/json"
	"runtime"
	"time"

	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/gonum"

	"github.com/cprun/cprun/internal/config"
	"github.com/cprun/cprun/internal/plan"
)

// PlanOptions are the flags of `cprun plan`.
type PlanOptions struct {
	Options
	Set  []string
	JSON bool
}

// Plan prints what a run of a config would do.
func Plan(path string, o PlanOptions) (int, error) {
	ranks, device, err := o.planRanks()
	if err != nil {
		return 0, err
	}
	cfg, err := config.Load(path, config.Options{Set: o.Set, Ranks: ranks, Device: device, NoFiles: true})
	if err != nil {
		return 0, &InputError{err}
	}
	p, err := plan.Make(cfg, ranks, matmulRate()*min(1, float64(runtime.NumCPU())/float64(ranks)))
	if err != nil {
		return 0, &InputError{err}
	}
	if o.JSON {
		enc := json.NewEncoder(o.Stdout)
		enc.SetIndent("", "  ")
		return 0, enc.Encode(p)
	}
	return 0, p.Write(o.Stdout)
}

// planRanks is resolve without the bound of this machine: a plan is for any.
func (o *PlanOptions) planRanks() (int, string, error) {
	n := o.NProc
	o.NProc = "auto"
	_, device, err := o.resolve()
	if err != nil {
		return 0, "", err
	}
	if n == "auto" {
		return 1, device, nil
	}
	o.NProc = n
	ranks, err := count(n)
	return ranks, device, err
}

// matmulRate measures, for a few hundredths of a second, the GFLOP/s of one thread's matrix
// product, from which the plan derives a lower bound of a step's time.
func matmulRate() float64 {
	const n = 128
	a, b, c := make([]float32, n*n), make([]float32, n*n), make([]float32, n*n)
	for i := range a {
		a[i], b[i] = float32(i%7)-3, float32(i%5)-2
	}
	impl := gonum.Implementation{}
	best := time.Duration(1 << 62)
	for range 5 {
		start := time.Now()
		for range 2 {
			impl.Sgemm(blas.NoTrans, blas.NoTrans, n, n, n, 1, a, n, b, n, 0, c, n)
		}
		best = min(best, time.Since(start))
	}
	return 2 * 2 * n * n * n / best.Seconds() / 1e9
}
