package plan

import (
	"math"
	"slices"

	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/model/state"
	"github.com/cprun/cprun/kernels/cpu"
	"github.com/cprun/cprun/kernels/gpu"
)

// retain returns the choice for each layer; nil: all stay on the device. Layers without input are spread evenly. Those
// that stay on the device are the last, which the backward pass needs first.
func (m *Memory) retain() (list []model.Retain) {
	l, save := m.Layers, map[string]model.Save{"selective": model.SaveOutput, "full": model.SaveInput}[m.recompute]
	kept := l.Device + l.Host
	for i, n := 0, kept+l.Nothing; i < n; i++ {
		r := model.Retain{Save: save, Host: i*kept/n < l.Host}
		if i*kept%n >= kept {
			r = model.Retain{Save: model.SaveNothing}
		}
		list = append(list, r)
	}
	return list
}

// options returns the options of the model of a run.
func (m *Memory) options(cfg *config.Config) model.Options {
	return model.Options{Recompute: model.Recompute(cfg.Memory.Recompute), LossChunk: cfg.Memory.LossChunk,
		Layers: m.retain()}
}

// A kept names the activations of a run.
type kept struct {
	batch, tokens, chunk int
	recompute            string
	layers               Layers
}

// activations returns the memory of the passes with m's layers.
func (d *demand) activations(cfg *config.Config, m *Memory) model.Memory {
	key := kept{sequences(cfg), d.tokens, cfg.Memory.LossChunk, cfg.Memory.Recompute, m.Layers}
	acts, ok := d.kept[key]
	if !ok {
		opt := m.options(cfg)
		opt.Segments, opt.States = d.segments, d.states
		acts = model.Plan(&cfg.Model.Config, opt, key.batch, key.tokens, backend.DType(cfg))
		d.kept[key] = acts
	}
	return acts
}

// keep sets the activations with these layers.
func (m *Memory) keep(cfg *config.Config, d *demand, l Layers) model.Memory {
	m.Layers, m.recompute = l, cfg.Memory.Recompute
	acts := d.activations(cfg, m)
	m.Activations, m.validation = max(acts.Activations, acts.Validation), acts.Validation
	m.HostActivations = acts.Host
	return acts
}

// place decides where the saved activations of each layer are, beside the other items of m: on the device as far as
// they fit, then on the host with memory.offload, and with full recompute nowhere for the remainder.
func (m *Memory) place(cfg *config.Config, ranks int, on machine.Machine, d *demand) {
	acts := m.keep(cfg, d, Layers{})
	m.total(cfg, on, ranks)
	moves, _ := cfg.Memory.Offloads()
	n := cfg.Model.NumHiddenLayers
	if moves = moves && n > model.HostSlots; moves && (on.IsCPU() || on.Memory == 0) {
		m.keep(cfg, d, Layers{Host: n}) // saves nothing, or the device's memory is not known
		return
	}
	drops := cfg.Memory.Recompute == "full"
	if m.Fits || !moves && !drops {
		return
	}
	largest := max(1, slices.Max(acts.Kept))
	smallest := largest
	for _, bytes := range acts.Kept {
		if bytes > 0 {
			smallest = min(smallest, bytes)
		}
	}
	need, _ := m.excess(on, ranks)
	least, most := n, 0 // layers with a kept input, and of them on the host
	if drops {
		least = int(math.Ceil(float64(n) / math.Ceil(math.Sqrt(float64(n))))) // fewer take more memory
	}
	stay := max(least, n-int((need+largest-1)/largest)) // no more fit
	if moves {
		m.keep(cfg, d, Layers{Host: n})
		m.total(cfg, on, ranks)
		device, host := m.excess(on, ranks)
		stay = min(max(0, int(-device/smallest)), n-model.HostSlots)
		if most = n - stay; drops && m.HostDevice > 0 {
			most = min(n, model.HostSlots+max(0, int((m.HostActivations-host)/largest)))
		}
	}
	m.settle(cfg, ranks, on, d, stay, least, most)
}

// settle keeps the activations of stay layers on the device, and lowers that number until the run fits. Up to most of
// the others are on the host, and at least least layers keep their input.
func (m *Memory) settle(cfg *config.Config, ranks int, on machine.Machine, d *demand, stay, least, most int) {
	n := cfg.Model.NumHiddenLayers
	for ; ; stay-- {
		l := Layers{Device: stay, Host: min(n-stay, max(most, least-stay))}
		l.Nothing = n - l.Device - l.Host
		m.keep(cfg, d, l)
		m.total(cfg, on, ranks)
		if need, _ := m.excess(on, ranks); need <= 0 || stay == 0 || most == 0 && stay == least {
			return
		}
	}
}

// memoryOf returns the memory of a run. With sharded parameters each host has a copy of the weights, if that fits and
// drops no inputs.
func memoryOf(cfg *config.Config, ranks int, on machine.Machine, d *demand) (Memory, error) {
	if n := on.Hosts; cfg.Memory.Shard == "parameters" && n > 1 && ranks%n == 0 && ranks > n && on.Memory > 0 {
		if m, err := memoryWith(cfg, ranks, n, state.LeastSlots, on, d); err != nil || m.Fits && m.Layers.Nothing == 0 {
			return m, err
		}
	}
	return memoryWith(cfg, ranks, 1, state.LeastSlots, on, d)
}

func memoryWith(cfg *config.Config, ranks, copies, slots int, machine machine.Machine, d *demand) (Memory, error) {
	m := Memory{Device: machine.Memory, RingBuffers: d.buffers, Copies: copies, Slots: slots}
	m.HostDevice, m.HostReserve = machine.HostMemory()
	dtype, batch, flat := backend.DType(cfg), sequences(cfg), d.flat(cfg, ranks)
	m.tokens = batch * d.tokens
	if err := m.state(cfg, flat, ranks, m.tokens, dtype); err != nil {
		return m, err
	}
	m.HostLauncher, m.held, m.encoding = launcherBytes, d.held, d.encoding
	if cfg.Copies() { // masters and moments, for a checkpoint that is written during training
		m.snapshot = 3 * 4 * flat.Size() / int64(ranks)
	}
	if cfg.Checkpoint.Async != nil {
		m.HostSnapshot = m.snapshot
	}
	if !machine.IsCPU() {
		m.HostLauncher += libraryBytes
		m.process = driverBytes + stagedBytes(flat, machine)
		m.Context = contextOf(cfg, ranks, machine)
		m.fused = fusedBytes(cfg, machine, d, batch)
		m.Workspace = gpu.LinearWorkspace + gpu.OpsWorkspace + m.fused
		if cfg.Model.Recurs() {
			m.Workspace += gpu.DeltaWorkspace
		}
		m.place(cfg, ranks, machine, d)
	} else {
		m.process = processBytes + stagedBytes(flat, machine)
		if ranks > 1 {
			m.process += meshBytes + sharedBytes*int64(min(ranks, meshRanks)-1) // assumes that all ranks share one node
		}
		if dtype.Size() == 2 {
			m.process += cpu.HalfWorkspace(cfg.Model.VocabSize)
		}
		m.place(cfg, ranks, machine, d)
	}
	m.total(cfg, machine, ranks)
	if cfg.Checkpoint.Async == nil && m.Fits {
		m.HostSnapshot = m.snapshot
		if m.total(cfg, machine, ranks); !m.Fits {
			m.HostSnapshot = 0
			m.total(cfg, machine, ranks)
		}
	}
	return m, nil
}

// Room returns the part that a run grows on demand.
func (m *Memory) Room() state.Room {
	return state.Room{Activations: m.Activations, RingBuffers: m.RingBuffers, Tokens: m.tokens, Layers: m.retain(),
		Host: m.HostActivations, Copies: m.Copies, Slots: m.Slots}
}
