package plan

import (
	"fmt"
	"slices"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/checkpoint"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/model/state"
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
	Batches     int64 `json:"batches"`   // tokens, targets and tables of rotary embeddings; the cache of log.samples
	Workspace   int64 `json:"workspace"` // of the kernels and the libraries
	fused       int64 // the part of Workspace used by fused attention
	Context     int64 `json:"context"` // estimate
	Total       int64 `json:"total"`
	Device      int64 `json:"device"`  // bytes of one device, or of the host memory that CPU ranks share; 0: unknown
	Reserve     int64 `json:"reserve"` // the part of Device that stays free

	Copies          int    `json:"weight_copies"`    // of sharded parameters: one for each host, or 1
	Slots           int    `json:"weight_slots"`     // layers whose sharded parameters are whole at once
	Layers          Layers `json:"layers"`           // zero: all activations stay on the device
	HostActivations int64  `json:"host_activations"` // offloaded by this rank
	HostOptimizer   int64  `json:"host_optimizer"`   // masters and moments, likewise
	HostSnapshot    int64  `json:"host_snapshot"`    // the copy that a checkpoint is written from; 0: none
	HostData        int64  `json:"host_data"`        // tokens and tables of documents, or more to encode them at the start
	HostProcess     int64  `json:"host_process"`     // beside a GPU: program, driver and staging; on a CPU in Context
	HostTotal       int64  `json:"host_total"`
	HostLauncher    int64  `json:"host_launcher"` // of a host
	Host            int64  `json:"host"`          // all ranks of a host and the launcher; on a CPU with Total
	HostDevice      int64  `json:"host_device"`   // memory of a host; 0: unknown, or a CPU with Device
	HostReserve     int64  `json:"host_reserve"`

	Fits       bool `json:"fits"` // both memories, or not known
	fits       string
	recompute  string // of Layers
	advice     string // of a run that does not fit
	tokens     int    // of one batch, on the rank with most
	validation int64  // activations of a forward pass alone
	held       int64  // of HostData, after the start
	encoding   int64  // at the start
	snapshot   int64  // HostSnapshot of an asynchronous checkpoint
	process    int64  // HostProcess, on a CPU Context, without garbage
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

// hostItems lists a rank's memory of the host beside the device's.
func (m *Memory) hostItems() []item {
	return []item{{"host activations", m.HostActivations}, {"host optimizer", m.HostOptimizer},
		{"host snapshot", m.HostSnapshot}, {"host data", m.HostData}, {"host process", m.HostProcess}}
}

// Waits returns why training waits for checkpoints though checkpoint.async is auto; "": it does not.
func (m *Memory) Waits() string {
	if m.HostSnapshot == m.snapshot || !m.Fits {
		return ""
	}
	return fmt.Sprintf("training waits for checkpoints, since the host's memory does not hold a copy of %s a rank as well",
		readable.Bytes(m.snapshot))
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

// ProgramBytes counts the resident code of the program. processBytes adds the Go runtime of a process on a CPU, without
// the run's allocations and garbage. They were measured with 1 to 4 ranks, from 0.4 M to 27 M parameters.
const (
	ProgramBytes = 26 << 20
	processBytes = ProgramBytes + 6<<20
)

// Host memory beside GPUs, measured with one H200, CUDA 13.0 and cuDNN 9.19. driverBytes counts a rank's driver, its
// libraries' data, and the compiler of kernels at the first start (650 MiB later). libraryBytes counts the code of the
// libraries, which the ranks of a host share.
const (
	driverBytes  = 800 << 20
	libraryBytes = 512 << 20
)

// launcherBytes counts the launcher of a host after the start. It encodes data before its ranks begin.
const launcherBytes = 36 << 20

// meshBytes counts the connections of a rank with other ranks, and the scratch memory of its reductions
// (comm.pieceBytes). sharedBytes counts the memory that it
// shares with one peer of its node, and meshRanks limits the number of these: the ranks connected at start.
const (
	meshBytes   = 5 << 20
	sharedBytes = 512 << 10
	meshRanks   = 16
)

// stagedBytes returns the size of the staging area for state: two host buffers of up to 1 MiB each on a CPU, else
// 32 MiB (train.newStage), and the piece and the buffer of a shard in writing.
func stagedBytes(flat *model.FlatLayout, on machine.Machine) int64 {
	piece := int64(8 << 20) // elements
	if on.IsCPU() {
		piece = checkpoint.PieceSize
	}
	most := max(flat.Size(), flat.FrozenSize())
	return 2*4*min(most, piece) + 2*4*min(most, checkpoint.PieceSize)
}

// packedSlack limits the imbalance of packed samples, which are cut document by document: a rank may
// have this share more tokens than with a sample of one document.
const packedSlack = 0.02

func (m *Memory) total(cfg *config.Config, machine machine.Machine, ranks int) {
	later, live := m.HostSnapshot, m.HostSnapshot+m.held // later: not in use while the data is encoded
	if machine.IsCPU() {
		later += m.Activations + m.RingBuffers
		live += m.Planned() + m.HostActivations + m.HostOptimizer
	}
	m.HostData = max(m.held, m.encoding-later)
	_, garbage := state.Garbage(live, machine.Arch) // reached after some tens of steps
	if m.HostProcess = m.process + garbage; machine.IsCPU() {
		m.Context, m.HostProcess = m.HostProcess, 0
	}
	m.Total, m.Fits, m.Reserve = m.Planned()+m.Context, true, cfg.Memory.Reserve.Of(m.Device)
	m.HostTotal = 0
	for _, i := range m.hostItems() {
		m.HostTotal += i.bytes
	}
	n := int64(machine.PerHost(ranks))
	m.Host = n*m.HostTotal + m.HostLauncher
	if machine.IsCPU() {
		m.Host += n * (m.Total - ProgramBytes) // the launcher has the same program
	}
	m.Host = max(m.Host, m.HostLauncher+2*m.encoding) // the launcher encodes first
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
	switch {
	case m.Fits && machine.IsCPU():
		total = readable.Bytes(m.Total + m.HostTotal)
		m.fits = fmt.Sprintf("fits: %s a rank, %d in %s of memory%s", total, n, device, kept)
	case m.Fits:
		m.fits = fmt.Sprintf("fits: %s of %s a GPU%s", total, device, kept)
		if m.fits += fmt.Sprintf("; %s of host memory", readable.Bytes(m.Host)); m.HostDevice > 0 {
			m.fits += " of " + readable.Bytes(m.HostDevice)
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
		return m.Total - ProgramBytes + m.HostTotal - (m.Device-m.Reserve-m.HostLauncher)/n, 0
	}
	pinned := m.HostActivations + m.HostOptimizer
	if m.HostDevice > 0 { // the reserve is also for processes
		host = max(pinned+m.HostSnapshot-(m.HostDevice-m.HostReserve)/n, m.HostTotal-(m.HostDevice-m.HostLauncher)/n)
	}
	if machine.Locked > 0 {
		host = max(host, pinned-machine.Locked/n)
	}
	return m.Total - (m.Device - m.Reserve), host
}

// short returns the bytes that a rank lacks.
func (m *Memory) short(machine machine.Machine, ranks int) int64 {
	device, host := m.excess(machine, ranks)
	return max(device, 0) + max(host, 0)
}

func (m *Memory) state(cfg *config.Config, flat *model.FlatLayout, ranks, batch int, dtype tensor.DType) error {
	meter := state.Meter{}
	_, host := cfg.Memory.Offloads()
	_, err := state.New(meter, state.Options{
		Layout: flat, Groups: state.Groups(flat, state.Group{Size: ranks, Copies: m.Copies}),
		Shard:   state.ShardingOf(cfg.Memory.Shard),
		Compute: dtype, HalfWire: cfg.Precision.GradWire == "bf16", Host: host, Slots: m.Slots,
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
	if cfg.Log.Samples.Every > 0 {
		m.Batches += model.CacheBytes(&cfg.Model.Config, config.MaxPrompt+config.MaxAnswer, int64(dtype.Size())) +
			int64(cfg.Model.VocabSize)*int64(dtype.Size()+tensor.F32.Size())
	}
	m.HostOptimizer = meter[state.OnHost+state.Weights] + meter[state.OnHost+state.Moments]
	return nil
}

// fusedBytes returns the workspace of fused attention; 0 for other backends.
func fusedBytes(cfg *config.Config, machine machine.Machine, d *demand, batch int) int64 {
	if cfg.Parallel.Backend != backends.Fused.String() {
		return 0
	}
	most := int64(0)
	for _, w := range d.works {
		most = max(most, gpu.FusedWorkspace(gpu.FusedShape{
			Batch: batch, SeqQ: w.Queries, SeqK: w.Keys, Heads: w.Heads, KVHeads: w.KVHeads,
			Dim: w.Dim, DimV: w.DimV, Calls: w.Calls, Training: true,
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

// Layers counts the layers of a model by the place of their saved activations between the passes.
type Layers struct {
	Device  int `json:"device"`
	Host    int `json:"host"`    // moved, except the last model.HostSlots of them
	Nothing int `json:"nothing"` // the backward pass computes their input again, from the layers below
}
