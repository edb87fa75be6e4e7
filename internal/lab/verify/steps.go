package verify

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"math"
	"runtime"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/internal/run/train"
)

// A Step compares the parameters after two steps, and lists the samples of both, in order.
type Step struct {
	Parameters []Gradient `json:"parameters"`
	Samples    []int64    `json:"samples"`
}

// A Rope compares the rotation of keys with that of the config: the largest relative error of Layers layers.
type Rope struct {
	Layers int   `json:"layers"`
	Error  Float `json:"relative_error"`
}

// CompareVaried compares one rank with several that ran with other keys, without the records. It adds differences.
func CompareVaried(r *Report, cfg *config.Config, keys []string, one, many *Side) error {
	v := &Report{Ranks: r.Ranks, Tolerance: r.Tolerance, Reasons: map[string]string{}}
	v.compareRows(r.side(1), "one rank", many.batch, one.batch)
	err := v.compareSteps(cfg, one.batch, one, many)
	for _, d := range v.Differences {
		r.differ("with %s: %s", keys, d)
	}
	r.Varied, r.OK = keys, new(len(r.Differences) == 0)
	return err
}

// Linears compares the first step of one rank with linears in the type of compute and in FP8.
type Linears struct {
	// FP8 is the loss in FP8, and Loss the other one.
	Loss          Float      `json:"loss"`
	FP8           Float      `json:"loss_fp8"`
	Gradients     []Gradient `json:"gradients"`
	LossTolerance float64    `json:"loss_tolerance"`
	Tolerance     float64    `json:"tolerance"`
}

// E4M3 rounds an operand by at most 1/16, and a product by 3.6 %. In right runs of fresh models of all families it
// changed the loss by up to 0.004, and gradients by up to 0.3, or by less than 0.0005 of the norm of all.
var linearsLoss, ofLinears = 8e-3, Report{Ranks: 1, Tolerance: 0.6, allowed: 1e-3}

// Fresh returns a config that trains two layers of random weights, or four if layers differ. Products with them have a
// quarter of their input's size. In right runs of deeper models, or of larger weights, E4M3 may change gradients by
// several times their size.
func Fresh(cfg *config.Config) *config.Config {
	fresh := *cfg
	m := &fresh.Model
	n := min(2, m.NumHiddenLayers)
	if m.Recurs() || m.HasExperts() {
		n = min(4, m.NumHiddenLayers)
	}
	m.From, m.ResizeEmbeddings, m.Tuning = "", 0, hf.Tuning{Linears: m.Tuning.Linears}
	m.NumHiddenLayers, m.InitializerRange = n, 0.25/math.Sqrt(float64(m.HiddenSize))
	m.LayerTypes, m.NoRopeLayers = m.LayerTypes[:min(n, len(m.LayerTypes))], m.NoRopeLayers[:min(n, len(m.NoRopeLayers))]
	if m.Family().ValueNorms { // trained norms of queries and keys have the factor of scores
		m.AttentionMultiplier = 1 / math.Sqrt(float64(m.HeadDim))
	}
	m.MLPOnlyLayers = slices.DeleteFunc(slices.Clone(m.MLPOnlyLayers), func(layer int) bool { return layer >= n })
	return &fresh
}

// CompareLinears compares one rank with the same rank with linears in FP8. It adds differences.
func CompareLinears(r *Report, cfg *config.Config, one, scaled *Side) error {
	v, a, b := ofLinears, one.Steps[0], scaled.Steps[0]
	_, err := v.compareGradients(cfg, one, scaled)
	if !within(float64(b.Loss), float64(a.Loss), linearsLoss) {
		v.differ("loss: %v in place of %v", b.Loss, a.Loss)
	}
	for _, d := range v.Differences {
		r.differ("with linears in FP8: %s", d)
	}
	r.Linears = &Linears{a.Loss, b.Loss, v.Gradients, linearsLoss, v.Tolerance}
	r.OK = new(len(r.Differences) == 0)
	return err
}

// compareSteps compares losses, gradients, samples and parameters.
func (r *Report) compareSteps(cfg *config.Config, expected [][]Row, one, many *Side) error {
	r.compareSamples(one, many, len(cfg.Data.Path) > 1)
	for k := range train.VerifiedSteps {
		if one.Steps[k].Blank || many.Steps[k].Blank {
			r.Reasons["step"] = blank
			if k == 0 {
				r.Reasons["loss"], r.Reasons["gradients"] = blank, blank
			}
			return nil
		}
		n := len(expected) / train.VerifiedSteps
		targets := count(expected[k*n:(k+1)*n], isTarget)
		a, b := one.Steps[k], many.Steps[k]
		if k == 0 {
			r.Loss = &Sides{a.Loss, b.Loss}
		}
		if !within(float64(b.Loss), float64(a.Loss), r.Tolerance) {
			r.differ("loss: %v on one rank, %v on %d, in step %d", a.Loss, b.Loss, r.Ranks, k+1)
		}
		for i, s := range []train.Stepped{a, b} {
			if mean := float64(s.Sum) / float64(targets); !within(float64(s.Loss), mean, 1e-6) {
				r.differ("loss: %v on %s in step %d, and the sum over %d targets of the records gives %v", s.Loss,
					r.side(i), k+1, targets, mean)
			}
		}
	}
	norms, err := r.compareGradients(cfg, one, many)
	if err == nil {
		err = r.compareParameters(cfg, norms, one, many)
	}
	return err
}

func (r *Report) side(i int) string {
	if i == 0 {
		return "one rank"
	}
	return readable.Counted(r.Ranks, "rank")
}

// within reports whether a number is near another one. NaN is not.
func within(have, want, tolerance float64) bool {
	return math.Abs(have-want) <= tolerance*math.Abs(want)
}

// compareSamples checks that the steps train the next samples of the data, each once in an epoch.
func (r *Report) compareSamples(one, many *Side, mixture bool) {
	r.Step = &Step{Samples: many.trained}
	for i, s := range []*Side{one, many} {
		for n, sample := range s.trained {
			if sample != many.Samples[n] {
				r.differ("samples of step %d on %s: %d in place of %d", 1+n*train.VerifiedSteps/len(s.trained), r.side(i),
					sample, many.Samples[n])
				break
			}
		}
	}
	most, times := (len(many.trained)+int(many.All)-1)/int(many.All), map[int64]int{}
	for _, sample := range many.trained {
		if times[sample]++; times[sample] == most+1 && !mixture {
			r.differ("samples: %d is trained %d times in two steps", sample, times[sample])
		}
	}
}

// Sums in another order differ by 2e-7 to 5e-7 of their terms in float32. Some gradients are small differences of such
// sums: those of biases of keys, since softmax ignores a shift of all scores, and of queries and keys in a window of
// one token. So they are compared with all gradients, as the largest terms.

// rounding returns the share of the norm of all gradients that bounds the difference of sums.
func (r *Report) rounding() float64 { return cmp.Or(r.allowed, r.Tolerance/20) }

// noise returns the share below which a gradient may be rounding alone.
func (r *Report) noise() float64 { return cmp.Or(r.allowed, r.Tolerance/10) }

// stepNorms holds the norms of the gradients of each side and step.
type stepNorms [2][train.VerifiedSteps]float64

// compareGradients compares the first step's gradients, and the norms of both steps with those of the gradients. It
// returns these, by side.
func (r *Report) compareGradients(cfg *config.Config, one, many *Side) (norms stepNorms, err error) {
	params := model.Layout(&cfg.Model.Config)
	diffs := make([]float64, len(params))
	squares := make([][2][train.VerifiedSteps]float64, len(params))
	err = parallel(params, func(i int, p model.Param) error {
		var parts [4][]part
		for j := range parts {
			parts[j] = []*Side{one, many}[j%2].of(train.GradientParts, p.Name, 1+j/2)
		}
		return eachPiece(p.Size(), parts[:], func(v [][]float32) {
			for e := range v[0] {
				for j := range v {
					squares[i][j%2][j/2] += float64(v[j][e]) * float64(v[j][e])
				}
				d := float64(v[0][e]) - float64(v[1][e])
				diffs[i] += d * d
			}
		})
	})
	if err != nil {
		return norms, fmt.Errorf("gradient %w", err)
	}
	for s, side := range []*Side{one, many} {
		for k := range norms[s] {
			for i := range squares {
				norms[s][k] += squares[i][s][k]
			}
			norms[s][k] = math.Sqrt(norms[s][k])
			if have := float64(side.Steps[k].GradNorm); !within(have, norms[s][k], 1e-5) {
				r.differ("gradient norm: %v on %s in step %d; the gradients of all ranks have %v", have, r.side(s), k+1,
					norms[s][k])
			}
		}
	}
	all := norms[0][0]
	for i, p := range params {
		own, diff, other := math.Sqrt(squares[i][0][0]), math.Sqrt(diffs[i]), math.Sqrt(squares[i][1][0])
		g := Gradient{p.Name, relative(diff, max(own, 1e-6*all))}
		r.Gradients = append(r.Gradients, g)
		small := diff <= r.rounding()*all || max(own, other) <= r.noise()*all
		if !(float64(g.Error) <= r.Tolerance) && !small { // also NaN
			r.differ("gradient of %s: relative error %.3g", p.Name, float64(g.Error))
		}
	}
	return norms, nil
}

// relative returns a quotient; 0 if there is no difference, also of zeros.
func relative(diff, of float64) Float {
	if diff == 0 {
		return 0
	}
	return Float(diff / of)
}

// A moved compares a parameter after the last step.
type moved struct {
	n int // elements
	// These are squares of its values, of its change, of the difference of the sides, and of the change on many.
	size, step, diff, all float64
	off                   [2]float64 // and of the differences from adamW, by side
}

// compareParameters compares the parameters after the last step, on both sides and with those of an own optimizer.
func (r *Report) compareParameters(cfg *config.Config, norms stepNorms, one, many *Side) error {
	params, last := model.Layout(&cfg.Model.Config), train.VerifiedSteps
	moves, o := make([]moved, len(params)), train.Hyper(cfg)
	err := parallel(params, func(i int, p model.Param) error {
		m, sides := &moves[i], []*Side{one, many}
		parts := [][]part{one.of(train.ParameterParts, p.Name, 0), many.of(train.ParameterParts, p.Name, 0),
			one.of(train.ParameterParts, p.Name, last), many.of(train.ParameterParts, p.Name, last)}
		var rules [2][train.VerifiedSteps]rule
		for k := range train.VerifiedSteps {
			for s, side := range sides {
				parts = append(parts, side.of(train.GradientParts, p.Name, k+1))
				rules[s][k] = newRule(&o, k, norms[s][k], len(p.Shape) > 1)
			}
		}
		return eachPiece(p.Size(), parts, func(v [][]float32) {
			for e := range v[0] {
				for s := range sides {
					want := float64(v[s][e])
					w := adamW{x: want}
					for k := range train.VerifiedSteps {
						w.step(&rules[s][k], float64(v[4+2*k+s][e]))
					}
					d := w.x - float64(v[2+s][e])
					m.off[s] += d * d
					if s == 0 {
						m.size, m.step = m.size+w.x*w.x, m.step+(w.x-want)*(w.x-want)
					}
				}
				d, moved := float64(v[2][e])-float64(v[3][e]), float64(v[3][e])-float64(v[1][e])
				m.diff, m.all = m.diff+d*d, m.all+moved*moved
			}
		})
	})
	if err != nil {
		return fmt.Errorf("parameter %w", err)
	}
	all := 0.0
	for _, m := range moves {
		all += m.all
	}
	for i, m := range moves {
		m.n = params[i].Size()
		r.judge(params[i].Name, m, math.Sqrt(all))
	}
	r.compareWeights(one, many)
	return nil
}

// exact bounds the error of a step in float32, as a share of the change and of the rounded values.
const exact, rounded = 1e-4, 3e-7

// least is the root mean square of a parameter of usual size. Biases and adapters begin at 0.
const least = 0.01

// judge reports a parameter. all is the norm of the change of all parameters.
func (r *Report) judge(name string, m moved, all float64) {
	size, step, diff := math.Sqrt(m.size), math.Sqrt(m.step), math.Sqrt(m.diff)
	of := max(size, least*math.Sqrt(float64(m.n)))
	if r.Tolerance > 1e-3 { // half precision changes the weights by few digits
		of = step
	}
	g := Gradient{name, relative(diff, max(of, 1e-6*all))}
	r.Step.Parameters = append(r.Step.Parameters, g)
	if !(float64(g.Error) <= r.Tolerance) && !(diff <= r.rounding()*all) { // also NaN
		r.differ("parameter %s after two steps: relative error %.3g", name, float64(g.Error))
	}
	for s, off := range m.off {
		if off = math.Sqrt(off); !(off <= exact*step+rounded*size) {
			r.differ("parameter %s after two steps on %s: AdamW of its gradients gives another one, by %.3g of the change",
				name, r.side(s), off/step)
		}
	}
}

// compareWeights compares the weights that the ranks read with each other, and with the optimizer.
func (r *Report) compareWeights(one, many *Side) {
	for rank, sum := range many.weights {
		if !bytes.Equal(sum, many.weights[0]) {
			r.differ("weights after two steps: rank %d reads others than rank 0", rank)
		}
	}
	for s, side := range []*Side{one, many} {
		if n := side.Steps[train.VerifiedSteps-1].Stale; n > 0 {
			r.differ("weights after two steps on %s: rank 0 reads %d elements that differ from its optimizer's",
				r.side(s), n)
		}
	}
}

// An adamW is an element of a parameter with its moments.
type adamW struct{ x, m, v float64 }

// A rule has the numbers of a step, by the formulas of arXiv:1711.05101 and clip_grad_norm_.
type rule struct{ b1, b2, eps, clip, decay, rate, root float64 }

func newRule(o *config.Optimizer, k int, norm float64, matrix bool) rule {
	lr, n := train.VerifiedLR[k], float64(k+1)
	r := rule{o.Betas[0], o.Betas[1], o.Eps, min(1, o.GradClip/(norm+1e-6)), 1, lr / (1 - math.Pow(o.Betas[0], n)),
		math.Sqrt(1 - math.Pow(o.Betas[1], n))}
	if matrix {
		r.decay -= lr * o.WeightDecay
	}
	return r
}

func (w *adamW) step(r *rule, g float64) {
	g *= r.clip
	w.m, w.v = r.b1*w.m+(1-r.b1)*g, r.b2*w.v+(1-r.b2)*g*g
	w.x = w.x*r.decay - r.rate*w.m/(math.Sqrt(w.v)/r.root+r.eps)
}

// parallel calls f for each parameter, on all cores.
func parallel(params []model.Param, f func(i int, p model.Param) error) error {
	var g errgroup.Group
	g.SetLimit(runtime.GOMAXPROCS(0))
	for i, p := range params {
		g.Go(func() error {
			if err := f(i, p); err != nil {
				return fmt.Errorf("of %s: %w", p.Name, err)
			}
			return nil
		})
	}
	return g.Wait()
}

// onePiece bounds the elements of a vector in memory at once.
const onePiece = 256 << 10

// eachPiece reads vectors of n elements piece by piece.
func eachPiece(n int, vectors [][]part, f func(pieces [][]float32)) error {
	for lo := 0; lo < n; lo += onePiece {
		values := make([][]float32, len(vectors))
		for i, parts := range vectors {
			values[i] = make([]float32, min(onePiece, n-lo))
			if err := elements(parts, values[i], int64(lo)); err != nil {
				return err
			}
		}
		f(values)
	}
	return nil
}

// compareRope compares rotated keys of uniform tokens with the key at position 0, rotated by the config's frequencies.
// It leaves out stretched tables, except linear ones.
func (r *Report) compareRope(cfg *config.Config, one *Side) {
	tolerance := 1e-2 // products round
	if r.Tolerance > 1e-3 {
		tolerance = 0.1
	}
	rope := Rope{}
	inOrder := func(a, b [2]int) int { return slices.Compare(a[:], b[:]) }
	for _, at := range slices.SortedFunc(maps.Keys(one.keys), inOrder) {
		key := one.keys[at]
		theta, factor, known := turning(cfg, at[0])
		zero := one.keys[[2]int{at[0], 0}]
		if at[1] == 0 || !known {
			continue
		}
		table := max(0, cfg.Model.Layer(at[0]).Rope.Key)
		diff, all, n := 0.0, 0.0, 2*cfg.Model.RopePairs()[table]
		for i := range n / 2 {
			angle := 0.0
			if theta > 0 && (table > 0 || i < cfg.Model.RotatingPairs()) {
				angle = float64(at[1]) / factor * math.Pow(theta, -float64(2*i)/float64(n))
			}
			sin, cos := math.Sincos(angle)
			x, y := float64(zero[i]), float64(zero[i+n/2])
			diff += sq(x*cos-y*sin-float64(key[i])) + sq(y*cos+x*sin-float64(key[i+n/2]))
			all += x*x + y*y
		}
		rope.Layers++
		e := relative(math.Sqrt(diff), math.Sqrt(all))
		rope.Error = max(rope.Error, e)
		if !(float64(e) <= tolerance) && all > 0 {
			r.differ("rotation of keys of layer %d: at position %d it differs from that of the config by %.3g", at[0], at[1],
				float64(e))
		}
	}
	if r.Rope = &rope; rope.Layers == 0 {
		r.Rope, r.Reasons["rope"] = nil, "no layer rotates keys by a plain table, or sequences have one token"
	}
}

func sq(x float64) float64 { return x * x }

// turning returns the base of a layer's rotation, 0 for none, and the factor that stretches it; known reports whether
// it has such a form.
func turning(cfg *config.Config, layer int) (theta, factor float64, known bool) {
	m := &cfg.Model
	if len(m.NoRopeLayers) > 0 && m.NoRopeLayers[layer] == 0 {
		return 0, 1, true
	}
	if m.Layer(layer).Rope.Key == 1 {
		return cmp.Or(m.RopeLocalBaseFreq, m.RopeTheta), 1, true
	}
	s := m.RopeScaling
	switch {
	case s == nil || s.Type == "" || s.Type == "default":
		return m.RopeTheta, 1, true
	case s.Type == "linear":
		return m.RopeTheta, s.Factor, true
	}
	return 0, 0, false
}
