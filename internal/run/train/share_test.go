package train

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/checkpoint"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/internal/model/optim"
	"github.com/cprun/cprun/internal/model/state"
	"github.com/cprun/cprun/kernels/cpu"
	"github.com/cprun/cprun/tensor"
)

// A division splits the ranks into groups for a bucket: it returns the colour and the key of a rank.
type division func(rank int) (colour, key int)

var (
	everyone = func(rank int) (int, int) { return 0, rank }
	backward = func(rank int) (int, int) { return 0, -rank }
	pairs    = func(rank int) (int, int) { return rank % 2, rank } // {0, 2} and {1, 3}
	alone    = func(rank int) (int, int) { return rank, 0 }
)

const (
	shareRanks  = 4
	shareLayers = 4
	sharePasses = 2
	shareSteps  = 2
)

var shareRule = optim.AdamW{Beta1: 0.9, Beta2: 0.99, Eps: 1e-8, WeightDecay: 0.1, MaxNorm: 1}

func shareLayout() *model.FlatLayout {
	return model.NewLayout(&hf.Config{
		Architecture: hf.Qwen3, VocabSize: 37, HiddenSize: 8, IntermediateSize: 12, NumHiddenLayers: shareLayers,
		NumAttentionHeads: 2, NumKeyValueHeads: 1, HeadDim: 4, RMSNormEps: 1e-6,
	}, shareRanks)
}

// shareUsed reports, bucket by bucket, the elements that belong to a parameter.
var shareUsed = func() (used [][]bool) {
	flat := shareLayout()
	for _, b := range flat.Buckets {
		used = append(used, make([]bool, b.Size()))
	}
	for i, p := range flat.Params {
		b := flat.Of(i)
		for j := range p.Size() {
			used[b][int(p.Offset-flat.Buckets[b].Lo)+j] = true
		}
	}
	return used
}()

// divisions returns all kinds of groups for the buckets. The vectors belong to pairs: with masters, they are gathered
// into separate memory.
func divisions(flat *model.FlatLayout) []division {
	out := slices.Repeat([]division{everyone}, len(flat.Buckets))
	out[flat.Embedding()], out[flat.Layer(0)], out[flat.Layer(1)], out[flat.Layer(2)] = backward, pairs, alone, pairs
	out[flat.Vectors()] = pairs
	return out
}

// weightOf and gradOf return small multiples of powers of two, so that sums are exact. They differ between colours, and
// gradients between ranks. Between parameters both are 0.
func weightOf(bucket, colour, i int) float32 {
	if !shareUsed[bucket][i] {
		return 0
	}
	return float32((i*7+bucket*3+colour*5)%32)/32 - 0.25
}

func gradOf(step, pass, bucket, rank, i int) float32 {
	if !shareUsed[bucket][i] {
		return 0
	}
	return float32((i*5+bucket+rank*11+pass*3+step)%16)/16 - 0.5
}

// A whole is a bucket of one colour, trained on one rank.
type whole struct{ p, g, m, v View }

// reference trains every colour of every bucket separately.
func reference(t *testing.T, flat *model.FlatLayout, by []division) map[[2]int]whole {
	t.Helper()
	stream := tensor.NewHostStream("reference")
	host, all := cpu.New(stream), map[[2]int]whole{}
	for b, bucket := range flat.Buckets {
		for rank := range shareRanks {
			colour, _ := by[b](rank)
			n := int(bucket.Size())
			w := whole{p: tensor.New(tensor.F32, n), g: tensor.New(tensor.F32, n), m: tensor.New(tensor.F32, n),
				v: tensor.New(tensor.F32, n)}
			for i := range n {
				tensor.Data[float32](w.p)[i] = weightOf(b, colour, i)
			}
			all[[2]int{b, colour}] = w
		}
	}
	for step := range shareSteps {
		norm2 := tensor.New(tensor.F64, 1)
		for at, w := range all {
			clear(tensor.Data[float32](w.g))
			for rank := range shareRanks {
				if colour, _ := by[at[0]](rank); colour != at[1] {
					continue
				}
				for pass := range sharePasses {
					for i := range tensor.Data[float32](w.g) {
						tensor.Data[float32](w.g)[i] += gradOf(step, pass, at[0], rank, i)
					}
				}
			}
			host.SumSquares(norm2, w.g)
		}
		for at, w := range all {
			shareRule.Step(host, w.p, View{}, w.g, w.m, w.v, norm2, at[0] != flat.Vectors(),
				optim.Update{LR: 0.01, Step: step})
		}
		if err := stream.Sync(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	if err := stream.Close(); err != nil {
		t.Fatal(err)
	}
	return all
}

// grouped returns a rank of a world whose buckets have different groups.
func grouped(ctx context.Context, dev *Device, world comm.Communicator, by []division, shard state.Sharding,
	masters bool) (*Trainer, error) {
	flat := shareLayout()
	var groups []comm.Communicator
	var places []state.Group
	for b := range flat.Buckets {
		colour, key := by[b](world.Rank())
		g, err := world.Split(ctx, colour, key)
		if err != nil {
			return nil, err
		}
		groups, places = append(groups, g), append(places, state.Group{Rank: g.Rank(), Size: g.Size()})
	}
	s, err := state.New(dev, state.Options{Layout: flat, Groups: places, Shard: shard, Compute: tensor.F32,
		Masters: masters, AdamW: shareRule})
	if err != nil {
		return nil, err
	}
	s.Zero(dev.Ops)
	t := &Trainer{cfg: &config.Config{}, dev: dev, mesh: &mesh{world: world, saves: world}, share: newSharing(dev, s)}
	if t.stage, err = newStage(dev, int(flat.Size()), false); err != nil {
		return nil, err
	}
	return t, t.share.join(world, groups, groups, nil)
}

// setWeights sets a rank's part of its colours' weights.
func (t *Trainer) setWeights(ctx context.Context, by []division) error {
	for b, bucket := range t.share.Flat.Buckets {
		colour, _ := by[b](t.mesh.world.Rank())
		first := t.share.HeldRange(b).Lo - bucket.Lo
		err := t.stage.write(ctx, t.share.Held(t.share.Masters, b), func(lo int, data []float32) error {
			for i := range data {
				data[i] = weightOf(b, colour, int(first)+lo+i)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return t.share.publish()
}

// into returns the memory for the gradients of a bucket in a pass.
func (x *sharing) into(b int) View {
	if x.Staging != nil {
		return x.Staging[b]
	}
	return x.Whole(x.Grads, b)
}

// trainShared runs steps whose passes add gradOf, bucket after bucket like a model.
func (t *Trainer) trainShared() error {
	x, h := t.share, t.share.hooks()
	flat := x.Flat
	add := func(step, pass, b int) {
		into := x.into(b)
		t.dev.Stream.(*tensor.HostStream).Do("gradients", func() error {
			g := tensor.Data[float32](into)
			for i := range g {
				g[i] += gradOf(step, pass, b, t.mesh.world.Rank(), i)
			}
			return nil
		})
	}
	begin := func(b int) {
		if h.Begin(b) {
			t.dev.Ops.Zero(x.into(b))
		}
	}
	for step := range shareSteps {
		for pass := range sharePasses {
			x.first, x.last = pass == 0, pass == sharePasses-1
			inner := []int{}
			for l := shareLayers - 1; l >= 0; l-- {
				inner = append(inner, flat.Layer(l))
			}
			for _, b := range order(x.Flat) {
				if err := h.Use(b, model.NoBucket); err != nil {
					return err
				}
			}
			begin(flat.Vectors())
			for _, b := range slices.Concat([]int{flat.Head()}, inner, []int{flat.Embedding()}) {
				begin(b)
				add(step, pass, b)
				if err := h.Done(b); err != nil {
					return err
				}
			}
			add(step, pass, flat.Vectors())
			if err := h.Done(flat.Vectors()); err != nil {
				return err
			}
		}
		sums := tensor.New(tensor.F64, 1)
		if err := x.step(sums, sums, optim.Update{LR: 0.01, Step: step}); err != nil {
			return err
		}
	}
	x.flush()
	return t.dev.Stream.Sync(context.Background())
}

// inWorld runs f on each rank in this process.
func inWorld(t *testing.T, f func(dev *Device, world comm.Communicator) error) {
	t.Helper()
	err := Locally(shareRanks, "flash", tensor.F32, 0, func(_ int, dev *Device, world *comm.Group) error {
		return f(dev, world)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// Buckets reduced over different groups get the same bits of weights and moments as each group alone, with a norm that
// counts every gradient once.
func TestBucketsHaveGroupsOfTheirOwn(t *testing.T) {
	flat := shareLayout()
	by := divisions(flat)
	want := reference(t, flat, by)
	for _, shard := range []state.Sharding{state.ShardNone, state.ShardOptimizer, state.ShardGradients, state.ShardParameters} {
		for _, masters := range []bool{false, true} {
			inWorld(t, func(dev *Device, world comm.Communicator) error {
				tr, err := grouped(context.Background(), dev, world, by, shard, masters)
				if err != nil {
					return err
				}
				if err := tr.setWeights(context.Background(), by); err != nil {
					return err
				}
				if err := tr.trainShared(); err != nil {
					return err
				}
				what := fmt.Sprintf("shard %d, masters %t, rank %d", shard, masters, world.Rank())
				tr.compare(t, what, by, want)
				return nil
			})
		}
	}
}

// compare checks a rank's parts of weights and moments after training, and all weights of the model.
func (t *Trainer) compare(test *testing.T, what string, by []division, want map[[2]int]whole) {
	x := t.share
	params := x.Params()
	for b, bucket := range x.Flat.Buckets {
		colour, _ := by[b](t.mesh.world.Rank())
		w, held := want[[2]int{b, colour}], x.HeldRange(b)
		lo, hi := int(held.Lo-bucket.Lo), int(held.Hi-bucket.Lo)
		if err := x.use(b, model.NoBucket); err != nil {
			test.Error(err)
		}
		if err := t.flush(context.Background()); err != nil {
			test.Error(err)
		}
		read := View{}
		if params.BucketCompute != nil {
			read = params.BucketCompute[b]
		} else {
			read = x.Whole(params.Compute, b)
		}
		if b == x.Flat.Vectors() && params.Compute != params.Weights {
			if read = params.Vectors; read.IsZero() {
				read = x.Whole(params.Weights, b)
			}
		}
		for _, c := range []struct {
			name      string
			got, want View
		}{
			{"masters", x.Held(x.Masters, b), state.Part(w.p, lo, hi)},
			{"exp_avg", x.Held(x.M, b), state.Part(w.m, lo, hi)},
			{"exp_avg_sq", x.Held(x.V, b), state.Part(w.v, lo, hi)},
			{"weights as read", read, w.p},
		} {
			if !slices.Equal(tensor.Data[float32](c.got), tensor.Data[float32](c.want)) {
				test.Errorf("%s: %s of bucket %d are not those of its group", what, c.name, b)
			}
		}
	}
}

// Groups of all ranks in different orders save one complete checkpoint together, and any other grouping resumes from
// it. Groups with other parameters under the same names are refused.
func TestCheckpointsOfGroups(t *testing.T) {
	flat := shareLayout()
	mixed := slices.Repeat([]division{everyone}, len(flat.Buckets))
	for b := range mixed {
		if b%2 == 0 {
			mixed[b] = backward
		}
	}
	want := reference(t, flat, mixed)
	dir := t.TempDir()
	save := func(tr *Trainer, world comm.Communicator, dir string) (err error) {
		root, err := os.OpenRoot(dir)
		if err != nil {
			return err
		}
		defer root.Close()
		saver, err := checkpoint.NewSaver(world, checkpoint.Options{Dir: root, RunID: "test"})
		if err != nil {
			return err
		}
		snap, err := tr.snapshot(context.Background(), &Options{}, false)
		if err == nil {
			err = saver.Save(context.Background(), snap)
		}
		if e := saver.Close(); err == nil {
			err = e
		}
		return err
	}
	inWorld(t, func(dev *Device, world comm.Communicator) error {
		ctx := context.Background()
		tr, err := grouped(ctx, dev, world, mixed, state.ShardGradients, true)
		if err != nil {
			return err
		}
		if err := tr.setWeights(ctx, mixed); err != nil {
			return err
		}
		if err := tr.trainShared(); err != nil {
			return err
		}
		tr.step, tr.consumed, tr.tokens = 1, 1, 1
		return save(tr, world, dir)
	})
	found, _, err := checkpoint.Latest(context.Background(), dir)
	if err != nil {
		t.Fatal(err)
	}
	defer found.Close()
	for _, shard := range []state.Sharding{state.ShardNone, state.ShardOptimizer} {
		inWorld(t, func(dev *Device, world comm.Communicator) error {
			by := slices.Repeat([]division{everyone}, len(flat.Buckets))
			tr, err := grouped(context.Background(), dev, world, by, shard, false)
			if err != nil {
				return err
			}
			if err := tr.restore(context.Background(), found.Dir); err != nil {
				return err
			}
			if err := tr.gather(); err != nil {
				return err
			}
			if err := tr.share.publish(); err != nil {
				return err
			}
			if err := tr.flush(context.Background()); err != nil {
				return err
			}
			tr.compare(t, fmt.Sprintf("restored with shard %d, rank %d", shard, world.Rank()), by, want)
			return nil
		})
	}
	refused := t.TempDir()
	inWorld(t, func(dev *Device, world comm.Communicator) error {
		tr, err := grouped(context.Background(), dev, world, divisions(flat), state.ShardGradients, true)
		if err != nil {
			return err
		}
		tr.step, tr.consumed, tr.tokens = 1, 1, 1
		if err := save(tr, world, refused); err == nil ||
			!strings.Contains(err.Error(), "do not make the whole state") {
			t.Errorf("a checkpoint in which groups have different weights of one name: %v", err)
		}
		return nil
	})
}

// The last bucket of a pass also gathers the first one of the next pass, but not before an update changes its weights.
func TestNextPassIsGatheredEarly(t *testing.T) {
	flat := shareLayout()
	for last, want := range map[bool][]int{false: {flat.Layer(0), flat.Embedding()}, true: {flat.Layer(0)}} {
		s, err := state.New(state.Meter{}, state.Options{Layout: flat, Shard: state.ShardParameters, Compute: tensor.F32,
			Groups: state.Groups(flat, state.Group{Size: 2})})
		if err != nil {
			t.Fatal(err)
		}
		var got []int
		x := newSharing(&Device{}, s)
		x.last, x.resident.Gather = last, func(bucket int) error { got = append(got, bucket); return nil }
		if err := x.use(flat.Layer(0), model.NoBucket); err != nil || !slices.Equal(got, want) {
			t.Errorf("last pass %t: gathers of %v, %v; want %v", last, got, err, want)
		}
	}
}

// A waited pending counts its waits.
type waited struct {
	comm.Pending
	waits *int
}

func (w waited) Wait() { *w.waits++ }

// A pairGroup is two ranks whose gathers are waited pendings.
type pairGroup struct {
	comm.Communicator
	waits *int
}

func (pairGroup) Size() int { return 2 }

func (g pairGroup) AllGather(_, _ View) (comm.Pending, error) { return waited{waits: g.waits}, nil }

// A gather that no use followed ends before the next into its memory.
func TestUnusedGathersEnd(t *testing.T) {
	flat := shareLayout()
	s, err := state.New(state.Meter{}, state.Options{Layout: flat, Shard: state.ShardParameters, Compute: tensor.F32,
		Groups: state.Groups(flat, state.Group{Size: 2})})
	if err != nil {
		t.Fatal(err)
	}
	x, waits := newSharing(&Device{}, s), 0
	x.weights = slices.Repeat([]comm.Communicator{pairGroup{waits: &waits}}, len(flat.Buckets))
	for i := range 3 {
		if err := x.gather(flat.Layer(0)); err != nil || waits != i {
			t.Errorf("gather %d: %d have ended, %v", i, waits, err)
		}
	}
}
