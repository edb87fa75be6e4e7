package train

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/internal/model/state"
	"github.com/cprun/cprun/tensor"
)

// The shared memory of every model passes the check before a run. An assignment with a wrong slot does not.
func TestUsesAreChecked(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for layers := 1; layers <= 6; layers++ {
		for _, tied := range []bool{false, true} {
			cfg := &hf.Config{
				Architecture: hf.Qwen3, VocabSize: 11, HiddenSize: 8, IntermediateSize: 12, NumHiddenLayers: layers,
				NumAttentionHeads: 2, NumKeyValueHeads: 1, HeadDim: 4, RMSNormEps: 1e-6, TieWordEmbeddings: tied,
			}
			flat := model.NewLayout(cfg, 2)
			slots := state.LeastSlots + layers%2
			slot := func(b int) int { return state.StageOf(flat, b, slots) }
			for _, r := range []model.Recompute{model.RecomputeNone, model.RecomputeFull} {
				if err := checkUses(slot, flat, cfg, model.Options{Recompute: r}); err != nil {
					t.Errorf("%d layers, tied %t, %s: %v", layers, tied, r, err)
				}
			}
			for range 20 {
				opt := model.Options{Layers: make([]model.Retain, layers)}
				for i := range opt.Layers {
					opt.Layers[i] = model.Retain{Save: model.Save(rng.IntN(4)), Host: rng.IntN(2) == 0}
				}
				opt.Layers[0].Save = model.Save(rng.IntN(3)) // not SaveNothing
				if err := checkUses(slot, flat, cfg, opt); err != nil {
					t.Errorf("tied %t, layers keep %v: %v", tied, opt.Layers, err)
				}
			}
			wrong := func(b int) int { // the last layer replaces the vectors
				if b == flat.Layer(layers-1) {
					return slot(flat.Vectors())
				}
				return slot(b)
			}
			err := checkUses(wrong, flat, cfg, model.Options{})
			if err == nil || !strings.Contains(err.Error(), "replaced") {
				t.Errorf("%d layers, tied %t: a layer in the memory of the vectors: %v", layers, tied, err)
			}
		}
	}
}

// A trainer refuses a plan by which a gather replaces weights in use.
func TestTrainersCheckUses(t *testing.T) {
	cfg := delayConfig(t, 1)
	mem := MemoryOf(t, cfg, 1)
	onRanks(t, 1, cfg, mem.Room(), func(*device.Device) {}, func(tr *Trainer, _ *counted) error {
		tr.share.resident.Slot = func(int) int { return 0 }
		if err := tr.build(&Options{Room: mem.Room()}); err == nil || !strings.Contains(err.Error(), "replaced") {
			t.Errorf("all buckets in one memory: %v", err)
		}
		return nil
	})
}

// spoil queues NaN for a view.
func spoil(s tensor.Stream, v View) {
	s.(*tensor.HostStream).Do("spoil", func() error {
		b := tensor.Bytes(v)
		for i := range b {
			b[i] = 0xff
		}
		return nil
	})
}

// A delayed group holds each transfer until the compute stream reaches its Wait, or the Wait of a later transfer, or
// until all work is queued. It spoils the destination when the transfer may begin.
type delayed struct {
	comm.Communicator
	compute tensor.Stream
	kinds   string          // the calls to hold
	queued  <-chan struct{} // closed when all work is queued
	gates   []chan struct{}
	open    int // used on the compute stream
}

type delayedCall struct {
	comm.Pending
	group *delayed
	until int // number of gates up to its own
}

func (c delayedCall) Wait() {
	gates := c.group.gates[:c.until]
	c.group.compute.(*tensor.HostStream).Do("open", func() error {
		for ; c.group.open < len(gates); c.group.open++ {
			close(gates[c.group.open])
		}
		return nil
	})
	c.Pending.Wait()
}

func (d *delayed) hold(kind string, dst, src View, call func() (comm.Pending, error)) (comm.Pending, error) {
	if dst.Memory() != src.Memory() {
		spoil(d.compute, dst)
	}
	if strings.Contains(d.kinds, kind) {
		gate := make(chan struct{})
		d.gates = append(d.gates, gate)
		d.Communicator.(*comm.Group).Stream().Do("delay", func() error {
			select {
			case <-gate:
			case <-d.queued:
			}
			return nil
		})
	}
	p, err := call()
	return delayedCall{p, d, len(d.gates)}, err
}

func (d *delayed) AllReduce(v View, op comm.Op) (comm.Pending, error) {
	return d.hold("reduce", v, v, func() (comm.Pending, error) { return d.Communicator.AllReduce(v, op) })
}

func (d *delayed) ReduceScatter(dst, src View, op comm.Op) (comm.Pending, error) {
	return d.hold("reduce", dst, src, func() (comm.Pending, error) { return d.Communicator.ReduceScatter(dst, src, op) })
}

func (d *delayed) AllGather(dst, src View) (comm.Pending, error) {
	return d.hold("gather", dst, src, func() (comm.Pending, error) { return d.Communicator.AllGather(dst, src) })
}

// delay wraps the groups of a trainer.
func (t *Trainer) delay(kinds string, queued <-chan struct{}) {
	wrap := func(g comm.Communicator) comm.Communicator {
		return &delayed{Communicator: g, compute: t.dev.Stream, kinds: kinds, queued: queued}
	}
	x, reductions := t.share, wrap(t.mesh.state)
	gathers := reductions
	if t.mesh.weights != t.mesh.state {
		gathers = wrap(t.mesh.weights)
	}
	x.world = reductions
	x.groups = slices.Repeat([]comm.Communicator{reductions}, len(x.Flat.Buckets))
	x.weights = slices.Repeat([]comm.Communicator{gathers}, len(x.Flat.Buckets))
	x.weights[x.Flat.Vectors()] = reductions
	if x.across != nil {
		x.across = wrap(x.across)
	}
}

// reuse spoils the memory of every bucket that is neither in use nor next, so that each use gathers again, and that of
// fresh gradients.
func (t *Trainer) reuse() {
	x, shape := t.share, &t.cfg.Model.Config
	params, hooks := x.Params(), x.hooks()
	hooks.Use = func(bucket, next int) error {
		if err := x.use(bucket, next); err != nil || !x.Gathers() {
			return err
		}
		used := map[int]bool{x.Slot(x.Flat.Vectors()): true}
		for _, b := range []int{bucket, next} {
			for b != model.NoBucket && !used[x.Slot(b)] {
				for _, w := range x.Flat.With(b) {
					used[x.Slot(w)] = true
				}
			}
		}
		for b, v := range params.BucketCompute {
			slot := x.Slot(b)
			if used[slot] {
				continue
			}
			x.gathers[slot].arrive()
			delete(x.resident.Holds, slot)
			spoil(t.dev.Stream, v)
			if params.Frozen != nil {
				spoil(t.dev.Stream, params.Frozen.BucketCompute[b])
			}
		}
		return nil
	}
	hooks.Begin = func(bucket int) bool {
		fresh := x.begin(bucket)
		if fresh {
			spoil(t.dev.Stream, x.into(bucket))
		}
		return fresh
	}
	t.model = model.New(shape, t.dev.Ops, t.att, params, model.Options{
		Recompute: model.Recompute(t.cfg.Memory.Recompute), LossChunk: t.cfg.Memory.LossChunk, Hooks: hooks})
}

// trained runs some queued steps on each rank, and returns the bits of the losses and of all state.
func trained(t *testing.T, ranks, copies int, cfg *config.Config, change func(tr *Trainer, queued <-chan struct{})) []string {
	t.Helper()
	return trainedIn(t, ranks, copies, state.LeastSlots, cfg, change)
}

// trainedIn runs what trained does, with slots for the weights of layers.
func trainedIn(t *testing.T, ranks, copies, slots int, cfg *config.Config,
	change func(tr *Trainer, queued <-chan struct{})) []string {
	t.Helper()
	out, room := make([]string, ranks), MemoryOf(t, cfg, ranks).Room()
	room.Copies, room.Slots = copies, slots
	ahead := func(d *device.Device) { d.RunAhead = cfg.Train.Steps }
	onRanks(t, ranks, cfg, room, ahead, func(tr *Trainer, _ *counted) error {
		queued, ctx := make(chan struct{}), context.Background()
		change(tr, queued)
		var steps []*inflight
		for range cfg.Train.Steps {
			f, err := tr.begin(ctx, false, false)
			if err != nil {
				return err
			}
			steps = append(steps, f)
		}
		close(queued)
		text := ""
		for _, f := range steps {
			r, err := tr.finish(ctx, f)
			if err != nil {
				return err
			}
			text += fmt.Sprintf("loss %x norm %x\n", r.Loss, r.GradNorm)
		}
		snap, err := tr.snapshot(ctx, &Options{}, true)
		for _, f := range snap.Fields {
			sum := sha256.New()
			if err := binary.Write(sum, binary.LittleEndian, f.Data); err != nil {
				return err
			}
			text += fmt.Sprintf("%s %x\n", f.Name, sum.Sum(nil))
			if slices.ContainsFunc(f.Data, func(x float32) bool { return x != x }) {
				text += "NaN\n"
			}
		}
		if strings.Contains(text, "NaN") {
			return fmt.Errorf("training with NaN: %.200s", text)
		}
		out[tr.mesh.world.Rank()] = text
		return err
	})
	return out
}

func delayConfig(t *testing.T, ranks int, set ...string) *config.Config {
	t.Helper()
	cfg, _ := example(t, ranks, "cpu", append([]string{"model.hidden_size=56", "model.intermediate_size=136",
		"data.seq_len=91", "train.steps=2", "lr_schedule.warmup_steps=1", "train.micro_batch_size=1",
		"train.global_batch_size=2"}, set...)...)
	return cfg
}

// Late transfers and memory that is reused early change no bit: each reader waits for its data, and each writer for the
// last reader.
func TestDelaysLeaveNoTrace(t *testing.T) {
	t.Parallel()
	for i, shard := range []string{"none", "optimizer", "gradients", "parameters"} {
		for j, set := range [][]string{
			{"model.num_hidden_layers=4", "model.tie_word_embeddings=false", "precision.compute=bf16"},
			{"model.num_hidden_layers=3"},
			{"model.num_hidden_layers=1", "model.tie_word_embeddings=false"},
			{"model.num_hidden_layers=3", "model.tie_word_embeddings=false", "precision.compute=bf16",
				"lora={r: 4, modules_to_save: [embed_tokens, lm_head]}"},
			append(slices.Clone(sixteens), "model.num_hidden_layers=3", "precision.compute=bf16"),
			append(slices.Clone(sixteens), "model.num_hidden_layers=3", "lora={r: 4}"),
		} {
			if (testing.Short() || j >= 3) && shard != "parameters" && i != j {
				continue
			}
			cfg := delayConfig(t, 2, append(set, "memory.shard="+shard)...)
			want := trained(t, 2, 1, cfg, func(*Trainer, <-chan struct{}) {})
			for _, kinds := range []string{"gather", "reduce", "gather and reduce"} {
				got := trained(t, 2, 1, cfg, func(tr *Trainer, queued <-chan struct{}) { tr.delay(kinds, queued) })
				if !slices.Equal(got, want) {
					t.Errorf("%v, shard %s: delays of %s change the result", set, shard, kinds)
				}
			}
			if shard != "parameters" {
				continue
			}
			got := trained(t, 2, 1, cfg, func(tr *Trainer, queued <-chan struct{}) {
				tr.delay("gather", queued)
				tr.reuse()
			})
			if !slices.Equal(got, want) {
				t.Errorf("%v: early reuse of memory changes the result", set)
			}
			got = trainedIn(t, 2, 1, 3, cfg, func(tr *Trainer, queued <-chan struct{}) { tr.delay("gather", queued) })
			if !slices.Equal(got, want) {
				t.Errorf("%v: late gathers two layers ahead change the result", set)
			}
		}
	}
}

// lossOf returns the loss of a line of trained.
func lossOf(t *testing.T, line string) float64 {
	t.Helper()
	loss, err := strconv.ParseFloat(strings.Fields(line)[1], 64)
	if err != nil {
		t.Fatal(err)
	}
	return loss
}

// Weights in copies, each on some neighbours of four ranks, have the bits of whole weights, also if transfers are late.
// Copies change only the order of sums.
func TestCopiesLeaveNoTrace(t *testing.T) {
	t.Parallel()
	none := func(*Trainer, <-chan struct{}) {}
	for _, compute := range []string{"fp32", "bf16", "fp32 adapters", "bf16 scaled", "fp32 scaled adapters"} {
		for _, copies := range []int{2, 4} {
			if (testing.Short() || strings.Contains(compute, " ")) && strings.HasPrefix(compute, "bf16") != (copies == 4) {
				continue
			}
			kind, adapters, _ := strings.Cut(compute, " ")
			set := []string{"model.num_hidden_layers=3", "precision.compute=" + kind}
			if strings.Contains(compute, "scaled") {
				set = append(set, sixteens...)
			}
			if strings.Contains(adapters, "adapters") {
				set = append(set, "lora={r: 4}", "optimizer.lr=0.1")
			}
			whole := delayConfig(t, 4, append(set, "memory.shard=gradients")...)
			parts := delayConfig(t, 4, append(set, "memory.shard=parameters")...)
			want := trained(t, 4, copies, whole, none)
			if got := trained(t, 4, copies, parts, none); !slices.Equal(got, want) {
				t.Errorf("%s: %d copies of the weights change the result", compute, copies)
			}
			got := trained(t, 4, copies, parts, func(tr *Trainer, queued <-chan struct{}) {
				tr.delay("gather and reduce", queued)
			})
			if !slices.Equal(got, want) {
				t.Errorf("%s: delays with %d copies of the weights change the result", compute, copies)
			}
			onHost := delayConfig(t, 4, append(set, "memory.shard=parameters", "memory.offload=optimizer")...)
			got = trained(t, 4, copies, onHost, func(tr *Trainer, _ <-chan struct{}) {
				u := tr.share.updater
				u.optim = slowOptim{u.optim, u.work, "update"}
			})
			if !slices.Equal(got, want) {
				t.Errorf("%s: a late optimizer on the host, with %d copies, changes the result", compute, copies)
			}
			for i, text := range strings.Split(trained(t, 4, 1, parts, none)[0], "\n")[:parts.Train.Steps] {
				loss, other := lossOf(t, strings.Split(want[0], "\n")[i]), lossOf(t, text)
				if !(math.Abs(loss-other) <= 1e-3) {
					t.Errorf("%s: a loss of %v with %d copies, %v with one", compute, loss, copies, other)
				}
			}
		}
	}
}

func TestRanksThatDoNotDivideAreRefused(t *testing.T) {
	world := comm.NewLocal(3, make([]tensor.Stream, 3), comm.Options{})
	for _, g := range world {
		defer g.Close()
	}
	for _, c := range []struct {
		context, copies int
		want            string
	}{{2, 1, "3 ranks do not divide into groups of 2"}, {1, 2, "3 ranks do not divide into 2 copies"}} {
		if _, err := newMesh(t.Context(), world[0], c.context, c.copies); err == nil ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("context %d, %d copies: %v, want %q", c.context, c.copies, err, c.want)
		}
	}
}
