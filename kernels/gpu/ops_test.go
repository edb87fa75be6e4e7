//go:build cuda

package gpu

import (
	"context"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/opstest"
	"github.com/cprun/cprun/internal/model/optim"
	"github.com/cprun/cprun/kernels/cpu"
	"github.com/cprun/cprun/tensor"
)

var (
	_ model.Ops    = (*Ops)(nil)
	_ optim.Device = (*Ops)(nil)
)

// cudaRig has the kernels of the first GPU, and the CPU kernels to compare with.
type cudaRig struct {
	*Ops
	t         testing.TB
	transfers *transfers
	cpu       *cpu.Kernels
	rng       *rand.Rand
}

func newCUDARig(t testing.TB) *cudaRig {
	t.Helper()
	dev, stream, loader := openGPU(t)
	c, err := NewOps(stream, loader)
	check(t, err)
	check(t, c.Preload())
	t.Cleanup(func() {
		check(t, stream.Sync(context.Background()))
		check(t, c.Close())
	})
	return &cudaRig{
		Ops: c, t: t, transfers: &transfers{dev: dev, stream: stream}, cpu: newTestCPU(t), rng: rand.New(rand.NewPCG(1, 2)),
	}
}

// within returns the rig for a subtest.
func (r *cudaRig) within(t testing.TB) *cudaRig {
	sub := *r
	sub.t = t
	return &sub
}

// upload copies a dense host view to the device.
func (r *cudaRig) upload(host View) View {
	r.t.Helper()
	v := place(r.t, r.loader.Device(), host.DType(), host.Shape())
	if v.Size() > 0 {
		r.send(v, host)
	}
	return v
}

// send copies a dense host view to a dense device view.
func (r *cudaRig) send(to, host View) {
	r.t.Helper()
	check(r.t, r.transfers.upload([]uint64{to.Addr()}, [][]byte{tensor.Bytes(host)}))
}

// download copies a dense device view to the host.
func (r *cudaRig) download(v View) (View, error) {
	shape := v.Shape()
	host := tensor.New(v.DType(), shape[:]...)
	if host.Size() == 0 {
		return host, r.stream.Sync(context.Background())
	}
	return host, r.transfers.download([][]byte{tensor.Bytes(host)}, []uint64{v.Addr()})
}

func TestCUDAOps(t *testing.T) {
	rig := newCUDARig(t)
	device := func(t *testing.T) opstest.Device {
		r := rig.within(t)
		return opstest.Device{Ops: r.Ops, Upload: r.upload, Download: r.download}
	}
	opstest.TestOps(t, device, tensor.F32, tensor.BF16, tensor.F16)
}

func TestCUDAOptimSuite(t *testing.T) {
	rig := newCUDARig(t)
	opstest.TestOptim(t, func(t *testing.T) opstest.Device {
		r := rig.within(t)
		return opstest.Device{Optim: r.Ops, Upload: r.upload, Download: r.download}
	})
}

// like returns an uninitialised device view of v's shape.
func (r *cudaRig) like(dtype tensor.DType, v View) View {
	r.t.Helper()
	return place(r.t, r.loader.Device(), dtype, v.Shape())
}

// normal returns random values on the device, and on the host as float32, both rounded to dtype.
func (r *cudaRig) normal(dtype tensor.DType, shape ...int) (device, host View) {
	host = normal(r.rng, shape...)
	return r.put(dtype, host), host
}

// put rounds a float32 host view to dtype, in place, and returns a copy on the device in that type.
func (r *cudaRig) put(dtype tensor.DType, host View) View {
	shape := host.Shape()
	rounded := tensor.New(dtype, shape[:]...)
	r.cpu.Copy(rounded, host)
	r.cpu.Copy(host, rounded)
	settle(r.t, r.cpu)
	return r.upload(rounded)
}

// values returns a device view as float32.
func (r *cudaRig) values(v View) []float32 {
	r.t.Helper()
	host, err := r.download(v)
	check(r.t, err)
	shape := v.Shape()
	wide := tensor.New(tensor.F32, shape[:]...)
	r.cpu.Copy(wide, host)
	settle(r.t, r.cpu)
	return tensor.Data[float32](wide)
}

// near fails the test unless got, on the device, equals want up to a rounding of its type and some roundings of the
// largest value to float32.
func (r *cudaRig) near(what string, got, want View) {
	r.t.Helper()
	r.nearSum(what, got, want, nil)
}

// nearSum does the same for a product added to old: in a 16-bit tensor, cuBLASLt may round the product before the
// addition.
func (r *cudaRig) nearSum(what string, got, want View, old []float32) {
	r.t.Helper()
	settle(r.t, r.cpu)
	relative := map[tensor.DType]float64{tensor.F32: 0x1p-22, tensor.F16: 0x1p-10, tensor.BF16: 0x1p-7}[got.DType()]
	xs, ws := r.values(got), tensor.Data[float32](want)
	if got.Size() == 0 && want.Size() == 0 {
		return
	}
	d, err := near.Of(xs, ws, near.Finite)
	if err == nil {
		err = near.Each(xs, ws, near.Finite, func(i int) float64 {
			w := math.Abs(float64(ws[i]))
			bound := relative*w + max(0x1p-18, relative*0x1p-6)*d.Largest
			if old != nil {
				bound += relative / 2 * (w + math.Abs(float64(old[i])))
			}
			return bound
		})
	}
	if err != nil {
		r.t.Fatalf("%s of %v: %v", what, got.Shape(), err)
	}
}
