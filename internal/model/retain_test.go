package model

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/tensor"
)

// deep returns a tiny model with more layers.
func deep(name string, layers int) *hf.Config {
	cfg := *tinyModels[name]
	cfg.NumHiddenLayers = layers
	if len(cfg.LayerTypes) > 0 {
		cfg.LayerTypes = slices.Repeat(cfg.LayerTypes, layers)[:layers]
	}
	if len(cfg.NoRopeLayers) > 0 {
		cfg.NoRopeLayers = slices.Repeat(cfg.NoRopeLayers, layers)[:layers]
	}
	return &cfg
}

// A mover holds moved activations on the host. It overwrites their slots as soon as the contract of Hooks lets others use
// them, and brings a layer back as early as the contract allows.
type mover struct {
	run   func(func()) // in the order of the model's operations
	moved []*movedLayer
	at    int // the number of moved layers below the present one
	bytes int64
}

type movedLayer struct{ slot, host []View }

func (m *mover) hooks() Hooks {
	return Hooks{
		Keep: func(_ int, saved []View) {
			if m.at > 0 {
				m.moved[m.at-1].poison(m)
			}
			l := &movedLayer{slot: slices.Clone(saved)}
			for _, v := range saved {
				l.host = append(l.host, tensor.New(v.DType(), shape(v)...))
				m.bytes += int64(len(tensor.Bytes(v)))
			}
			m.moved = append(m.moved, l)
			m.at++
			m.run(func() { copyAll(l.host, l.slot) })
		},
		Bring: func(layer int, saved []View) {
			m.at--
			if !slices.Equal(saved, m.moved[m.at].slot) {
				panic(fmt.Sprintf("layer %d is brought to other views than it was kept in", layer))
			}
			if m.at+1 < len(m.moved) {
				m.moved[m.at+1].poison(m)
			}
			if m.at >= 2 {
				l := m.moved[m.at-2]
				m.run(func() { copyAll(l.slot, l.host) })
			}
		},
	}
}

func (l *movedLayer) poison(m *mover) {
	m.run(func() {
		for _, v := range l.slot {
			fill(v, 0xff) // NaN
		}
	})
}

func fill(v View, x byte) {
	b := tensor.Bytes(v)
	for i := range b {
		b[i] = x
	}
}

func copyAll(to, from []View) {
	for i := range to {
		copy(tensor.Bytes(to[i]), tensor.Bytes(from[i]))
	}
}

// randomRetain draws the choices of the layers.
func randomRetain(r *rand.Rand, layers int) (list []Retain) {
	host := r.Float64()
	for i := range layers {
		list = append(list, Retain{Save: Save(r.IntN(min(i, 1) + 3)), Host: r.Float64() < host})
	}
	return list
}

// Whatever the layers keep, and wherever, loss and gradients have the same bits, and memory is as planned.
func TestAnyChoiceOfLayersGivesTheSameBits(t *testing.T) {
	runs := 40
	if testing.Short() {
		runs = 5
	}
	for name := range tinyModels {
		for _, device := range []string{"reference", "bfloat16", "cpu", "no tokens"} {
			t.Run(name+" "+device, func(t *testing.T) {
				t.Parallel()
				r := rand.New(rand.NewPCG(3, 4))
				for range runs {
					layers, tile := 1+r.IntN(9), []int{0, 1, 3, 5, 14}[r.IntN(5)]
					c := tinyCaseOf(deep(name, layers), tensor.F32)
					switch device {
					case "bfloat16":
						c.compute(tensor.BF16)
					case "no tokens":
						c = newCase(c.cfg, c.params.Weights, 1, nil, nil, nil)
					}
					train := func(opt Options) (float64, []float64, int64, int64) {
						c.opt = opt
						c.opt.LossChunk, c.opt.tile = 4, tile
						if device == "cpu" {
							return c.trainOnCPU(t)
						}
						m := &mover{run: func(f func()) { f() }}
						c.opt.Hooks = m.hooks()
						loss, grads, peak := c.train(t, 0.5)
						return loss, grads, peak, m.bytes
					}
					wantLoss, want, _, _ := train(Options{})
					opt := Options{Layers: randomRetain(r, layers)}
					loss, grads, peak, moved := train(opt)
					if loss != wantLoss || !slices.Equal(grads, want) {
						t.Fatalf("layers keep %v, tiles of %d: loss %v, want %v; gradients equal: %t", opt.Layers, tile,
							loss, wantLoss, slices.Equal(grads, want))
					}
					b := c.batch.IDs
					c.opt.Hooks = Hooks{}
					c.opt.Segments = len(c.att.segments)
					plan := Plan(c.cfg, c.opt, b.Len(tensor.Batch), b.Len(tensor.Seq), c.params.Compute.DType())
					if plan.Activations != peak || plan.Host != moved {
						t.Fatalf("layers keep %v, tiles of %d: planned %d bytes and %d on the host, took %d and %d",
							opt.Layers, tile, plan.Activations, plan.Host, peak, moved)
					}
				}
			})
		}
	}
}

// Moved layers share HostSlots slots, layers without input one view for each of a segment, and others add to the arena.
func TestBytesOfEachChoice(t *testing.T) {
	const tokens, layers = 64 << 10, 12
	peak := func(list ...Retain) int64 {
		cfg := *llama8b
		cfg.NumHiddenLayers = layers
		p := Plan(&cfg, Options{Layers: slices.Repeat(list, layers/len(list))}, 1, tokens, tensor.BF16)
		return p.Activations/tokens*1e6 + p.Host/tokens
	}
	input, nothing := Retain{Save: SaveInput}, Retain{Save: SaveNothing}
	inputAway, outputAway := Retain{SaveInput, true}, Retain{SaveOutput, true}
	const hidden, output = 8192, 2*8192 + 128
	working := peak(input) - layers*hidden*1e6
	for _, c := range []struct {
		list         []Retain
		device, host int64
	}{
		{[]Retain{input, nothing}, layers/2*hidden + hidden, 0},
		{[]Retain{input, nothing, nothing}, layers/3*hidden + 2*hidden, 0},
		{[]Retain{inputAway}, HostSlots * hidden, (layers - HostSlots) * hidden},
		// O and LSE of the layer are not computed again
		{[]Retain{outputAway}, HostSlots*output - (output - hidden), (layers - HostSlots) * output},
		{[]Retain{inputAway, input}, HostSlots*hidden + layers/2*hidden, (layers/2 - HostSlots) * hidden},
		{[]Retain{inputAway, nothing}, HostSlots*hidden + hidden, (layers/2 - HostSlots) * hidden},
	} {
		if got, want := peak(c.list...)-working, c.device*1e6+c.host; got != want {
			t.Errorf("%v: %d.%06d bytes per token on the device and the host, want %d.%06d", c.list, got/1e6, got%1e6,
				want/1e6, want%1e6)
		}
	}
}

// The first layer has no layer below to compute its input from.
func TestWrongChoicesPanic(t *testing.T) {
	for _, list := range [][]Retain{{{Save: SaveNothing}, {}}, {{}}, {{}, {}, {}}} {
		func() {
			defer func() {
				if r := fmt.Sprint(recover()); !strings.Contains(r, "layers keep") {
					t.Errorf("%v: panic %q", list, r)
				}
			}()
			Plan(tinyModels["llama tied"], Options{Layers: list}, 1, 4, tensor.F32)
		}()
	}
}

// A counter counts matrix products and norms forward, and forward passes of attention.
type counter struct {
	nopOps
	nopAttention
	products, norms, attention int
}

func (c *counter) RMSNorm(_, _, _, _ View, _ float64) { c.norms++ }

func (c *counter) Linear(_, _, _, _ View) { c.products++ }

func (c *counter) Forward(int, attention.Partial, View, View, View) error {
	c.attention++
	return nil
}

// The backward pass repeats no more than it must: of seven products forward, not the last, and attention only if its
// output was not kept. The norm of the input runs before the projections and after attention. A layer below others
// without input repeats the forward pass once more.
func TestWhatABackwardPassRepeats(t *testing.T) {
	all, output, input, nothing := Retain{}, Retain{Save: SaveOutput}, Retain{Save: SaveInput}, Retain{Save: SaveNothing}
	for _, c := range []struct {
		list                       []Retain
		products, norms, attention int
	}{
		{[]Retain{all}, 0, 0, 0},
		{[]Retain{output}, 6, 2, 0},
		{[]Retain{input}, 6, 2, 1},
		{[]Retain{input, nothing}, 7 + 6 + 6, 1 + 2 + 2, 3},
		{[]Retain{output, nothing}, 4 + 6 + 6, 2 + 2, 1},
		{[]Retain{input, nothing, nothing, output}, 7 + 7 + 6 + 6 + 6 + 6, 1 + 1 + 2 + 2 + 2 + 2, 5},
	} {
		got, n := &counter{}, len(c.list)
		err := Rehearse(deep("llama tied", n), Options{Layers: c.list}, 1, 4, tensor.F32, got, got)
		if err != nil {
			t.Fatal(err)
		}
		repeated := [3]int{got.products - 7*n - 1, got.norms - n - 1, got.attention - n}
		if want := [3]int{c.products, c.norms, c.attention}; repeated != want {
			t.Errorf("%v: repeats %v products, norms and passes of attention, want %v", c.list, repeated, want)
		}
	}
}
