package plan

import (
	"math"

	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
)

// Layers counts the layers of a model by the place of their saved activations between the passes.
type Layers struct {
	Device  int `json:"device"`
	Host    int `json:"host"`    // moved, except the last model.HostSlots of them
	Nothing int `json:"nothing"` // the backward pass computes their input again, from the layers below
}

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

// keep sets the activations with these layers.
func (m *Memory) keep(cfg *config.Config, d *demand, l Layers) {
	m.Layers, m.recompute = l, cfg.Memory.Recompute
	key := kept{sequences(cfg), d.tokens, cfg.Memory.LossChunk, cfg.Memory.Recompute, l}
	acts, ok := d.kept[key]
	if !ok {
		acts = model.Plan(&cfg.Model.Config, m.options(cfg), key.batch, key.tokens, backend.DType(cfg))
		d.kept[key] = acts
	}
	m.Activations, m.validation = max(acts.Activations, acts.Validation), acts.Validation
	m.HostActivations = acts.Host
}

// place decides where the saved activations of each layer are, beside the other items of m: on the device as far as
// they fit, then on the host with memory.offload, and with full recompute nowhere for the remainder.
func (m *Memory) place(cfg *config.Config, ranks int, on machine.Machine, d *demand) {
	m.keep(cfg, d, Layers{})
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
	need, _ := m.excess(on, ranks)
	least, most := n, 0 // layers with a kept input, and of them on the host
	if drops {
		least = int(math.Ceil(float64(n) / math.Ceil(math.Sqrt(float64(n))))) // fewer take more memory
	}
	if moves {
		m.keep(cfg, d, Layers{Host: n})
		m.total(cfg, on, ranks)
		device, host := m.excess(on, ranks)
		one := max(1, m.HostActivations/int64(n-model.HostSlots)) // bytes of a layer
		stay := min(max(0, int(-device/one)), n-model.HostSlots)
		if most = n - stay; drops && m.HostDevice > 0 {
			most = min(n, model.HostSlots+max(0, int((m.HostActivations-host)/one)))
		}
		m.settle(cfg, ranks, on, d, stay, least, most)
		return
	}
	input := int64(m.tokens * cfg.Model.HiddenSize * backend.DType(cfg).Size())
	m.settle(cfg, ranks, on, d, max(least, n-int((need+input-1)/input)), least, 0)
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

// offloading returns the seconds that copies to and from the host add to a step of micro passes. forward and backward
// are the times of a layer.
func (m *Memory) offloading(rate, forward, backward float64, layers, micro int) (t float64) {
	moved, input := max(0, m.Layers.Host-model.HostSlots), 0.0 // input: seconds to move a layer's activations
	if moved > 0 {
		input = float64(m.HostActivations) / float64(moved) / rate
		t = float64(micro*moved) * (exposedCopy(input, forward) + exposedCopy(input, backward))
	}
	if m.HostOptimizer > 0 { // beside one forward pass, which waits for the first update, on the link of the activations
		update := float64(m.HostOptimizer) / rate / float64(layers+2)
		t += update + float64(layers-moved)*exposedCopy(update, forward) +
			float64(moved)*(exposedCopy(input+update, forward)-exposedCopy(input, forward))
	}
	return t
}
