package train

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/internal/model/optim"
	"github.com/cprun/cprun/internal/model/state"
	"github.com/cprun/cprun/tensor"
)

// A slowStore delays copies on one of the further streams of a device.
type slowStore struct {
	device.Store
	slow string
}

func (s slowStore) Copy(to tensor.Stream, dst, src View) {
	late(to, s.slow)
	s.Store.Copy(to, dst, src)
}

// A slowOptim delays updates.
type slowOptim struct {
	optim.Device
	s    tensor.Stream
	slow string
}

func (o slowOptim) AdamW(p, c, g, m, v, sum View, h optim.AdamStep) {
	late(o.s, o.slow)
	o.Device.AdamW(p, c, g, m, v, sum, h)
}

// late makes a stream of the host late, if it has that name.
func late(s tensor.Stream, name string) {
	if h := s.(*tensor.HostStream); h.Name() == name {
		h.Do("late", func() error { time.Sleep(300 * time.Microsecond); return nil })
	}
}

// slowCPU returns a CPU whose stream of that name is late with each piece of work.
func slowCPU(t *testing.T, slow string) *Device {
	stream := tensor.NewHostStream("compute")
	dev := device.CPU(stream, "flash", tensor.F32)
	t.Cleanup(func() {
		if err := dev.Close(); err != nil {
			t.Error(err)
		}
		if err := stream.Close(); err != nil {
			t.Error(err)
		}
	})
	dev.Store = slowStore{dev.Store, slow}
	create := dev.NewOptim
	dev.NewOptim = func(s tensor.Stream) optim.Device { return slowOptim{create(s), s, slow} }
	return &dev
}

// An optimizer on the host gives the bits of one on the device, in fewer and in more pieces than slots, whichever
// stream is late. The adapter of a layer is one piece.
func TestUpdaterGivesTheSameBits(t *testing.T) {
	defer func(size int) { state.PieceSize = size }(state.PieceSize)
	state.PieceSize = 1 << 13
	for vocab, tuning := range map[int]hf.Tuning{8: {}, 1 << 9: {}, 9: {LoRA: &hf.LoRA{R: 8, Alpha: 1}}} {
		flat := model.NewLayout(&hf.Config{
			Architecture: hf.Llama, VocabSize: vocab, HiddenSize: 1 << 6, IntermediateSize: 8, NumHiddenLayers: 1,
			NumAttentionHeads: 1, NumKeyValueHeads: 1, HeadDim: 2, RMSNormEps: 1e-6, TieWordEmbeddings: true,
			Tuning: tuning,
		}, 1)
		want := updated(t, slowCPU(t, ""), flat, false)
		for _, slow := range []string{"", "compute", "state in", "update", "state out"} {
			t.Run(fmt.Sprintf("vocabulary of %d, late %s", vocab, slow), func(t *testing.T) {
				for i, got := range updated(t, slowCPU(t, slow), flat, true) {
					if !slices.Equal(got, want[i]) {
						t.Errorf("vector %d differs", i)
					}
				}
			})
		}
	}
}

// updated returns the state after some steps.
func updated(t *testing.T, dev *Device, flat *model.FlatLayout, host bool) (out [][]float32) {
	s, err := state.New(dev, state.Options{Layout: flat, Groups: state.Groups(flat, state.Group{Size: 1}),
		Compute: tensor.F32, Masters: true, AdamW: optim.AdamW{Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, WeightDecay: 0.1,
			MaxNorm: 1}, Host: host})
	if err != nil {
		t.Fatal(err)
	}
	s.Zero(dev.Ops)
	u, err := newUpdater(dev, s)
	if err != nil {
		t.Fatal(err)
	}
	norm2 := tensor.FromSlice([]float64{9}, 1)
	wait(t, dev)
	rng := rand.New(rand.NewPCG(1, 2))
	fillAny(rng, s.Masters)
	for step := range 2 {
		grads := tensor.New(tensor.F32, s.Grads.Size())
		fillAny(rng, grads)
		late(dev.Stream, dev.Store.(slowStore).slow)
		dev.Ops.Copy(s.Grads, grads)
		up := optim.Update{LR: 0.01, Step: step}
		if host {
			u.begin(norm2, up)
		}
		for _, b := range order(flat) {
			if host {
				u.follow(b)
			} else {
				s.Update(dev.Optim, b, norm2, up)
			}
		}
	}
	if host {
		u.flush()
	}
	wait(t, dev)
	for _, v := range []View{s.Masters, s.M, s.V} {
		out = append(out, tensor.Data[float32](v))
	}
	for b, bucket := range flat.Buckets {
		if c := s.Copied(b, 0, int(bucket.Size())); b != flat.Vectors() {
			out = append(out, tensor.Data[float32](c))
		}
	}
	return out
}

func wait(t *testing.T, dev *Device) {
	t.Helper()
	if err := dev.Stream.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func fillAny(rng *rand.Rand, v View) {
	for i := range tensor.Data[float32](v) {
		tensor.Data[float32](v)[i] = rng.Float32() - 0.5
	}
}
