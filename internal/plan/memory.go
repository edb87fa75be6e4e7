package plan

import (
	"context"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/backend"
	"github.com/cprun/cprun/internal/config"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/tensor"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

// Memory is bytes on the rank that needs most. The items up to Batches are what a run takes of
// the device by itself, before its first step; on a GPU in one piece.
type Memory struct {
	Weights     int64 `json:"weights"`         // float32, what the optimizer steps
	Compute     int64 `json:"compute_weights"` // the copies that the model reads; 0 where those are the weights
	Gradients   int64 `json:"gradients"`       // float32, with what is on its way to other ranks
	Optimizer   int64 `json:"optimizer"`
	Activations int64 `json:"activations"`
	RingBuffers int64 `json:"ring_buffers"`
	Batches     int64 `json:"batches"`   // tokens, targets and the tables of rotary embeddings
	Workspace   int64 `json:"workspace"` // of the kernels and the libraries
	fused       int64 // the part of it that is fused attention's
	Context     int64 `json:"context"` // of a GPU: what the driver, cuDNN, cuBLAS and NCCL keep, estimated
	Total       int64 `json:"total"`
	Device      int64 `json:"device"` // bytes of one device, of a CPU those that all ranks share; 0: not said
	Fits        bool  `json:"fits"`   // or not known
	fits        string
}

// Planned is what a run takes of the device by itself.
func (m *Memory) Planned() int64 {
	return m.Weights + m.Compute + m.Gradients + m.Optimizer + m.Activations + m.RingBuffers + m.Batches + m.Workspace
}

// Verdict is a sentence on whether it fits the device; "" where that is not known.
func (m *Memory) Verdict() string { return m.fits }

// Fused is the bytes of Workspace that are fused attention's.
func (m *Memory) Fused() int64 { return m.fused }

// What a process has of a GPU beside what it asked for: memory_bytes of metrics.jsonl, less
// Planned. Together they are what was measured on four H200 with CUDA 13.0, cuDNN 9.19 and NCCL
// 2.28, of a 3 B model; how it divides is estimated.
const (
	// contextBytes is the context with its stacks, the code of the kernels, of cuBLASLt, cuDNN and
	// NCCL, and their handles.
	contextBytes = 1200 << 20
	// groupBytes is what NCCL keeps for a group of several ranks: its channels' buffers for each
	// peer and protocol, and the mapping of the peers' memory.
	groupBytes = 460 << 20
)

// contextOf is that of a run on so many ranks, of which context share a sequence.
func contextOf(ranks, context int) int64 {
	n := int64(contextBytes)
	for _, size := range []int{ranks, context} {
		if size > 1 {
			n += groupBytes
		}
	}
	return n
}

// packedSlack is the share by which the tokens of a rank may exceed those of a sample that is
// one document, where samples are cut document by document.
const packedSlack = 0.02

// MemoryOf is the memory of a run of a resolved config on a machine.
func MemoryOf(cfg *config.Config, ranks int, machine backend.Machine) (Memory, error) {
	shape, err := Shape(cfg)
	if err != nil {
		return Memory{}, err
	}
	schedules, err := ring.All(cfg.Parallel.Algorithm, shape)
	if err != nil {
		return Memory{}, err
	}
	return memoryOf(cfg, ranks, machine, shape, schedules)
}

func memoryOf(cfg *config.Config, ranks int, machine backend.Machine, shape partition.Shape, schedules []*ring.Schedule) (Memory, error) {
	m := Memory{Device: machine.Memory}
	dtype, batch, most := backend.DType(cfg), cfg.Train.MicroBatchSize, 0
	if cfg.Data.PackDocuments { // packed samples go one by one
		batch = 1
	}
	for _, s := range schedules {
		tokens := localTokens(cfg, machine, shape, s.Rank)
		most = max(most, tokens)
		bytes, err := workspace(cfg, s, batch, tokens, dtype)
		if err != nil {
			return m, err
		}
		m.RingBuffers = max(m.RingBuffers, bytes)
	}
	opt := model.Options{Recompute: model.Recompute(cfg.Memory.Recompute), LossChunk: cfg.Memory.LossChunk}
	acts := model.Plan(&cfg.Model.Config, opt, batch, most, dtype)
	m.Activations = max(acts.Activations, acts.Validation)
	m.Batches = batches(cfg, batch*most)
	m.state(cfg, ranks, dtype)
	if machine.Arch != 0 {
		m.Context = contextOf(ranks, cfg.Parallel.Context)
		m.fused = fusedBytes(cfg, machine, schedules, batch, most)
		m.Workspace = libraryBytes + m.fused
	}
	m.Total = m.Planned() + m.Context
	m.fits, m.Fits = machine.Fits(m.Total, ranks, Bytes)
	return m, nil
}

// localTokens is the tokens of a sample on a rank.
func localTokens(cfg *config.Config, machine backend.Machine, shape partition.Shape, rank int) int {
	n := partition.Count(shape.Layout.Spans(shape.SeqQ, shape.Size, rank))
	if cfg.Data.PackDocuments && machine.Arch != 0 {
		n = min(n+int(float64(n)*packedSlack)+64, shape.SeqQ)
	}
	return n
}

// state is the weights, the gradients and the optimizer: what package train keeps of them.
func (m *Memory) state(cfg *config.Config, ranks int, dtype tensor.DType) {
	flat := model.NewLayout(&cfg.Model.Config, ranks)
	all := flat.Size()
	held, shard := all, cfg.Memory.Shard
	sharded := ranks > 1 && (shard == "optimizer" || shard == "gradients")
	if sharded {
		held /= int64(ranks)
	}
	m.Weights, m.Gradients, m.Optimizer = 4*all, 4*all, 8*held
	if dtype != tensor.F32 {
		m.Weights, m.Compute = 4*held, int64(dtype.Size())*all
		if sharded {
			m.Compute += 4 * flat.Buckets[flat.Vectors()].Size()
		}
	}
	if sharded && shard == "gradients" {
		m.Gradients = 4 * held
		for _, n := range Staging(flat) {
			m.Gradients += 4 * n
		}
	}
}

// Stages is the number of memories in which gradients wait for their reduction.
const Stages = 4

// StageOf is the one that a bucket's gradients are staged in: layers take turns with two, so
// that one is reduced while the next is computed; the embedding and the head, of which the one
// comes last and the other first, share a third; the vectors are in use all along.
func StageOf(flat *model.FlatLayout, bucket int) int {
	switch bucket {
	case model.Embedding, flat.Head():
		return 2
	case flat.Vectors():
		return 3
	}
	return bucket % 2
}

// Staging is the elements of each.
func Staging(flat *model.FlatLayout) (n [Stages]int64) {
	for b, bucket := range flat.Buckets {
		n[StageOf(flat, b)] = max(n[StageOf(flat, b)], bucket.Size())
	}
	return n
}

// batches is the memory of two batches of tokens and the tables of one, or, with packed
// documents, of both.
func batches(cfg *config.Config, tokens int) int64 {
	table := int64(tokens) * int64(cfg.Model.HeadDim) * 4 // cos and sin of half a head each
	lists := 2 * int64(tokens) * 2 * 4
	if cfg.Data.PackDocuments {
		return lists + 2*table
	}
	return lists + table
}

// workspace is what a ring takes of its arena for one layer, forward and backward.
func workspace(cfg *config.Config, s *ring.Schedule, batch, tokens int, dtype tensor.DType) (int64, error) {
	return Attend(cfg, s, batch, tokens, dtype, attention.Idle{})
}

// Attend runs the loops of a layer's attention, forward and backward, as a run does: on a kernel, over
// views without memory. It returns what they take of the ring's arena at most.
func Attend(cfg *config.Config, s *ring.Schedule, batch, tokens int, dtype tensor.DType, kernel attention.Kernel) (int64, error) {
	meter, data := tensor.NewMeter(), tensor.NewMeter()
	r := ring.Ring{Kernel: kernel, Comm: noTransfer{}, Stream: noStream{}, Arena: meter}
	m := &cfg.Model.Config
	// A schedule speaks of as many rows as the rank holds, which may be fewer than tokens.
	tokens = max(tokens, s.KVRows[0])
	q := data.Alloc(dtype, batch, tokens, m.NumAttentionHeads, m.HeadDim)
	k := data.Alloc(dtype, batch, tokens, m.NumKeyValueHeads, m.HeadDim)
	out := attention.Partial{O: q, LSE: data.Alloc(tensor.F32, batch, tokens, m.NumAttentionHeads, 1)}
	dq := data.Alloc(tensor.F32, batch, tokens, m.NumAttentionHeads, m.HeadDim)
	dk := data.Alloc(tensor.F32, batch, tokens, m.NumKeyValueHeads, m.HeadDim)
	p := attention.Softmax{Scale: m.SoftmaxScale()}
	if err := r.Forward(out, q, k, k, s, p); err != nil {
		return 0, err
	}
	err := r.Backward(attention.Grads{DQ: dq, DK: dk, DV: dk}, q, q, k, k, out, s, p)
	return meter.Peak(), err
}

// noStream and noTransfer do nothing.
type (
	noStream   struct{}
	noTransfer struct{}
)

func (noStream) Record() tensor.Event       { return nil }
func (noStream) Wait(tensor.Event)          {}
func (noStream) Label(string)               {}
func (noStream) Sync(context.Context) error { return nil }

func (noTransfer) Exchange(_, _ []comm.Message) (comm.Pending, error) { return noTransfer{}, nil }
func (noTransfer) Wait()                                              {}
func (noTransfer) Sync(context.Context) error                         { return nil }

// libraryBytes is the workspace of matrix products and of the other operations:
// kernels.LinearWorkspace and kernels.OpsWorkspace.
const libraryBytes = 96 << 20

// fusedBytes is what fused attention works in: 0 for other backends.
func fusedBytes(cfg *config.Config, machine backend.Machine, schedules []*ring.Schedule, batch, tokens int) int64 {
	if cfg.Attention.Backend != attention.Fused.String() {
		return 0
	}
	m, calls, keys := &cfg.Model.Config, 1, tokens
	for _, s := range schedules {
		n := 0
		for _, h := range s.Forward {
			keys = max(keys, h.Keys.Hi-h.Keys.Lo)
			if len(h.Tiles) > 0 {
				n++
			}
		}
		calls = max(calls, n)
	}
	return kernels.FusedWorkspace(kernels.FusedShape{
		Batch: batch, SeqQ: tokens, SeqK: keys, Heads: m.NumAttentionHeads, KVHeads: m.NumKeyValueHeads,
		Dim: m.HeadDim, DimV: m.HeadDim, Calls: calls, Training: true, Packed: cfg.Data.PackDocuments && kernels.FusedPacks(machine.Arch, machine.CUDNN),
		Deterministic: cfg.Train.Deterministic && machine.Arch == 90 && machine.CUDNN < attention.V(9, 25, 0),
	})
}
