package train

import (
	"cmp"
	"context"
	"fmt"
	"hash/maphash"
	"slices"
	"strings"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/base/safetensors"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/internal/model/state"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Probing selects the checks of Verify.
type Probing struct {
	Whole  int  // tokens of a sample; the config's seq_len may be a prefix of it
	Leak   bool // change tokens, and compare logits
	Angles bool // record rotated keys; needs whole sequences on this rank
	// Routes is the directory of another side, whose choices of experts replace those of this one; "": none.
	Routes string
}

// Tolerance returns the largest relative error between right results in the types of a config.
func Tolerance(cfg *config.Config) float64 {
	if cfg.Precision.Compute == "fp32" && cfg.Precision.GradWire != "bf16" {
		return 1e-5
	}
	return 2e-2
}

// Verified is the result of one side of a verification. The files of the ranks, by VerifiedFile, have the rest.
type Verified struct {
	Samples []int64     `json:"samples"` // of the batches of all steps, in the order of the data
	All     int64       `json:"all"`     // samples of an epoch
	Tokens  int         `json:"tokens"`  // of the first batch, without cuts to a prefix
	Steps   []Stepped   `json:"steps"`
	Probes  []Probed    `json:"probes"`
	Noisy   bool        `json:"noisy"` // equal forward passes differ, so nothing was probed
	Kernels []KernelUse `json:"kernels"`
	Routes  *Routed     `json:"routes"` // nil: none were replaced
}

// Probed is the effect of another token at a position of the first sample.
type Probed struct {
	Position int      `json:"position"`
	Shard    int      `json:"shard"`   // the rank whose shard the position was picked from; -1: picked from a document
	Changed  [][2]int `json:"changed"` // ranges of positions with other logits
}

// KernelUse is the attention kernel of layers of one kind.
type KernelUse struct {
	Layers  []int  `json:"layers"`
	Window  int    `json:"window"` // earlier keys that a query sees; -1: all
	Backend string `json:"backend"`
	Kernel  string `json:"kernel"`
}

// Verify runs the first two steps of a config, with the hyperparameters of Hyper. Every rank writes its part of the
// batches, gradients and parameters to its files in o.RunDir. With p.Leak, Verify first changes some tokens of the
// first sample, one at a time, and finds the logits that differ. Every rank gets the result.
func Verify(ctx context.Context, cfg *config.Config, dev Device, world comm.Communicator, o Options,
	p Probing) (v Verified, err error) {
	defer device.Caught(&err)
	o.report(Report{Kind: Phase, Text: "setup"})
	o.Whole, o.NoSave = p.Whole, true
	stepped := *cfg
	stepped.Optimizer = Hyper(cfg)
	stepped.Train.Samples = 0 // two whole steps, also of fewer samples
	routes, err := newReplay(ctx, &dev, cfg, p)
	if err != nil {
		return v, err
	}
	t, err := newTrainer(ctx, &stepped, dev, world, &o)
	if err != nil {
		return v, err
	}
	batch := cfg.Train.GlobalBatchSize
	for i := range batch {
		v.Tokens += total(t.train.loader.Docs(t.train.loader.Index(int64(i))))
	}
	for i := range VerifiedSteps * batch {
		v.Samples = append(v.Samples, t.train.loader.Index(int64(i)))
	}
	if p.Whole > cfg.Data.SeqLen {
		if err := t.shorten(v.Samples); err != nil {
			return v, err
		}
	}
	v.All, t.att.kernels = t.train.loader.Samples(), map[hf.Mixer][]string{}
	var first []safetensors.Entry
	if p.Angles {
		if first, err = t.rotated(ctx, v.Samples[0]); err != nil {
			return v, err
		}
	}
	if p.Leak {
		o.report(Report{Kind: Phase, Text: "leak probes"})
		if err := t.probe(ctx, v.Samples[0], &v); err != nil {
			return v, fmt.Errorf("leak probe: %w", err)
		}
	}
	o.report(Report{Kind: Phase, Text: "steps"})
	if err := t.verifySteps(ctx, o.RunDir, first, routes, &v); err != nil {
		return v, err
	}
	if p.Routes != "" && routes != nil {
		if v.Routes, err = routes.total(ctx, world); err != nil {
			return v, err
		}
	}
	v.Kernels = t.kernels()
	return v, t.clock.Close()
}

// shorten makes listed samples prefixes of those of Options.Whole tokens.
func (t *Trainer) shorten(list []int64) (err error) {
	l := t.train.loader
	p := prefix{samples: l, n: t.cfg.Data.SeqLen, valid: map[int64]int{}}
	for _, s := range list {
		if p.valid[s], err = p.count(s); err != nil {
			return err
		}
	}
	t.train.loader = p
	return nil
}

// A prefix is the first n tokens of some samples.
type prefix struct {
	samples
	n     int
	valid map[int64]int
}

func (p prefix) count(sample int64) (valid int, err error) {
	targets := make([]int32, p.n)
	whole := []partition.Span{{Len: p.n, Stride: 1}}
	if err := p.Load(sample, whole, make([]int32, p.n), targets, make([]int, p.n)); err != nil {
		return 0, err
	}
	for _, target := range targets {
		if target >= 0 {
			valid++
		}
	}
	return valid, nil
}

func (p prefix) Docs(sample int64) (docs []int) {
	left := p.n
	for _, n := range p.samples.Docs(sample) {
		if n = min(n, left); n > 0 {
			docs, left = append(docs, n), left-n
		}
	}
	return docs
}

func (p prefix) Valid(sample int64) int { return p.valid[sample] }
func (p prefix) Alike() bool            { return false }

// A changed is samples with another token at one position.
type changed struct {
	samples
	at, vocab, try int
}

// Load replaces the token by another one of the shard, so by one that the model knows: by the first, second or third.
func (c changed) Load(sample int64, spans []partition.Span, ids, targets []int32, positions []int) error {
	if err := c.samples.Load(sample, spans, ids, targets, positions); err != nil {
		return err
	}
	row := slices.Index(partition.Positions(spans), c.at)
	if row < 0 {
		return nil
	}
	others := []int32{ids[row]}
	for _, id := range ids {
		if len(others) < c.try+2 && !slices.Contains(others, id) {
			others = append(others, id)
		}
	}
	for len(others) < c.try+2 {
		others = append(others, (others[len(others)-1]+1)%int32(c.vocab))
	}
	ids[row] = others[c.try+1]
	return nil
}

// kernels returns the kernels that attention has launched on this rank.
func (t *Trainer) kernels() (uses []KernelUse) {
	m := &t.cfg.Model.Config
	for _, mixer := range m.Mixers() {
		u := KernelUse{Window: mixer.Window, Backend: t.cfg.Parallel.Backend,
			Kernel: strings.Join(t.att.kernels[mixer], ", ")}
		for i, l := range m.Layers() {
			if l.Mixer == mixer {
				u.Layers = append(u.Layers, i)
			}
		}
		uses = append(uses, u)
	}
	return uses
}

// probe fills v.Probes. All groups of ranks compute the same sample.
func (t *Trainer) probe(ctx context.Context, sample int64, v *Verified) error {
	h := &rowHashes{seed: maphash.MakeSeed()}
	before, b, err := t.hashRows(ctx, h, sample)
	if err != nil {
		return err
	}
	again, _, err := t.hashRows(ctx, h, sample)
	if err != nil {
		return err
	}
	if noise, err := t.differing(ctx, b, before, again); err != nil || len(noise) > 0 {
		v.Noisy = true
		return err
	}
	loader := t.train.loader
	defer func() { t.train.loader = loader }()
	for _, p := range t.places(sample, b) {
		for try := 0; try < tries && len(p.Changed) == 0; try++ { // two tokens may have equal embeddings
			t.train.loader = changed{loader, p.Position, t.cfg.Model.VocabSize, try}
			after, _, err := t.hashRows(ctx, h, sample)
			if err != nil {
				return err
			}
			if p.Changed, err = t.differing(ctx, b, before, after); err != nil {
				return err
			}
		}
		v.Probes = append(v.Probes, p)
	}
	return t.share.idle(0)
}

// tries bounds the tokens that a probe puts into one place.
const tries = 3

// places returns the positions to probe: the middle of the second document, or of the only one, and a position of each
// shard.
func (t *Trainer) places(sample int64, b *microBatch) (list []Probed) {
	docs, first := []int{b.tokens}, 0
	if t.train.packed {
		docs = t.train.loader.Docs(sample)
	}
	if len(docs) > 1 {
		first, docs = docs[0], docs[1:]
	}
	list = []Probed{{Position: first + docs[0]/2, Shard: -1}}
	for rank := range t.train.size {
		at := partition.Positions(b.layout.Spans(b.seqLen, t.train.size, rank))
		at = slices.DeleteFunc(at, func(n int) bool { return n >= b.tokens })
		if len(at) > 0 {
			list = append(list, Probed{Position: at[len(at)/2], Shard: rank})
		}
	}
	return list
}

// rowHashes hashes rows of logits with host memory of its own.
type rowHashes struct {
	seed maphash.Seed
	host View
}

// hashRows returns a hash of the logits of each of this rank's rows of a sample.
func (t *Trainer) hashRows(ctx context.Context, h *rowHashes, sample int64) (sums []uint64, _ *microBatch,
	err error) {
	var failed error
	b, err := t.forward(ctx, t.train, all([]int64{sample}), t.sums, func(b *microBatch) {
		sums = make([]uint64, len(b.positions))
		b.Rows = func(lo int, logits View) {
			rows, err := h.read(ctx, t.dev, logits)
			failed = cmp.Or(failed, err)
			for i := range rows {
				sums[lo+i] = maphash.Bytes(h.seed, rows[i])
			}
		}
	})
	if err != nil {
		return nil, nil, err
	}
	return sums, b, cmp.Or(failed, t.dev.Stream.Sync(ctx))
}

// read waits for logits, and returns the bytes of each row.
func (h *rowHashes) read(ctx context.Context, dev *Device, logits View) (rows [][]byte, err error) {
	if h.host.IsZero() || h.host.Size() < logits.Size() || h.host.DType() != logits.DType() {
		if !h.host.IsZero() {
			dev.FreeHostVector(h.host)
		}
		if h.host, err = dev.HostVector("logits", logits.DType(), logits.Size()); err != nil {
			return nil, err
		}
	}
	to := state.Part(h.host, 0, logits.Size())
	dev.Store.Download(to, logits.Reshape([4]int{1, 1, 1, logits.Size()}))
	if err := dev.Stream.Sync(ctx); err != nil {
		return nil, err
	}
	all := tensor.Bytes(to)
	return slices.Collect(slices.Chunk(all, len(all)/logits.Rows())), nil
}

// differing returns the ranges of positions whose hashes differ on their rank.
func (t *Trainer) differing(ctx context.Context, of *microBatch, a, b []uint64) (ranges [][2]int, err error) {
	v := tensor.New(tensor.I64, of.seqLen)
	flags := tensor.Data[int64](v)
	for row, at := range partition.Positions(of.layout.Spans(of.seqLen, t.train.size, t.train.rank)) {
		if a[row] != b[row] {
			flags[at] = 1
		}
	}
	err = comm.Finish(ctx)(t.mesh.world.AllReduce(v, comm.Sum))
	for at, n := range flags {
		if last := len(ranges) - 1; n > 0 && last >= 0 && ranges[last][1] == at {
			ranges[last][1]++
		} else if n > 0 {
			ranges = append(ranges, [2]int{at, at + 1})
		}
	}
	return ranges, err
}
