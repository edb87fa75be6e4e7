package plan

import (
	"fmt"
	"slices"

	"github.com/cprun/cprun/attention/backends"
	"github.com/cprun/cprun/internal/backend"
	"github.com/cprun/cprun/internal/config"
	"github.com/cprun/cprun/internal/machine"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/planner"
	"github.com/cprun/cprun/internal/state"
	"github.com/cprun/cprun/kernels/cpu"
	"github.com/cprun/cprun/kernels/gpu"
	"github.com/cprun/cprun/tensor"
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
	Context     int64 `json:"context"` // of a GPU: what the driver, cuDNN, cuBLAS and NCCL keep; of a CPU: the process itself; estimated
	Total       int64 `json:"total"`
	Device      int64 `json:"device"`  // bytes of one device, of a CPU those that all ranks share; 0: not said
	Reserve     int64 `json:"reserve"` // the part of Device that stays free
	Fits        bool  `json:"fits"`    // or not known
	fits        string
	advice      string // of a run that does not fit
	tokens      int    // of one batch, on the rank with most
	validation  int64  // activations of a forward pass alone
}

// Planned returns what a run takes of the device by itself.
func (m *Memory) Planned() int64 {
	return m.Weights + m.Compute + m.Gradients + m.Optimizer + m.Activations + m.RingBuffers + m.Batches + m.Workspace
}

// item is a part of a sum of bytes.
type item struct {
	name  string
	bytes int64
}

// items returns the parts of Total, without those that only some machines have and that are 0.
func (m *Memory) items() []item {
	list := []item{
		{"weights", m.Weights}, {"compute copy", m.Compute}, {"gradients", m.Gradients}, {"optimizer", m.Optimizer},
		{"activations", m.Activations}, {"ring buffers", m.RingBuffers}, {"batches", m.Batches}, {"workspace", m.Workspace}, {"context", m.Context},
	}
	return slices.DeleteFunc(list, func(i item) bool {
		return i.bytes == 0 && slices.Contains([]string{"compute copy", "workspace", "context"}, i.name)
	})
}

// Room returns the part of it that a run grows when it must.
func (m *Memory) Room() state.Room {
	return state.Room{Activations: m.Activations, RingBuffers: m.RingBuffers, Tokens: m.tokens}
}

// Verdict returns a sentence on whether it fits the device; "" where that is not known.
func (m *Memory) Verdict() string { return m.fits + m.advice }

// Fused returns the bytes of Workspace that are fused attention's.
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

// processBytes is what a process on a CPU has of memory beside what it asked for and what it lets lie: the program and Go's own. It was
// measured with 1 to 4 ranks, from 0.4 M to 5 M parameters.
const processBytes = 22 << 20

// meshBytes is what its connections with other ranks take, and sharedBytes the memory that it shares with each of its node,
// of those that it is connected with from the start at most.
const (
	meshBytes   = 1 << 20
	sharedBytes = 512 << 10
	meshRanks   = 16
)

// stagedBytes is what state goes through on its way: two pieces of host memory, of up to 1 MiB each (train.newStage).
func stagedBytes(cfg *config.Config, ranks int) int64 {
	const piece = 256 << 10 // elements
	return 2 * 4 * min(model.NewLayout(&cfg.Model.Config, ranks).Size(), piece)
}

// packedSlack is the share by which the tokens of a rank may exceed those of a sample that is
// one document, where samples are cut document by document.
const packedSlack = 0.02

// MemoryOf returns the memory of a run of a resolved config on a machine.
func MemoryOf(cfg *config.Config, ranks int, machine machine.Machine) (Memory, error) {
	return MemoryOfKinds(cfg, ranks, machine, nil)
}

// MemoryOfKinds returns what MemoryOf does, of a run in which layers of some windows have ways of their own.
func MemoryOfKinds(cfg *config.Config, ranks int, machine machine.Machine, kinds map[int]planner.Way) (Memory, error) {
	d, err := demandOf(cfg, machine, kinds, nil)
	if err != nil {
		return Memory{}, err
	}
	m, err := memoryOf(cfg, ranks, machine, d)
	return m.advised(memoryOf, cfg, ranks, machine, d), err
}

func memoryOf(cfg *config.Config, ranks int, machine machine.Machine, d *demand) (Memory, error) {
	m := Memory{Device: machine.Memory, RingBuffers: d.buffers}
	dtype, batch := backend.DType(cfg), sequences(cfg)
	opt := model.Options{Recompute: model.Recompute(cfg.Memory.Recompute), LossChunk: cfg.Memory.LossChunk}
	acts := model.Plan(&cfg.Model.Config, opt, batch, d.tokens, dtype)
	m.Activations, m.validation = max(acts.Activations, acts.Validation), acts.Validation
	m.tokens = batch * d.tokens
	if err := m.state(cfg, ranks, m.tokens, dtype); err != nil {
		return m, err
	}
	if machine.Arch != 0 {
		m.Context = contextOf(ranks, cfg.Parallel.Context)
		m.fused = fusedBytes(cfg, machine, d, batch)
		m.Workspace = gpu.LinearWorkspace + gpu.OpsWorkspace + m.fused
	} else {
		m.Context = processBytes + stagedBytes(cfg, ranks)
		if ranks > 1 {
			m.Context += meshBytes + sharedBytes*int64(min(ranks, meshRanks)-1) // as if all were of one node
		}
		if dtype.Size() == 2 {
			m.Context += cpu.HalfWorkspace(cfg.Model.VocabSize)
		}
		_, garbage := state.Garbage(m.Planned()) // a run of some tens of steps has as much
		m.Context += garbage
	}
	m.total(cfg, machine, ranks)
	return m, nil
}

// total adds up the items, and compares the sum with the machine.
func (m *Memory) total(cfg *config.Config, machine machine.Machine, ranks int) {
	m.Total, m.Fits, m.Reserve = m.Planned()+m.Context, true, cfg.Memory.Reserve.Of(m.Device)
	if m.Device == 0 {
		return
	}
	kept := ""
	if m.Reserve > 0 {
		kept = fmt.Sprintf(" with %s kept free (memory.reserve)", Bytes(m.Reserve))
	}
	excess := m.excess(machine, ranks)
	m.Fits = excess <= 0
	switch on := map[bool]string{true: "of the machine", false: "of one device"}[machine.Arch == 0]; {
	case m.Fits:
		m.fits = fmt.Sprintf("fits the %s %s%s", Bytes(m.Device), on, kept)
	case machine.Arch == 0:
		m.fits = fmt.Sprintf("does NOT fit the %s %s%s: it takes %s a rank, with %d in all", Bytes(m.Device), on, kept, Bytes(m.Total), machine.PerHost(ranks))
	default:
		m.fits = fmt.Sprintf("does NOT fit the %s %s%s: %s too much", Bytes(m.Device), on, kept, Bytes(excess))
	}
}

// excess returns how many bytes a rank takes too much of the device, which ranks on a CPU share.
func (m *Memory) excess(machine machine.Machine, ranks int) int64 {
	room := m.Device - m.Reserve
	if machine.Arch == 0 {
		room /= int64(machine.PerHost(ranks))
	}
	return m.Total - room
}

// EvalMemoryOf returns the memory of an evaluation, which has no gradients and no moments.
func EvalMemoryOf(cfg *config.Config, ranks int, machine machine.Machine) (Memory, error) {
	d, err := demandOf(cfg, machine, nil, nil)
	if err != nil {
		return Memory{}, err
	}
	m, err := evalMemory(cfg, ranks, machine, d)
	return m.advised(evalMemory, cfg, ranks, machine, d), err
}

func evalMemory(cfg *config.Config, ranks int, machine machine.Machine, d *demand) (Memory, error) {
	m, err := memoryOf(cfg, ranks, machine, d)
	m.Gradients, m.Optimizer, m.Activations = 0, 0, m.validation
	m.total(cfg, machine, ranks)
	return m, err
}

// sequences is how many samples go through the model at once.
func sequences(cfg *config.Config) int {
	if cfg.Data.PackDocuments { // packed samples go one by one
		return 1
	}
	return cfg.Train.MicroBatchSize
}

// state is what a run allocates of weights, gradients, moments and batches.
func (m *Memory) state(cfg *config.Config, ranks, batch int, dtype tensor.DType) error {
	flat, meter := model.NewLayout(&cfg.Model.Config, ranks), state.Meter{}
	_, err := state.New(meter, state.Options{
		Layout: flat, Groups: state.Groups(flat, state.Group{Size: ranks}), Shard: state.ShardingOf(cfg.Memory.Shard), Compute: dtype,
	})
	if err != nil {
		return err
	}
	format := state.Format{Pairs: cfg.Model.HeadDim / 2, Packed: cfg.Data.PackDocuments}
	if _, err := state.NewBatches(meter, format, batch); err != nil {
		return err
	}
	m.Weights, m.Compute, m.Gradients = meter[state.Weights], meter[state.Compute], meter[state.Gradients]
	m.Optimizer, m.Batches = meter[state.Moments], meter[state.Inputs]
	return nil
}

// fusedBytes is what fused attention works in: 0 for other backends.
func fusedBytes(cfg *config.Config, machine machine.Machine, d *demand, batch int) int64 {
	if cfg.Attention.Backend != backends.Fused.String() {
		return 0
	}
	m, most := &cfg.Model.Config, int64(0)
	for h, w := range d.works {
		most = max(most, gpu.FusedWorkspace(gpu.FusedShape{
			Batch: batch, SeqQ: w.queries, SeqK: w.keys, Heads: h.q, KVHeads: h.kv,
			Dim: m.HeadDim, DimV: m.HeadDim, Calls: w.calls, Training: true, Packed: cfg.Data.PackDocuments && backends.Packs(machine.Arch, machine.CUDNN),
			Deterministic: cfg.Train.Deterministic && backends.KeepsMatrix(machine.Arch, machine.CUDNN),
		}))
	}
	return most
}
