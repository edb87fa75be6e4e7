package train

import (
	"context"
	"fmt"
	"math"
	"path/filepath"
	"slices"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/base/safetensors"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// RouteTensor has the choices of experts in a step: rows of int32 with the place of the sample, the position in it, the
// number of the layer among those with experts, and the experts.
const RouteTensor = "routes"

const routeKeys = 3

// Routed counts the choices of tokens in all layers and steps, on all ranks. Sums in another order decide otherwise
// between experts with nearly equal scores.
type Routed struct {
	Choices int64  `json:"choices"` // sets of experts, of a token in a layer
	Ties    int64  `json:"ties"`    // those with other experts of scores within the tolerance
	Wrong   int64  `json:"wrong"`   // other ones
	First   string `json:"first"`   // describes a wrong one on rank 0
}

// A replay takes the choices of another side in place of its own, so that gradients can be compared, and counts where
// they differ; or it only records them.
type replay struct {
	model.Ops
	ctx       context.Context
	dev       *Device
	tolerance float64 // of logits, as a part of the largest
	other     map[route][]int32
	routed    Routed
	err       error

	rows      []route // of the tokens of the pass, without the layer; place -1: fills it
	at, layer int     // the first token of the next call
	records   []int32
	host      [4]View // choice, weight, logits, correction
}

type route struct{ place, position, layer int32 }

// newReplay puts a replay before the operations of a device; nil for a model without experts.
func newReplay(ctx context.Context, dev *Device, cfg *config.Config, p Probing) (r *replay, err error) {
	if !cfg.Model.HasExperts() {
		return nil, nil
	}
	on := *dev
	r = &replay{Ops: dev.Ops, ctx: ctx, dev: &on, tolerance: Tolerance(cfg)}
	dev.Ops = r
	if p.Routes == "" {
		return r, nil
	}
	r.other = map[route][]int32{}
	paths, err := filepath.Glob(filepath.Join(p.Routes, "rank-*.safetensors"))
	for _, path := range paths {
		if err == nil {
			err = r.read(path)
		}
	}
	return r, err
}

func (r *replay) read(path string) error {
	f, err := safetensors.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	info, ok := f.Info(RouteTensor)
	if !ok || info.Elements() == 0 {
		return nil
	}
	list := tensor.New(tensor.I32, int(info.Elements()))
	if err := f.ReadBytes(RouteTensor, tensor.Bytes(list), 0); err != nil {
		return err
	}
	for row := range slices.Chunk(tensor.Data[int32](list), info.Shape[1]) {
		r.other[route{row[0], row[1], row[2]}] = row[routeKeys:]
	}
	return nil
}

// begin starts a pass of that many tokens, all of which fill the batch until add names them.
func (r *replay) begin(tokens int) {
	r.rows, r.at, r.layer = slices.Repeat([]route{{place: -1}}, tokens), 0, 0
}

// add names the tokens of a sample from row first on.
func (r *replay) add(place, first int, positions []int, tokens int) {
	for i, position := range positions {
		if position < tokens {
			r.rows[first+i] = route{place: int32(place), position: int32(position)}
		}
	}
}

// Route routes, and then records or replaces the choices.
func (r *replay) Route(weight, choice, logits, correction View, router kernels.Router) {
	r.Ops.Route(weight, choice, logits, correction, router)
	if len(r.rows) == 0 || r.err != nil {
		return
	}
	if r.err = r.load(choice, weight, logits, correction); r.err != nil {
		return
	}
	k, n, changed := choice.Cols(), logits.Cols(), false
	choices, weights := tensor.Data[int32](r.host[0]), tensor.Data[float32](r.host[1])
	scores, added := tensor.Data[float32](r.host[2]), []float32(nil)
	if !correction.IsZero() {
		added = tensor.Data[float32](r.host[3])
	}
	for t := range logits.Rows() {
		at, own := r.rows[r.at+t], choices[t*k:][:k]
		if at.place < 0 {
			continue
		}
		at.layer = int32(r.layer)
		r.records = append(append(r.records, at.place, at.position, at.layer), own...)
		if r.other == nil {
			continue
		}
		r.routed.Choices++
		want := r.other[at]
		if len(want) != k {
			r.err = fmt.Errorf("the other side has no route of token %d in sample %d", at.position, at.place)
			return
		}
		if same(own, want) {
			continue
		}
		row := scores[t*n:][:n]
		if gap := between(deciding(row, added, router), own, want); gap <= r.tolerance {
			r.routed.Ties++
		} else if r.routed.Wrong++; r.routed.First == "" {
			r.routed.First = fmt.Sprintf("token %d of sample %d in layer %d with experts: %v in place of %v, whose scores "+
				"differ by %.2g of the largest", at.position, at.place, r.layer, own, want, gap)
		}
		copy(own, want)
		weigh(weights[t*k:][:k], row, own, router)
		changed = true
	}
	if changed {
		r.dev.Store.Upload(choice.Reshape([4]int{1, 1, 1, choice.Size()}), r.host[0])
		r.dev.Store.Upload(weight.Reshape([4]int{1, 1, 1, weight.Size()}), r.host[1])
		r.err = r.dev.Stream.Sync(r.ctx)
	}
	if r.at += logits.Rows(); r.at == len(r.rows) {
		r.at, r.layer = 0, r.layer+1
	}
}

// load waits for the views on the host.
func (r *replay) load(views ...View) (err error) {
	for i, v := range views {
		if v.IsZero() {
			continue
		}
		if r.host[i].IsZero() || r.host[i].Size() != v.Size() {
			if !r.host[i].IsZero() {
				r.dev.FreeHostVector(r.host[i])
			}
			if r.host[i], err = r.dev.HostVector("routes", v.DType(), v.Size()); err != nil {
				return err
			}
		}
		r.dev.Store.Download(r.host[i], v.Reshape([4]int{1, 1, 1, v.Size()}))
	}
	return r.dev.Stream.Sync(r.ctx)
}

func same(a, b []int32) bool {
	return !slices.ContainsFunc(a, func(e int32) bool { return !slices.Contains(b, e) })
}

// deciding returns the numbers by which experts are chosen.
func deciding(logits, correction []float32, r kernels.Router) []float64 {
	out := make([]float64, len(logits))
	for e, x := range logits {
		if out[e] = float64(x); r.Sigmoid {
			out[e] = 1 / (1 + math.Exp(-float64(x)))
		}
		if correction != nil {
			out[e] += float64(correction[e])
		}
	}
	return out
}

// between returns the largest difference between the scores of experts that only one of two sets has, as a part of the
// largest score.
func between(scores []float64, a, b []int32) float64 {
	low, high, most := math.Inf(1), math.Inf(-1), 0.0
	for e, x := range scores {
		if most = max(most, math.Abs(x)); slices.Contains(a, int32(e)) != slices.Contains(b, int32(e)) {
			low, high = min(low, x), max(high, x)
		}
	}
	return (high - low) / most
}

// weigh sets the weights of given choices, in float64.
func weigh(weights, logits []float32, choice []int32, r kernels.Router) {
	score := func(e int32) float64 {
		if r.Sigmoid {
			return 1 / (1 + math.Exp(-float64(logits[e])))
		}
		return math.Exp(float64(logits[e] - slices.Max(logits)))
	}
	sum := 0.0
	for e := range logits {
		if !r.Sigmoid && !r.Normalize || r.Normalize && slices.Contains(choice, int32(e)) {
			sum += score(int32(e))
		}
	}
	if r.Sigmoid && !r.Normalize {
		sum = 1
	}
	scale := r.Scale
	if scale == 0 {
		scale = 1
	}
	for j, e := range choice {
		weights[j] = float32(scale * score(e) / sum)
	}
}

// take returns the entry of the recorded choices, and forgets them.
func (r *replay) take(k int) safetensors.Entry {
	e := raw(RouteTensor, safetensors.I32, routeKeys+k, r.records)
	r.records, r.rows = nil, nil
	return e
}

// total returns the counts of all ranks.
func (r *replay) total(ctx context.Context, world comm.Communicator) (*Routed, error) {
	v := tensor.FromSlice([]int64{r.routed.Choices, r.routed.Ties, r.routed.Wrong}, 3)
	err := comm.Finish(ctx)(world.AllReduce(v, comm.Sum))
	n := tensor.Data[int64](v)
	return &Routed{n[0], n[1], n[2], r.routed.First}, err
}
