package plan

import (
	"fmt"
	"slices"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/model/state"
	"github.com/cprun/cprun/kernels/cpu"
	"github.com/cprun/cprun/kernels/gpu"
	"github.com/cprun/cprun/tensor"
)

// Memory holds the bytes of the rank that needs most. A run allocates the items up to Batches itself,
// before its first step; on a GPU as one block. Context estimates the rest: on a GPU the driver, cuDNN,
// cuBLAS and NCCL; on a CPU the process itself.
type Memory struct {
	Weights     int64 `json:"weights"`         // float32, updated by the optimizer
	Compute     int64 `json:"compute_weights"` // copies in the compute type, read by the model; 0: it reads Weights
	Frozen      int64 `json:"frozen_weights"`  // in the compute type, with the memory to gather them
	Gradients   int64 `json:"gradients"`       // including those in transfer to other ranks
	Optimizer   int64 `json:"optimizer"`
	Activations int64 `json:"activations"`
	RingBuffers int64 `json:"ring_buffers"`
	Batches     int64 `json:"batches"`   // tokens, targets and the tables of rotary embeddings
	Workspace   int64 `json:"workspace"` // of the kernels and the libraries
	fused       int64 // the part of Workspace used by fused attention
	Context     int64 `json:"context"` // estimate
	Total       int64 `json:"total"`
	Device      int64 `json:"device"`  // bytes of one device, or of the host memory that CPU ranks share; 0: unknown
	Reserve     int64 `json:"reserve"` // the part of Device that stays free

	Copies          int    `json:"weight_copies"`    // of sharded parameters: one for each host, or 1
	Layers          Layers `json:"layers"`           // zero: all activations stay on the device
	HostActivations int64  `json:"host_activations"` // offloaded by this rank
	HostOptimizer   int64  `json:"host_optimizer"`   // masters and moments, likewise
	HostTotal       int64  `json:"host_total"`
	HostDevice      int64  `json:"host_device"` // memory that the ranks of a host share; 0: unknown, or a CPU with Device
	HostReserve     int64  `json:"host_reserve"`

	Fits       bool `json:"fits"` // both memories, or not known
	fits       string
	recompute  string // of Layers
	advice     string // of a run that does not fit
	tokens     int    // of one batch, on the rank with most
	validation int64  // activations of a forward pass alone
}

// Planned returns the bytes that a run allocates on the device itself.
func (m *Memory) Planned() int64 {
	return m.Weights + m.Compute + m.Frozen + m.Gradients + m.Optimizer + m.Activations + m.RingBuffers + m.Batches +
		m.Workspace
}

type item struct {
	name  string
	bytes int64
}

func (m *Memory) items() []item {
	list := []item{
		{"weights", m.Weights}, {"compute copy", m.Compute}, {"frozen weights", m.Frozen}, {"gradients", m.Gradients},
		{"optimizer", m.Optimizer}, {"activations", m.Activations}, {"ring buffers", m.RingBuffers},
		{"batches", m.Batches}, {"workspace", m.Workspace}, {"context", m.Context},
	}
	return slices.DeleteFunc(list, func(i item) bool {
		return i.bytes == 0 && slices.Contains([]string{"compute copy", "frozen weights", "workspace", "context"}, i.name)
	})
}

// hostItems lists the memory of the host beside a GPU.
func (m *Memory) hostItems() []item {
	return []item{{"host activations", m.HostActivations}, {"host optimizer", m.HostOptimizer}}
}

// Room returns the part that a run grows on demand.
func (m *Memory) Room() state.Room {
	return state.Room{Activations: m.Activations, RingBuffers: m.RingBuffers, Tokens: m.tokens, Layers: m.retain(),
		Host: m.HostActivations, Copies: m.Copies}
}

// Verdict returns a sentence on whether the run fits the device; "" if that is unknown.
func (m *Memory) Verdict() string { return m.fits + m.advice }

// Fused returns the bytes of Workspace used by fused attention.
func (m *Memory) Fused() int64 { return m.fused }

// GPU memory of a process beyond its own allocations: memory_bytes of metrics.jsonl, less Planned.
// The sum was measured with a 3 B model on four H200 with CUDA 13.0, cuDNN 9.19 and NCCL 2.28.
// The division between the two is an estimate.
const (
	// contextBytes counts the context with its stacks, the code of the kernels, of cuBLASLt, cuDNN
	// and NCCL, and their handles.
	contextBytes = 1200 << 20
	// groupBytes counts NCCL's memory for a group of several ranks: the buffers of its channels for
	// each peer and protocol, and the mapping of the peers' memory.
	groupBytes = 460 << 20
)

// contextOf returns the Context of a GPU run. Inside a host, a context group by copy engines has no NCCL memory, and
// neither has a group that only gathers weights.
func contextOf(cfg *config.Config, ranks int, on machine.Machine) int64 {
	n := int64(contextBytes)
	groups := []int{ranks}
	if on.PerHost(ranks) < ranks || cfg.Parallel.Transport == "nccl" {
		groups = append(groups, cfg.Parallel.Context)
		if cfg.Memory.Shard == "parameters" {
			groups = append(groups, ranks)
		}
	}
	for _, size := range groups {
		if size > 1 {
			n += groupBytes
		}
	}
	return n
}

// processBytes counts the program and the Go runtime of a process on a CPU, without the run's
// allocations and garbage. It was measured with 1 to 4 ranks, from 0.4 M to 5 M parameters.
const processBytes = 22 << 20

// meshBytes counts the connections of a rank with other ranks. sharedBytes counts the memory that it
// shares with one peer of its node, and meshRanks limits the number of these: the ranks connected at start.
const (
	meshBytes   = 1 << 20
	sharedBytes = 512 << 10
	meshRanks   = 16
)

// stagedBytes returns the size of the staging area for state: two host buffers of up to 1 MiB each (train.newStage).
func stagedBytes(cfg *config.Config, ranks int) int64 {
	const piece = 256 << 10 // elements
	flat := model.NewLayout(&cfg.Model.Config, ranks)
	return 2 * 4 * min(max(flat.Size(), flat.FrozenSize()), piece)
}

// packedSlack limits the imbalance of packed samples, which are cut document by document: a rank may
// have this share more tokens than with a sample of one document.
const packedSlack = 0.02

// MemoryOf returns the memory of a run of a resolved config on a machine.
func MemoryOf(cfg *config.Config, ranks int, machine machine.Machine) (Memory, error) {
	return measured(memoryOf, memoryOf, cfg, ranks, machine)
}

// measured returns the memory of a run by of, with advice by alike if it does not fit.
func measured(of, alike measure, cfg *config.Config, ranks int, machine machine.Machine) (Memory, error) {
	d, err := demandOf(cfg, machine, nil)
	if err != nil {
		return Memory{}, err
	}
	m, err := of(cfg, ranks, machine, d)
	return m.advised(alike, cfg, ranks, machine, d), err
}

// memoryOf returns the memory of a run. With sharded parameters each host has a copy of the weights, if that fits and
// drops no inputs.
func memoryOf(cfg *config.Config, ranks int, on machine.Machine, d *demand) (Memory, error) {
	if n := on.Hosts; cfg.Memory.Shard == "parameters" && n > 1 && ranks%n == 0 && ranks > n && on.Memory > 0 {
		if m, err := memoryWith(cfg, ranks, n, on, d); err != nil || m.Fits && m.Layers.Nothing == 0 {
			return m, err
		}
	}
	return memoryWith(cfg, ranks, 1, on, d)
}

func memoryWith(cfg *config.Config, ranks, copies int, machine machine.Machine, d *demand) (Memory, error) {
	m := Memory{Device: machine.Memory, RingBuffers: d.buffers, Copies: copies}
	m.HostDevice, m.HostReserve = machine.HostMemory()
	dtype, batch := backend.DType(cfg), sequences(cfg)
	m.tokens = batch * d.tokens
	if err := m.state(cfg, ranks, m.tokens, dtype); err != nil {
		return m, err
	}
	if !machine.IsCPU() {
		m.Context = contextOf(cfg, ranks, machine)
		m.fused = fusedBytes(cfg, machine, d, batch)
		m.Workspace = gpu.LinearWorkspace + gpu.OpsWorkspace + m.fused
		m.place(cfg, ranks, machine, d)
	} else {
		m.Context = processBytes + stagedBytes(cfg, ranks)
		if ranks > 1 {
			m.Context += meshBytes + sharedBytes*int64(min(ranks, meshRanks)-1) // assumes that all ranks share one node
		}
		if dtype.Size() == 2 {
			m.Context += cpu.HalfWorkspace(cfg.Model.VocabSize)
		}
		m.place(cfg, ranks, machine, d)
		_, garbage := state.Garbage(m.Planned() + m.HostActivations + m.HostOptimizer) // reached after some tens of steps
		m.Context += garbage
	}
	m.total(cfg, machine, ranks)
	return m, nil
}

func (m *Memory) total(cfg *config.Config, machine machine.Machine, ranks int) {
	m.Total, m.Fits, m.Reserve = m.Planned()+m.Context, true, cfg.Memory.Reserve.Of(m.Device)
	m.HostTotal = m.HostActivations + m.HostOptimizer
	if m.Device == 0 {
		return
	}
	kept, with := "", ""
	if m.Reserve > 0 {
		kept = readable.Bytes(m.Reserve) + " kept free (memory.reserve)"
		kept, with = ", "+kept, " with "+kept
	}
	excess, hostExcess := m.excess(machine, ranks)
	m.Fits = excess <= 0 && hostExcess <= 0
	total, device := readable.Bytes(m.Total), readable.Bytes(m.Device)
	switch n := machine.PerHost(ranks); {
	case m.Fits && machine.IsCPU():
		total = readable.Bytes(m.Total + m.HostTotal)
		m.fits = fmt.Sprintf("fits: %s a rank, %d in %s of memory%s", total, n, device, kept)
	case m.Fits:
		m.fits = fmt.Sprintf("fits: %s of %s a GPU%s", total, device, kept)
		if m.HostTotal > 0 {
			m.fits += fmt.Sprintf("; %s of host memory a rank", readable.Bytes(m.HostTotal))
		}
	case excess <= 0:
		m.fits = fmt.Sprintf("does NOT fit the host memory of %s with %s kept free: it takes %s a rank, with %d on a "+
			"host", readable.Bytes(m.HostDevice), readable.Bytes(m.HostReserve), readable.Bytes(m.HostTotal), n)
	case machine.IsCPU():
		total = readable.Bytes(m.Total + m.HostTotal)
		m.fits = fmt.Sprintf("does NOT fit the %s of the machine%s: it takes %s a rank, with %d in all", device, with,
			total, n)
	default:
		m.fits = fmt.Sprintf("does NOT fit the %s of one device%s: %s too much", device, with, readable.Bytes(excess))
	}
}

// excess returns the bytes by which a rank exceeds its device and its part of the host memory. On a CPU the first
// counts both, and the second is 0.
func (m *Memory) excess(machine machine.Machine, ranks int) (device, host int64) {
	n := int64(machine.PerHost(ranks))
	if machine.IsCPU() {
		return m.Total + m.HostTotal - (m.Device-m.Reserve)/n, 0
	}
	if m.HostDevice > 0 {
		host = m.HostTotal - (m.HostDevice-m.HostReserve)/n
	}
	return m.Total - (m.Device - m.Reserve), host
}

// short returns the bytes that a rank lacks.
func (m *Memory) short(machine machine.Machine, ranks int) int64 {
	device, host := m.excess(machine, ranks)
	return max(device, 0) + max(host, 0)
}

// EvalMemoryOf returns the memory of an evaluation, without gradients and moments.
func EvalMemoryOf(cfg *config.Config, ranks int, machine machine.Machine) (Memory, error) {
	return measured(evalMemory, evalMemory, cfg, ranks, machine)
}

func evalMemory(cfg *config.Config, ranks int, machine machine.Machine, d *demand) (Memory, error) {
	c := *cfg
	c.Memory.Offload = "off"
	m, err := memoryOf(&c, ranks, machine, d)
	m.Gradients, m.Optimizer, m.Activations, m.Layers = 0, 0, m.validation, Layers{}
	m.total(cfg, machine, ranks)
	return m, err
}

func sequences(cfg *config.Config) int {
	if cfg.Data.PackDocuments { // packed samples go one by one
		return 1
	}
	return cfg.Train.MicroBatchSize
}

func (m *Memory) state(cfg *config.Config, ranks, batch int, dtype tensor.DType) error {
	flat, meter := model.NewLayout(&cfg.Model.Config, ranks), state.Meter{}
	_, host := cfg.Memory.Offloads()
	_, err := state.New(meter, state.Options{
		Layout: flat, Groups: state.Groups(flat, state.Group{Size: ranks, Copies: m.Copies}),
		Shard:   state.ShardingOf(cfg.Memory.Shard),
		Compute: dtype, HalfWire: cfg.Precision.GradWire == "bf16", Host: host,
	})
	if err != nil {
		return err
	}
	format := state.FormatOf(&cfg.Model.Config, cfg.Data.PackDocuments)
	if _, err := state.NewBatches(meter, format, batch); err != nil {
		return err
	}
	m.Weights, m.Compute, m.Gradients = meter[state.Weights], meter[state.Compute], meter[state.Gradients]
	m.Frozen, m.Optimizer, m.Batches = meter[state.Base], meter[state.Moments], meter[state.Inputs]
	m.HostOptimizer = meter[state.OnHost+state.Weights] + meter[state.OnHost+state.Moments]
	return nil
}

// fusedBytes returns the workspace of fused attention; 0 for other backends.
func fusedBytes(cfg *config.Config, machine machine.Machine, d *demand, batch int) int64 {
	if cfg.Parallel.Backend != backends.Fused.String() {
		return 0
	}
	m, most := &cfg.Model.Config, int64(0)
	for _, w := range d.works {
		most = max(most, gpu.FusedWorkspace(gpu.FusedShape{
			Batch: batch, SeqQ: w.Queries, SeqK: w.Keys, Heads: w.Heads, KVHeads: w.KVHeads,
			Dim: m.HeadDim, DimV: m.HeadDim, Calls: w.Calls, Training: true,
			Packed:        cfg.Data.PackDocuments && backends.Packs(machine.Arch, machine.CUDNN),
			Deterministic: cfg.Train.Deterministic && backends.KeepsMatrix(machine.Arch, machine.CUDNN),
		}))
	}
	return most
}

// Check returns an error if the run does not fit the machine's memory.
func (m *Memory) Check() error {
	if m.Fits {
		return nil
	}
	return fmt.Errorf("this run %s; cprun plan lists what it takes", m.Verdict())
}
