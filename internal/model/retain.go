package model

import "github.com/cprun/cprun/tensor"

// Recompute selects the activations that a forward pass keeps for the backward pass. All modes give the same gradients,
// bit for bit on a device with deterministic kernels.
type Recompute string

const (
	// RecomputeNone keeps all activations of the backward pass.
	RecomputeNone Recompute = "none"
	// RecomputeSelective keeps the layer's input, O and LSE. Attention, with its quadratic cost, then runs once; norms,
	// projections and the MLP are recomputed.
	RecomputeSelective Recompute = "selective"
	// RecomputeFull keeps the layer's input and recomputes the layer.
	RecomputeFull Recompute = "full"
)

// Save selects the activations that a layer keeps for its backward pass.
type Save int

// The choices of Save, the most memory first.
const (
	SaveAll    Save = iota
	SaveOutput      // input, O and LSE
	SaveInput
	SaveNothing // the backward pass computes the input again, from the nearest kept input below
)

// Retain is the choice for one layer.
type Retain struct {
	Save Save // the kept activations
	Host bool // the hooks Keep and Bring own them between the passes
}

// HostSlots is the number of moved layers with activations on the device at once: one computes, two are on their way.
const HostSlots = 3

var saves = map[Recompute]Save{RecomputeNone: SaveAll, RecomputeSelective: SaveOutput, RecomputeFull: SaveInput}

// ends are the last groups of Retain.Save.
var ends = [...]group{SaveAll: ofTile, SaveOutput: ofOutput, SaveInput: ofInput, SaveNothing: ofRoute}

// place allocates the activations that the layers keep, and an element with the last layer's output. Layers that share
// memory get it at the lowest of them, which is released last.
func (p *pass) place() []activations {
	layers := make([]activations, len(p.layers)+1)
	slots, moving := p.slots(), 0
	var passing [2]View                             // inputs of layers without a backward pass
	inputs, above := make([]View, len(p.layers)), 0 // above counts the layers since the last kept input
	shared := func(v *View) View {
		if v.IsZero() {
			*v = p.hidden()
		}
		return *v
	}
	for i, l := range p.layers {
		s, r := &layers[i], p.opt.Layers[i]
		s.mark = p.a.Mark()
		switch {
		case i < p.lowest:
			s.x, s.host = shared(&passing[i%2]), r.Host
		case r.Save == SaveNothing:
			s.x = shared(&inputs[above])
			p.alloc(l, s, ofRoute, ofRoute)
			above++
		case r.Host:
			slot := &slots[moving%HostSlots]
			if slot.region.IsZero() {
				slot.region = p.a.Alloc(tensor.F32, 1, 1, 1, int(slot.bytes/4))
			}
			at := *p
			at.a = tensor.Within(slot.region)
			at.alloc(l, s, ofRoute, ends[r.Save])
			for _, v := range p.views(l, s) {
				if !v.at.IsZero() {
					s.moved = append(s.moved, *v.at)
				}
			}
			s.host, above = true, 0
			moving++
		default:
			p.alloc(l, s, ofRoute, ends[r.Save])
			above = 0
		}
		s.all = i >= p.lowest && r.Save == SaveAll
	}
	layers[len(p.layers)] = activations{mark: p.a.Mark(), x: p.hidden()}
	for i, stay := len(p.layers)-1, HostSlots; i >= 0 && stay > 0; i-- { // no other takes their slots
		if layers[i].host {
			layers[i].moved, stay = nil, stay-1
		}
	}
	return layers
}

// A slot is memory that moved layers take in turn, as large as the largest of them.
type slot struct {
	bytes  int64
	region View
}

func (p *pass) slots() (slots [HostSlots]slot) {
	moving := 0
	for i := range p.layers {
		if r := p.opt.Layers[i]; r.Host && r.Save != SaveNothing && i >= p.lowest {
			s := &slots[moving%HostSlots]
			s.bytes = max(s.bytes, p.kept(i))
			moving++
		}
	}
	return slots
}

// kept returns the bytes of the activations that a layer keeps.
func (p *pass) kept(layer int) int64 {
	save := p.opt.Layers[layer].Save
	if layer < p.lowest {
		return 0
	}
	at := *p
	at.a = tensor.NewMeter()
	at.alloc(p.layers[layer], &activations{}, ofRoute, ends[save])
	return at.a.Peak()
}
