package train

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/cprun/cprun/internal/base/half"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/state"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// Ranks of a host set each first weight once, though every rank holds all; ranks of several hosts set all of them. The
// device draws the matrices, if it can.
func TestRanksSetWeightsTogether(t *testing.T) {
	const ranks = 3
	for _, hosts := range []int{1, 2} {
		for _, kind := range []string{"fp32", "bf16", "fp32, drawn", "bf16, drawn"} {
			compute, draws := strings.CutSuffix(kind, ", drawn")
			cfg, _ := example(t, ranks, "cpu", append([]string{"data.seq_len=91", "lora.r=4", "memory.shard=none",
				"precision.compute=" + compute}, small...)...)
			var elements, matrices, reads, drew atomic.Int64
			source := func(p model.Param, offset int64, dst []float32) error {
				reads.Add(int64(len(dst)))
				for i := range dst {
					dst[i] = first(p, offset+int64(i))
				}
				return nil
			}
			onRanks(t, ranks, cfg, state.Room{}, func(d *device.Device) { d.Machine.Hosts = hosts },
				func(tr *Trainer, _ *counted) error {
					for _, p := range slices.Concat(tr.share.Flat.Params, tr.share.Base.Flat.Params) {
						if n := int64(p.Size()); tr.mesh.world.Rank() == 0 && draws && p.Std > 0 {
							matrices.Add(n)
						} else if tr.mesh.world.Rank() == 0 {
							elements.Add(n)
						}
					}
					if draws {
						tr.dev.Draw = func(v View, lo int64, n kernels.Normals) {
							drew.Add(int64(v.Size()))
							for i := range v.Size() {
								x := first(model.Param{Offset: int64(n.Stream)}, lo+int64(i))
								if v.DType() == tensor.F32 {
									tensor.Data[float32](v)[i] = x
								} else {
									tensor.Data[uint16](v)[i] = half.ToBF16(x)
								}
							}
						}
					}
					drawn := func(p model.Param) (kernels.Normals, bool) {
						return kernels.Normals{Stream: uint64(p.Offset)}, p.Std > 0
					}
					err := tr.fill(t.Context(), tr.share.Masters, source, drawn)
					if err == nil {
						err = tr.fillBase(t.Context(), source, drawn)
					}
					if err == nil {
						err = tr.gather()
					}
					if err == nil {
						err = tr.flush(t.Context())
					}
					if err != nil {
						return err
					}
					return wholly(tr)
				})
			times := int64(1)
			if hosts > 1 {
				times = ranks
			}
			if got, want := reads.Load(), times*elements.Load(); got != want {
				t.Errorf("%d hosts, %s: %d elements were read, want %d", hosts, kind, got, want)
			}
			if got, want := drew.Load(), times*matrices.Load(); got != want || draws != (want > 0) {
				t.Errorf("%d hosts, %s: %d elements were drawn, want %d", hosts, kind, got, want)
			}
		}
	}
}

// first returns the value of an element of a parameter. bfloat16 represents it exactly.
func first(p model.Param, i int64) float32 { return float32((p.Offset + i) % 251) }

// wholly returns an error unless a rank holds the value of first in all elements.
func wholly(tr *Trainer) error {
	check := func(s *state.State, place func(bucket int) View) error {
		for i, p := range s.Flat.Params {
			b := s.Flat.Of(i)
			at := int(p.Offset - s.Flat.Buckets[b].Lo)
			v := state.Part(place(b), at, at+p.Size())
			for j := range p.Size() {
				got := float32(0)
				if v.DType() == tensor.F32 {
					got = tensor.Data[float32](v)[j]
				} else {
					got = half.FromBF16(tensor.Data[uint16](v)[j])
				}
				if want := first(p, int64(j)); got != want {
					return fmt.Errorf("element %d of %s is %v, want %v", j, p.Name, got, want)
				}
			}
		}
		return nil
	}
	s := tr.share
	return errors.Join(
		check(s.State, func(b int) View { return s.Whole(s.Masters, b) }),
		check(s.Base, func(b int) View { v, _ := s.Base.Place(b); return v }),
	)
}
