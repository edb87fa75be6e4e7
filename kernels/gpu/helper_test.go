//go:build cuda

package gpu

import (
	"context"
	"math/rand/v2"
	"testing"
	"unsafe"

	"go.uber.org/goleak"

	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/kernels/cpu"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

var causal = partition.Band{Lo: -partition.Unbounded}

func span(lo, hi int) partition.Range { return partition.Range{Lo: lo, Hi: hi} }

// wholeTile returns the tile of a sequence.
func wholeTile(seq int, band partition.Band) partition.Tile {
	return partition.Tile{Q: span(0, seq), K: span(0, seq), Band: band}
}

// place returns dense, uninitialised memory of a device.
func place(t testing.TB, dev *cuda.Device, dtype tensor.DType, shape [4]int) View {
	t.Helper()
	mem, err := dev.Alloc(int64(shape[0] * shape[1] * shape[2] * shape[3] * dtype.Size()))
	check(t, err)
	return tensor.Dense(mem, dtype, 0, shape)
}

// noise returns n bfloat16 numbers of about 1, since zeros would draw less power.
func noise(n, heads int) []uint16 {
	xs, state := make([]uint16, n), uint32(heads)
	for i := range xs {
		state = state*1664525 + 1013904223
		xs[i] = uint16(state>>31<<15 | 0x3f00 | state>>24&0x7f)
	}
	return xs
}

// allRows lists the rows up to n.
func allRows(n int) []int {
	rows := make([]int, n)
	for i := range rows {
		rows[i] = i
	}
	return rows
}

// openGPU opens the first GPU, and closes it after the test's other cleanups.
func openGPU(t testing.TB) (*cuda.Device, *cuda.Stream, *Loader) {
	t.Helper()
	dev, err := cuda.Open(0)
	check(t, err)
	stream, err := dev.NewStream("compute", false)
	check(t, err)
	loader, err := NewLoader(dev)
	check(t, err)
	t.Cleanup(func() {
		check(t, stream.Close())
		check(t, dev.Close())
	})
	return dev, stream, loader
}

// newTestCPU returns the CPU kernels to which tests compare the GPU.
func newTestCPU(t testing.TB) *cpu.Kernels {
	stream := tensor.NewHostStream("test")
	t.Cleanup(func() { stream.Close() })
	return cpu.New(stream)
}

// transfers copies between the host and the device, through pinned memory that it keeps: pinning memory and waiting for
// the device take longer than most copies.
type transfers struct {
	dev    *cuda.Device
	stream *cuda.Stream
	pinned *cuda.Pinned // of the largest transfer so far
}

// upload copies host memory to device addresses.
func (x *transfers) upload(dst []uint64, src [][]byte) error {
	pinned, addr, err := x.stage(src)
	if err != nil {
		return err
	}
	at := 0
	for i, b := range src {
		copy(pinned[at:], b)
		x.stream.Copy(dst[i], addr+uint64(at), int64(len(b)))
		at += len(b)
	}
	return x.stream.Sync(context.Background())
}

// download copies from device addresses to host memory.
func (x *transfers) download(dst [][]byte, src []uint64) error {
	pinned, addr, err := x.stage(dst)
	if err != nil {
		return err
	}
	at := 0
	for i, b := range dst {
		x.stream.Copy(addr+uint64(at), src[i], int64(len(b)))
		at += len(b)
	}
	if err := x.stream.Sync(context.Background()); err != nil {
		return err
	}
	for _, b := range dst {
		pinned = pinned[copy(b, pinned):]
	}
	return nil
}

// stage returns pinned memory for all buffers of a transfer, and its address.
func (x *transfers) stage(buffers [][]byte) (pinned []byte, addr uint64, err error) {
	bytes := int64(1)
	for _, b := range buffers {
		bytes += int64(len(b))
	}
	if x.pinned == nil || x.pinned.Host().Bytes() < bytes {
		if x.pinned != nil {
			err = x.pinned.Free()
		}
		if x.pinned = nil; err == nil {
			x.pinned, err = x.dev.AllocHost(bytes)
		}
	}
	if err != nil {
		return nil, 0, err
	}
	host := x.pinned.Host()
	return hostBytes(host), uint64(uintptr(host.Ptr())), nil
}

// uploadAll copies buffers to new memory of the device.
func (x *transfers) uploadAll(buffers []*tensor.Host) (copies []tensor.Memory, err error) {
	var dst []uint64
	var src [][]byte
	for _, h := range buffers {
		mem, err := x.dev.Alloc(h.Bytes())
		if err != nil {
			return nil, err
		}
		copies, dst, src = append(copies, mem), append(dst, uint64(uintptr(mem.Ptr()))), append(src, hostBytes(h))
	}
	return copies, x.upload(dst, src)
}

// downloadAll copies memory of the device to buffers.
func (x *transfers) downloadAll(buffers []*tensor.Host, from []tensor.Memory) error {
	var dst [][]byte
	var src []uint64
	for i, h := range buffers {
		dst, src = append(dst, hostBytes(h)), append(src, uint64(uintptr(from[i].Ptr())))
	}
	return x.download(dst, src)
}

func hostBytes(h *tensor.Host) []byte {
	return unsafe.Slice((*byte)(h.Ptr()), h.Bytes())
}

func settle(t testing.TB, c *cpu.Kernels) {
	t.Helper()
	check(t, c.Stream().Sync(context.Background()))
}

func normal(rng *rand.Rand, shape ...int) View {
	v := tensor.New(tensor.F32, shape...)
	for i := range tensor.Data[float32](v) {
		tensor.Data[float32](v)[i] = float32(rng.NormFloat64())
	}
	return v
}
